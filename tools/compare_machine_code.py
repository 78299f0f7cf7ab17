#!/usr/bin/env python3
"""Compares the machine code of two builds, kernel by kernel: a change of notation has to leave it as it was.

    compare_machine_code.py OLD NEW     each a library, a program or an object file with CUDA code in it

Prints a line for each kernel whose code differs or that only one of them has, then a count. Exit code 1: there is such a
kernel. Needs cuobjdump: on PATH, in CUOBJDUMP, or `pip install nvidia-cuda-cuobjdump`.
"""

import importlib.util
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

# ELF, 64 bits, little-endian: the header's fields from e_shoff on, and a section's name, type, offset and size.
_HEADER = struct.Struct("<40xQ10xHHH")
_SECTION = struct.Struct("<II16xQQ24x")
_NO_BITS = 8
# nvcc names a file's unnamed namespace by a hash of the file's path and options, which two build trees do not share.
_UNNAMED = re.compile(r"(?<=_GLOBAL__N__)[0-9a-f]{8}(?=_)")


def sections(elf: bytes) -> dict:
    """Contents of the sections of an ELF file, by name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")
    offset, entry_size, count, names_index = _HEADER.unpack_from(elf)
    headers = [_SECTION.unpack_from(elf, offset + i * entry_size) for i in range(count)]
    _, _, names_at, names_size = headers[names_index]
    names = elf[names_at : names_at + names_size]
    return {
        names[name : names.index(b"\0", name)].decode(): b"" if kind == _NO_BITS else elf[at : at + size]
        for name, kind, at, size in headers
    }


def kernels_of_cubin(elf: bytes) -> dict:
    """Machine code by the kernel's mangled name."""
    return {name[len(".text.") :]: code for name, code in sections(elf).items() if name.startswith(".text.")}


def cuobjdump() -> str:
    """The tool's path."""
    found = os.environ.get("CUOBJDUMP") or shutil.which("cuobjdump")
    spec = None if found else importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else ():
        found = found or next((str(path) for path in Path(folder).glob("*/bin/cuobjdump")), None)
    if not found:
        raise SystemExit("compare_machine_code.py: needs cuobjdump: pip install nvidia-cuda-cuobjdump")
    return found


def kernels(file: Path) -> dict:
    """Machine code of all of a file's kernels by (architecture, mangled name)."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump(), "-xelf", "all", str(file.resolve())], cwd=folder, check=True, capture_output=True)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            architecture = cubin.stem.rpartition(".")[2]  # libx.1.sm_90a.cubin
            for name, code in kernels_of_cubin(cubin.read_bytes()).items():
                found[architecture, _UNNAMED.sub("", name)] = code
    return found


def differences(old: dict, new: dict) -> list:
    """A line for each kernel that is not the same in both."""
    lines = []
    for key in sorted(old.keys() | new.keys()):
        title = " ".join(key)
        if key not in new:
            lines.append(f"only in the old build: {title}")
        elif key not in old:
            lines.append(f"only in the new build: {title}")
        elif old[key] != new[key]:
            lines.append(f"other code ({len(old[key])} bytes, then {len(new[key])}): {title}")
    return lines


def main() -> int:
    if len(sys.argv) != 3:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = (kernels(Path(name)) for name in sys.argv[1:])
    if not old or not new:
        print("compare_machine_code.py: a file without kernels can show nothing", file=sys.stderr)
        return 2
    lines = differences(old, new)
    print("\n".join([*lines, f"{len(old.keys() & new.keys())} kernels in both, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
