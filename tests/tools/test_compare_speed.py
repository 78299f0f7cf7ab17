"""compare_speed.py times two builds in turns; here each is a package that only says what it is given."""

import subprocess
import sys
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "compare_speed.py"
MODULES = {
    "bench_inputs": """
def rows_of(mode, heads, seqs):
    names = [n for n in ("1x64", "1x128", "2x64") if not seqs or n in seqs.split(",")]
    return [dict(mode=mode, hq=1, hv=2, name=n, gates="mixed", option="") for n in names]
def make_inputs(row):
    return row
""",
    "bench_calls": """
import types
def calls_of(row, x):
    return [types.SimpleNamespace(run=lambda: x["name"])]
""",
    "bench_timing": """
def capture(run):
    return None, run()
def graphs_ms(graphs, replays):
    return [[MS[graphs[0]]] * replays]
""",
    "results": "import math\ndef geometric_mean(v):\n    return math.exp(sum(map(math.log, v)) / len(v))\n",
}


def build(folder, **ms):
    """A package whose calls take so many milliseconds by row."""
    package = folder / "flash_qla" / "cli"
    package.mkdir(parents=True)
    for place in (package, package.parent):
        (place / "__init__.py").touch()
    for name, text in MODULES.items():
        (package / f"{name}.py").write_text(text + (f"MS = {ms['of']}\n" if name == "bench_timing" else ""))
    return str(folder)


def run(tmp_path, new, *options):
    old = build(tmp_path / "old", of={"1x64": 1.0, "1x128": 2.0, "2x64": 4.0})
    return subprocess.run(
        [sys.executable, TOOL, old, build(tmp_path / "new", of=new), *options], capture_output=True, text=True, timeout=60)


def test_rows_and_their_mean(tmp_path):
    found = run(tmp_path, {"1x64": 1.0, "1x128": 4.0, "2x64": 2.0}, "--out", str(tmp_path / "rows"))
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[1] == "fwd 1/2 1x128: 2000.0 us, 4000.0 us, 0.500"
    assert lines[3] == "fwd: 1.0000 of the old speed (geometric mean of 3 rows); worst:"
    assert lines[4] == "  0.500 fwd 1/2 1x128"
    assert len((tmp_path / "rows").read_text().splitlines()) == 3


def test_what_was_not_timed_is_said(tmp_path):
    found = run(tmp_path, {"1x64": 1.0, "1x128": 2.0, "2x64": 4.0}, "--seconds", "0")
    assert "cut: fwd 1/2 1x64 and later rows of fwd were not timed" in found.stdout


def test_a_build_that_ends(tmp_path):
    found = run(tmp_path, {})
    assert found.returncode != 0 and "a build's process ended with code 1" in found.stderr
