#!/usr/bin/env python3
"""Compares the machine code of two builds, kernel by kernel: a change of notation has to leave it as it was.

    compare_machine_code.py [--names] OLD NEW     each a library, a program or an object file with CUDA code in it

Prints a line for each kernel whose code or number of registers differs or that only one of them has, then a count. Exit
code 1: there is such a kernel. A kernel that has another name in the new build, and the same code, is the same kernel;
with --names each such pair is printed. Needs cuobjdump: on PATH, in CUOBJDUMP, or `pip install nvidia-cuda-cuobjdump`.
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

# ELF, 64 bits, little-endian: the header's fields from e_shoff on, and a section's name, type, offset, size and info.
_HEADER = struct.Struct("<40xQ10xHHH")
_SECTION = struct.Struct("<II16xQQ4xI16x")
_NO_BITS = 8
# The section .nv.info: format, attribute and size of an entry; the one that has a symbol's number and its registers.
_ENTRY, _PAIR = struct.Struct("<BBH"), struct.Struct("<II")
_WORDS, _REGISTERS = 4, 0x2F
# nvcc names a file's unnamed namespace by a hash of the file's path and options, which two build trees do not share.
_UNNAMED = re.compile(r"(?<=_GLOBAL__N__)[0-9a-f]{8}(?=_)")


def sections(elf: bytes) -> dict:
    """Contents and info field of the sections of an ELF file, by name."""
    if elf[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not an ELF file of 64 bits, little-endian")
    offset, entry_size, count, names_index = _HEADER.unpack_from(elf)
    headers = [_SECTION.unpack_from(elf, offset + i * entry_size) for i in range(count)]
    _, _, names_at, names_size, _ = headers[names_index]
    names = elf[names_at : names_at + names_size]
    return {
        names[name : names.index(b"\0", name)].decode(): (b"" if kind == _NO_BITS else elf[at : at + size], info)
        for name, kind, at, size, info in headers
    }


def registers(info: bytes) -> dict:
    """Registers of a thread by the number of the kernel's symbol, from the section .nv.info: entries of a format, an
    attribute and a size, of which those that hold words have format 4."""
    found, at = {}, 0
    while at + 4 <= len(info):
        form, attribute, size = _ENTRY.unpack_from(info, at)
        at += 4
        if form == _WORDS:
            if attribute == _REGISTERS:
                symbol, count = _PAIR.unpack_from(info, at)
                found[symbol] = count
            at += size
    return found


def kernels_of_cubin(elf: bytes) -> dict:
    """Registers and machine code by the kernel's mangled name."""
    found = sections(elf)
    counts = registers(found[".nv.info"][0]) if ".nv.info" in found else {}
    return {
        name[len(".text.") :]: (counts.get(info & 0xFFFFFF, 0), code)
        for name, (code, info) in found.items() if name.startswith(".text.")
    }  # fmt: skip


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
    """Registers and machine code of all of a file's kernels by (architecture, mangled name)."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([cuobjdump(), "-xelf", "all", str(file.resolve())], cwd=folder, check=True, capture_output=True)
        for cubin in sorted(Path(folder).glob("*.cubin")):
            architecture = cubin.stem.rpartition(".")[2]  # libx.1.sm_90a.cubin
            for name, code in kernels_of_cubin(cubin.read_bytes()).items():
                found[architecture, _UNNAMED.sub("", name)] = code
    return found


def renamed(old: dict, new: dict) -> list:
    """(old key, new key) of kernels that only one build has under their name, and whose registers and code are the same."""
    by_code = {}
    for key in sorted(new.keys() - old.keys()):
        by_code.setdefault((key[0], new[key]), []).append(key)
    pairs = []
    for key in sorted(old.keys() - new.keys()):
        if same := by_code.get((key[0], old[key])):
            pairs.append((key, same.pop(0)))
    return pairs


def differences(old: dict, new: dict) -> list:
    """A line for each kernel that is not the same in both."""
    pairs = renamed(old, new)
    lines = []
    for key in sorted((old.keys() | new.keys()) - {key for pair in pairs for key in pair}):
        title = " ".join(key)
        if key not in new:
            lines.append(f"only in the old build: {title}")
        elif key not in old:
            lines.append(f"only in the new build: {title}")
        elif old[key] != new[key]:
            (old_registers, old_code), (new_registers, new_code) = old[key], new[key]
            change = f"{old_registers} registers and {len(old_code)} bytes, then {new_registers} and {len(new_code)}"
            lines.append(f"other code ({change}): {title}")
    return lines


def main() -> int:
    names = [name for name in sys.argv[1:] if name != "--names"]
    if len(names) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    old, new = (kernels(Path(name)) for name in names)
    if not old or not new:
        print("compare_machine_code.py: a file without kernels can show nothing", file=sys.stderr)
        return 2
    lines, pairs = differences(old, new), renamed(old, new)
    if "--names" in sys.argv[1:]:
        for before, after in pairs:
            print(f"another name: {before[1]} is {after[1]}")
    count = f"{len(old.keys() & new.keys()) + len(pairs)} kernels in both ({len(pairs)} under other names)"
    print("\n".join([*lines, f"{count}, {len(lines)} differences"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
