"""What a kernel's files are called, and what they hold: the same where they are compiled and where they are launched."""

import hashlib
import inspect
import struct

# What a launch may be given behind a kernel's own arguments, by the place in which launch.c has it.
LAUNCH_ARGUMENTS = [f"{index}Idx.{axis}" for index in ("block", "thread") for axis in "xyz"] + ["tirx.use_dyn_shared_memory"]


def kernel_name(build, args, options) -> str:
    """Of what `build` makes of these arguments, all of which are plain values and dtypes."""
    bound = inspect.signature(build).bind(*args, **options)
    bound.apply_defaults()
    return f"{build.__name__}_{hashlib.sha256(str(sorted((name, str(value)) for name, value in bound.arguments.items())).encode()).hexdigest()[:16]}"


def device_code(library: bytes) -> bytes:
    """The second ELF file in a library: the first is itself."""
    code = library[library.index(b"\x7fELF", 1) :]
    programs, sections = struct.unpack_from("<2Q", code, 32)
    program_bytes, program_count, section_bytes, section_count = struct.unpack_from("<4H", code, 54)
    return code[: max(sections + section_bytes * section_count, programs + program_bytes * program_count)]
