"""gate.py says what a change costs by two result files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import gate  # noqa: E402


def report(**ms):
    """Result file with a row for each name: its time, or (time, times of others, recorded times)."""
    rows = []
    for i, (name, times) in enumerate(ms.items()):
        ours, peers, recorded = times if isinstance(times, tuple) else (times, {}, {})
        options = {"name": name}
        rows.append(dict(mode="fwd", hq=1, hv=2, seqlens=[i + 1], options=options, ms=ours, peers=peers, recorded=recorded))
    return {"machine": "X", "commit": "c", "date": "d", "rows": rows}


def test_a_change_that_costs_little_passes():
    lines, passed = gate.compare(report(a=1.0, b=2.0), report(a=1.02, b=2.0), 0.97)
    assert passed and lines[-1] == "passed"
    assert "speed 0.9901 of the old (geometric mean of 2 rows, 0.97 at least)" in lines
    assert lines[4].strip() == "0.980 fwd 1/2 1 name a: 1.0000 ms, then 1.0200"


@pytest.mark.parametrize("new, sentence", [
    (report(a=1.1, b=2.2), "speed 0.9091 of the old"),
    (report(a=1.0), "only in the old file: fwd 1/2 2 name b"),
    (report(a=(1.0, {"other 1": 0.9}, {}), b=2.0), "behind other 1 (0.9000 ms): fwd 1/2 1 name a, 1.0000 ms"),
    (report(a=1.0, b=(2.0, {"slow": 3.0}, {"old 0": 1.9})), "behind old 0 (1.9000 ms): fwd 1/2 2 name b, 2.0000 ms"),
    (report(), "speed nan of the old"),
])  # fmt: skip
def test_a_change_fails(new, sentence):
    lines, passed = gate.compare(report(a=1.0, b=2.0), new, 0.97)
    assert not passed and lines[-1] == "FAILED"
    assert any(line.startswith(sentence) for line in lines), lines


def test_new_rows_and_only_the_ten_worst_are_listed():
    many = {f"r{i}": 1.0 for i in range(20)}
    lines, passed = gate.compare(report(**many), report(**many, extra=1.0), 0.97)
    assert passed and sum(line.startswith("  ") for line in lines) == 10
    assert "only in the new file: fwd 1/2 21 name extra" in lines
