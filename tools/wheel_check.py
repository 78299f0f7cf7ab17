#!/usr/bin/env python3
"""Checks that a wheel runs where its tag says, and with every tvm-ffi that its metadata admits.

    wheel_check.py WHEEL [--cuda] [--tvm-ffi VERSION ...] [--torch]

Prints a line a check; exit code 1 where one fails. It reads the file with readelf, without a network. With --cuda the wheel
must hold machine code for the architectures that src/cuda/CMakeLists.txt declares (or --architectures), and without, none.
--tvm-ffi also installs it into an empty environment with each of these versions ("floor": the oldest that the wheel
admits, "newest": the newest that pip finds), and runs tools/wheel_program.py there; this needs a package index.
--torch lets that program use the PyTorch of the interpreter that runs the check.
"""

import argparse
import importlib.util
import re
import struct
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Dict, Iterable, List, Set, Tuple

ROOT = Path(__file__).resolve().parents[1]
MODULE = "flash_qla/_lib/flash_qla_ffi.so"
MEBIBYTE = 1 << 20
SIZE_LIMIT = 64 * MEBIBYTE

NAME = re.compile(r"flash_qla_native-[^-]+-(?P<tag>py3-none-manylinux_2_28_(?P<machine>x86_64|aarch64))\.whl")
MACHINES = {"x86_64": "Advanced Micro Devices X86-64", "aarch64": "AArch64"}

# The newest that distributions with glibc 2.28 have (PEP 600; Red Hat Enterprise Linux 8 with its GCC 8).
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}

LIBRARIES = re.compile(
    r"lib(tvm_ffi\.so|stdc\+\+\.so\.6|gcc_s\.so\.1|c\.so\.6|m\.so\.6|pthread\.so\.0|dl\.so\.2|rt\.so\.1)|"
    r"ld-linux-(x86-64\.so\.2|aarch64\.so\.1)"
)

# All there in apache-tvm-ffi 0.1.11. With another one, the oldest version that works has to be found out anew.
TVM_FFI_SYMBOLS = {
    "TVMFFIBacktrace",
    "TVMFFIDataTypeFromString",
    "TVMFFIDataTypeToString",
    "TVMFFIEnvGetDLPackManagedTensorAllocator",
    "TVMFFIEnvGetStream",
    "TVMFFIEnvTensorAlloc",
    "TVMFFIErrorMoveFromRaised",
    "TVMFFIErrorSetRaised",
    "TVMFFIGetTypeInfo",
}


def tag_problems(filename: str, metadata: str, elf_header: str) -> List[str]:
    """The name's tag, against the tags of the file WHEEL and the machine of `readelf -h`."""
    match = NAME.fullmatch(filename)
    if match is None:
        return [f"{filename} is not flash_qla_native-VERSION-py3-none-manylinux_2_28_MACHINE.whl"]
    problems = []
    tags = re.findall(r"^Tag: (\S+)$", metadata, re.M)
    if tags != [match["tag"]]:
        problems.append(f"the name says {match['tag']}, its file WHEEL {' '.join(tags) or 'nothing'}")
    machine = re.search(r"Machine:\s+(.*)", elf_header)
    if machine is None or machine[1].strip() != MACHINES[match["machine"]]:
        problems.append(f"the name says {match['machine']}, the module is for {machine[1] if machine else 'nothing'}")
    return problems


def content_problems(files: Dict[str, bytes]) -> List[str]:
    """The module is the only compiled file: nothing was grafted, and none was forgotten in the package."""
    compiled = sorted(name for name, start in files.items() if start[:4] == b"\x7fELF")
    return [] if compiled == [MODULE] else [f"compiled files are {compiled}, and {MODULE} alone is expected"]


def symbol_version_problems(versions: str) -> List[str]:
    """`readelf -VW`: needed versions of symbols."""
    needed = set(re.findall(r"Name: (\S+)\s+Flags", versions.partition("Version needs section")[2]))
    problems = [] if needed else ["readelf lists no needed versions of symbols"]
    for name in sorted(needed):
        match = re.fullmatch(r"([A-Z]+)_([\d.]+)", name)
        limit = NEWEST_SYMBOLS.get(match[1]) if match else None
        if limit is None:
            problems.append(f"{name} is a version that this check does not know")
        elif tuple(map(int, match[2].split("."))) > limit:
            problems.append(f"{name} is newer than {match[1]}_{'.'.join(map(str, limit))}")
    return problems


def library_problems(dynamic: str) -> List[str]:
    """`readelf -dW`: needed libraries, and folders to search for them."""
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    problems = [f"it needs the library {name}" for name in needed if not LIBRARIES.fullmatch(name)]
    problems += [f"{kind} is set: {place}" for kind, place in re.findall(r"\((RPATH|RUNPATH)\).*\[(.*)\]", dynamic)]
    return problems + ([] if needed else ["readelf lists no needed library"])


