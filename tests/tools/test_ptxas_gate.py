"""The ptxas gate reads the compiler's report: a clean kernel passes, each kind of trouble fails."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GATE = Path(__file__).resolve().parents[2] / "tools" / "ptxas_gate.py"
sys.path.insert(0, str(GATE.parent))
import ptxas_gate  # noqa: E402

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4finePf' for 'sm_90a'
ptxas info    : Function properties for _Z4finePf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 384 bytes cmem[0]
"""
SPILL = CLEAN.replace("0 bytes stack frame, 0 bytes spill stores", "16 bytes stack frame, 8 bytes spill stores")
STACK = CLEAN.replace("0 bytes stack frame", "256 bytes stack frame")
LOCAL = CLEAN.replace("384 bytes cmem[0]", "384 bytes cmem[0], 24 bytes lmem")
WGMMA = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"


def test_a_clean_report_has_no_problem():
    (kernel,) = ptxas_gate.parse(CLEAN)
    assert (kernel.name, kernel.arch, kernel.registers, kernel.problems) == ("_Z4finePf", "sm_90a", 168, [])


@pytest.mark.parametrize(
    "report, word",
    [(SPILL, "spills"), (STACK, "stack"), (LOCAL, "local memory"), (CLEAN + WGMMA, "C7510"), (WGMMA + CLEAN, "C7510")],
)
def test_each_kind_of_trouble_is_found(report, word):
    problems = [problem for kernel in ptxas_gate.parse(report) for problem in kernel.problems]
    assert any(word in problem for problem in problems)


def test_trouble_stays_with_its_kernel():
    other = SPILL.replace("_Z4finePf", "_Z5otherPf")
    kernels = ptxas_gate.parse(CLEAN + other + CLEAN)
    assert [bool(kernel.problems) for kernel in kernels] == [False, True, False]


def build_dir(tmp_path, report):
    """A build folder with one source for Hopper and one that the gate leaves alone."""
    entries = []
    for source, text in (("src/cuda/sm90/fwd/launch.cu", report), ("src/cuda/generic/launch.cu", SPILL)):
        obj = source.replace("/", "_") + ".o"
        command = f"nvcc -x cu -c /repo/{source} -o {obj}"
        entries.append({"directory": str(tmp_path), "command": command, "file": f"/repo/{source}"})
        if text is not None:
            (tmp_path / (obj + ptxas_gate.REPORT_SUFFIX)).write_text(text)
    # The same source for the tests that run kernels on the CPU: no kernel comes of it, and no report.
    emulated = {"directory": str(tmp_path), "command": "c++ -x c++ -c /repo/src/cuda/sm90/fwd/launch.cu -o emulated.o"}
    entries.append({**emulated, "file": "/repo/src/cuda/sm90/fwd/launch.cu"})
    (tmp_path / "compile_commands.json").write_text(json.dumps(entries))
    return tmp_path


@pytest.mark.parametrize("report, code", [(CLEAN, 0), (SPILL, 1), (None, 1)])
def test_check_reads_the_sources_for_hopper(tmp_path, report, code):
    assert ptxas_gate.check(build_dir(tmp_path, report)) == code


def test_record_keeps_the_report_and_the_exit_code(tmp_path):
    obj = tmp_path / "x.o"
    say = "import sys; sys.stderr.write('ptxas info    : 0 bytes gmem\\nwarning: look here\\n')"
    done = subprocess.run(
        [sys.executable, GATE, "record", sys.executable, "-c", say, "-o", obj], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == "warning: look here\n"
    assert "0 bytes gmem" in Path(str(obj) + ptxas_gate.REPORT_SUFFIX).read_text()

    failing = subprocess.run([sys.executable, GATE, "record", sys.executable, "-c", "raise SystemExit(3)", "-o", obj])
    assert failing.returncode == 3
