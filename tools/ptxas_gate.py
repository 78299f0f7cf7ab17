#!/usr/bin/env python3
"""Refuses kernels of the paths sm90 and sm80 that spill registers, touch local memory, or whose wgmma instructions are serialised.

Two steps, because the compiler says these things once, while it compiles:

    ptxas_gate.py record nvcc ... -o x.o    runs the command and keeps ptxas' report in x.o.ptxas.txt
                                            (-DFLASH_QLA_PTXAS_REPORT=ON makes this the build's CUDA launcher)
    ptxas_gate.py check BUILD_DIR           reads the reports of all sources of these paths and prints a line a kernel and GPU

Exit code 1: a kernel failed, or a source has no report.
"""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPORT_SUFFIX = ".ptxas.txt"
GATED_SOURCES = ("/src/cuda/sm90/", "/src/cuda/sm80/")

ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
LOCAL_MEMORY = re.compile(r"(\d+) bytes lmem")
# ptxas' notes that it could not run wgmma asynchronously; each has a reason of its own, all of them cost the overlap.
SERIALISED = re.compile(r"\(C751\d\).*")


@dataclass
class Kernel:
    name: str
    arch: str
    registers: int = 0
    problems: list = field(default_factory=list)


def parse(report: str) -> list:
    """Kernels of one ptxas -v report, each with what is wrong with it; a device function counts for the kernel before it."""
    kernels = []
    for line in report.splitlines():
        if match := ENTRY.search(line):
            kernels.append(Kernel(name=match[1], arch=match[2]))
            continue
        if match := SERIALISED.search(line):
            # The note may come before the first kernel is named: it fails the file all the same.
            if not kernels:
                kernels.append(Kernel(name="(before the first kernel)", arch="?"))
            kernels[-1].problems.append(match[0].strip())
        if not kernels:
            continue
        kernel = kernels[-1]
        if match := FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            if stack:
                kernel.problems.append(f"{stack} bytes of stack")
            if stores or loads:
                kernel.problems.append(f"spills: {stores} bytes stored, {loads} bytes loaded")
        if match := REGISTERS.search(line):
            kernel.registers = int(match[1])
        if (match := LOCAL_MEMORY.search(line)) and int(match[1]):
            kernel.problems.append(f"{match[1]} bytes of local memory")
    return kernels


def record(command: list) -> int:
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    for line in done.stderr.splitlines():
        if done.returncode or not (line.startswith("ptxas info") or FRAME.search(line)):
            print(line, file=sys.stderr)
    if done.returncode == 0 and "-o" in command:
        Path(command[command.index("-o") + 1] + REPORT_SUFFIX).write_text(done.stderr)
    return done.returncode


def objects(build_dir: Path) -> list:
    """(source, object) of every gated source that nvcc compiles, by the build's compile_commands.json. (For the tests that
    run kernels on the CPU a C++ compiler takes the same files.)"""
    pairs = []
    for entry in json.loads((build_dir / "compile_commands.json").read_text()):
        if any(folder in entry["file"] for folder in GATED_SOURCES) and entry["file"].endswith(".cu"):
            words = shlex.split(entry["command"])
            if not any(Path(word).name == "nvcc" for word in words):
                continue
            pairs.append((entry["file"], Path(entry["directory"]) / words[words.index("-o") + 1]))
    return pairs


def demangle(name: str) -> str:
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return name


def check(build_dir: Path) -> int:
    failed = passed = 0
    for source, obj in objects(build_dir):
        report = Path(str(obj) + REPORT_SUFFIX)
        if not report.exists():
            print(f"FAIL {source}: no ptxas report; configure with -DFLASH_QLA_PTXAS_REPORT=ON and build again")
            failed += 1
            continue
        for kernel in parse(report.read_text()):
            verdict = "FAIL" if kernel.problems else "ok  "
            print(f"{verdict} {kernel.arch} {kernel.registers:3d} registers  {demangle(kernel.name)[:160]}")
            for problem in kernel.problems:
                print(f"       {problem}")
            failed += bool(kernel.problems)
            passed += not kernel.problems
    print(f"ptxas gate: {passed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    if len(sys.argv) > 2 and sys.argv[1] == "record":
        return record(sys.argv[2:])
    if len(sys.argv) == 3 and sys.argv[1] == "check":
        return check(Path(sys.argv[2]))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