def undefined_symbols(symbols: str) -> Set[str]:
    """Names in `readelf --dyn-syms -W` that another library must have, versions behind an @; weak ones may stay absent."""
    rows = (line.split() for line in symbols.splitlines())
    return {row[7] for row in rows if len(row) >= 8 and row[6] == "UND" and row[4] != "WEAK"}


def symbol_problems(symbols: str) -> List[str]:
    """tvm-ffi's symbols are those that are known to be in the oldest version; all others have a version."""
    undefined = undefined_symbols(symbols)
    of_tvm_ffi = {name for name in undefined if name.startswith("TVMFFI")}
    problems = [
        f"{name} is new among tvm-ffi's symbols: test the oldest version of apache-tvm-ffi anew"
        for name in sorted(of_tvm_ffi - TVM_FFI_SYMBOLS)
    ]
    problems += [
        f"{name} has no version: no library was found for it when the module was linked"
        for name in sorted(undefined - of_tvm_ffi)
        if "@" not in name
    ]
    return problems + ([] if of_tvm_ffi else ["it asks for no symbol of tvm-ffi"])


def fat_binaries(section: bytes) -> List[Set[str]]:
    """Architectures in each fat binary of .nv_fatbin, one for each CUDA source: "sm_90a" (machine code), "compute_120" (PTX).

    A fat binary is a header (magic number, u16 version, u16 header size, u64 size of what follows) and entries: u16 kind
    (1: PTX, 2: machine code), u16, u32 header size, u64 payload size, 12 bytes, u32 architecture, 8 bytes, u64 flags.
    cuobjdump says the same; it is not among the compiler's packages.
    """
    found: List[Set[str]] = []
    at = 0
    while at + 16 <= len(section):
        magic, _, header, size = struct.unpack_from("<IHHQ", section, at)
        if magic != 0xBA55ED50:  # filling, up to the alignment
            at += 8
            continue
        entry, end = at + header, at + header + size
        architectures = set()
        while entry < end:
            kind, _, entry_header, payload, architecture, flags = struct.unpack_from("<HHIQ12xI8xQ", section, entry)
            if kind not in (1, 2):
                raise ValueError(f"an entry of kind {kind} in .nv_fatbin, where PTX (1) or machine code (2) is expected")
            suffix = "a" if flags & 0x100000 else "f" if flags & 0x200000 else ""
            architectures.add(f"{'compute' if kind == 1 else 'sm'}_{architecture}{suffix}")
            entry += entry_header + payload
        found.append(architectures)
        at = end
    return found


def expand(architectures: Iterable[str]) -> Set[str]:
    """CMake's names of architectures: 80-real is sm_80, 120-virtual is compute_120, and 90 both."""
    names = set()
    for word in architectures:
        number, _, kind = word.partition("-")
        names |= {f"sm_{number}"} if kind != "virtual" else set()
        names |= {f"compute_{number}"} if kind != "real" else set()
    return names


def declared_architectures(cmake: str) -> List[Set[str]]:
    """The lists of src/cuda/CMakeLists.txt: for the kernels of any GPU, and for Hopper's."""
    lists = re.findall(r"^set\(FLASH_QLA_(?:GENERIC|HOPPER)_ARCHITECTURES ([^\")]*?)\s*(?:CACHE|\))", cmake, re.M)
    if len(lists) != 2:
        raise ValueError(f"src/cuda/CMakeLists.txt must set two lists of architectures, and {len(lists)} were found")
    return [expand(words.split()) for words in lists]


def architecture_problems(found: List[Set[str]], declared: List[Set[str]]) -> List[str]:
    """Each fat binary holds exactly one of the declared lists, and each list is in use; nothing declared: nothing there."""

    def text(names: Set[str]) -> str:
        return "{" + " ".join(sorted(names)) + "}"

    expected = ", ".join(map(text, declared)) or "none (a wheel for the CPU alone)"
    strange = sorted({text(names) for names in found if names not in declared})
    problems = [f"machine code for {names}, where the build declares {expected}" for names in strange]
    return problems + [f"no machine code for {text(names)}" for names in declared if names not in found]


def size_problems(size: int) -> List[str]:
    return [] if size <= SIZE_LIMIT else [f"{size / MEBIBYTE:.1f} MiB are more than {SIZE_LIMIT / MEBIBYTE:.0f} MiB"]


def floor_of(metadata: str) -> str:
    """The oldest apache-tvm-ffi that METADATA admits."""
    match = re.search(r"^Requires-Dist: apache-tvm-ffi\b.*?>=([\d.]+\d)", metadata, re.M)
    if match is None:
        raise ValueError("METADATA asks for no apache-tvm-ffi>=VERSION")
    return match[1]


def run_in_environment(wheel: Path, version: str, torch: bool) -> Tuple[bool, str]:
    """Whether wheel_program.py passes beside this version of tvm-ffi ("newest": any), and its last lines."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "environment"
        requirement = "apache-tvm-ffi" if version == "newest" else f"apache-tvm-ffi=={version}"
        python = environment / "bin" / "python"
        commands = [
            [sys.executable, "-m", "venv", "--without-pip", environment],
            [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile", wheel, requirement],
            [python, ROOT / "tools" / "wheel_program.py"],
        ]
        output = ""
        for number, command in enumerate(commands):
            if torch and number == 2:
                # Behind the environment's own packages, so that flash_qla and tvm-ffi are those that were installed.
                spec = importlib.util.find_spec("torch")
                if spec is None:
                    return False, f"--torch: {sys.executable} has no PyTorch"
                (packages,) = environment.glob("lib/python*/site-packages")
                (packages / "torch.pth").write_text(str(Path(spec.origin).parents[1]))
                command = [*command, "--torch"]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=folder)
            output = (done.stdout + done.stderr).strip()
            if done.returncode != 0:
                return False, output[-3000:]
        return True, output.splitlines()[-1]


def readelf(module: Path, *options: str) -> str:
    return subprocess.run(["readelf", *options, str(module)], capture_output=True, text=True, check=True).stdout


def fat_binary_section(module: Path) -> bytes:
    match = re.search(r"\s\.nv_fatbin\s+\S+\s+\S+\s+([0-9a-f]+)\s+([0-9a-f]+)", readelf(module, "-SW"))
    if match is None:
        return b""
    offset, size = int(match[1], 16), int(match[2], 16)
    return module.read_bytes()[offset : offset + size]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--architectures", action="append", metavar="LIST", help='"80-real 120-virtual", for each list')
    parser.add_argument("--tvm-ffi", nargs="+", default=[], metavar="VERSION")
    parser.add_argument("--torch", action="store_true")
    arguments = parser.parse_args()

    wheel = arguments.wheel.resolve()
    declared: List[Set[str]] = []
    if arguments.cuda and arguments.architectures:
        declared = [expand(words.split()) for words in arguments.architectures]
    elif arguments.cuda:
        declared = declared_architectures((ROOT / "src" / "cuda" / "CMakeLists.txt").read_text())

    failed = 0

    def report(check: str, problems: List[str], note: str) -> None:
        nonlocal failed
        failed += bool(problems)
        print(f"{check:<18}" + ("FAILED  " + "; ".join(problems) if problems else f"ok      {note}"))

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        starts = {name: archive.open(name).read(4) for name in names}
        report("content", content_problems(starts), MODULE)
        if MODULE not in names:
            return 1
        module = Path(archive.extract(MODULE, folder))
        (info,) = (name.partition("/")[0] for name in names if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        metadata, tags = (archive.read(f"{info}/{name}").decode() for name in ("METADATA", "WHEEL"))
        size, module_size = wheel.stat().st_size, module.stat().st_size
        dynamic, versions, symbols = (readelf(module, option, "-W") for option in ("-d", "-V", "--dyn-syms"))
        found = fat_binaries(fat_binary_section(module))
        report("tag", tag_problems(wheel.name, tags, readelf(module, "-h")), wheel.name)
        newest = {}
        for kind, number in re.findall(r"Name: ([A-Z]+)_([\d.]+)\s+Flags", versions):
            newest[kind] = max(newest.get(kind, (0,)), tuple(map(int, number.split("."))))
        note = ", ".join(f"{kind} {'.'.join(map(str, number))}" for kind, number in sorted(newest.items()))
        report("symbol versions", symbol_version_problems(versions), f"newest are {note}")
        report("libraries", library_problems(dynamic), " ".join(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)))
        own = len({name for name in undefined_symbols(symbols) if name.startswith("TVMFFI")})
        report("symbols", symbol_problems(symbols), f"{own} of tvm-ffi, all others have a version")
        note = " ".join(sorted(set().union(*found))) or "none"
        report("architectures", architecture_problems(found, declared), f"{note}, in {len(found)} sources")
        report("size", size_problems(size), f"{size / MEBIBYTE:.2f} MiB, module {module_size / MEBIBYTE:.2f} MiB")
    for version in arguments.tvm_ffi:
        passed, output = run_in_environment(wheel, floor_of(metadata) if version == "floor" else version, arguments.torch)
        report(f"tvm-ffi {version}", [] if passed else [output], output)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
