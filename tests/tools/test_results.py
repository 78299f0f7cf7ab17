"""The committed results are as a tool has written them: by a protocol that the code can write, or marked as of an earlier version."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "python" / "flash_qla" / "cli")]
import bench_protocol  # noqa: E402
import results  # noqa: E402
from figures.reports import EARLIER  # noqa: E402

FILES = sorted((ROOT / "benchmarks" / "results").glob("*.json"))


def wrong_with(name, text):
    """What is wrong with a results file of that name; None if nothing."""
    report = json.loads(text)
    if text != results.file_text(report):
        return "each row must stand on a line of its own"
    if name != "cpu" and name.split("_")[0] != results.short_name(report["machine"]):
        return "the name must begin with the machine"
    if not {*report.get("commits", [report.get("commit")])}.isdisjoint({None, "unknown"}):
        return "a commit must be known"
    if name.endswith("_reliability"):
        return None if all("paths" in part for part in report["pytest"]) else "paths must be told"
    if "method" not in report or bench_protocol.protocol(report["method"]) != report["protocol"]:
        return "the protocol must be that of its method"
    for row in report["rows"]:
        if "ms" in row and not row["ms_min"] <= row["ms"] <= row["ms_max"]:
            return "the median must lie between least and most"
    return None


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_is_one_that_the_code_can_write_or_marked(path):
    wrong = wrong_with(path.stem, path.read_text())
    if path.stem in EARLIER:
        assert wrong is not None, "measured again, it is no longer of an earlier version"
    else:
        assert wrong is None


def test_what_is_marked_is_there():
    assert EARLIER <= {path.stem for path in FILES}


METHOD = {"device": "cuda", "judged": {"fla": ""}, "recorded": False}
GOOD = {"machine": "NVIDIA X900", "commit": "0123456789ab", "protocol": bench_protocol.protocol(METHOD), "method": METHOD,
        "rows": [{"mode": "fwd", "ms": 2.0, "ms_min": 1.0, "ms_max": 3.0}]}  # fmt: skip


@pytest.mark.parametrize("changes, sentence", [
    ({}, None),
    ({"protocol": GOOD["protocol"].replace("fla", "fla, not its times")}, "the protocol must be that of its method"),
    ({"method": {**METHOD, "recorded": True}}, "the protocol must be that of its method"),
    ({"machine": "NVIDIA X901"}, "the name must begin with the machine"),
    ({"commit": "unknown"}, "a commit must be known"),
    ({"rows": [{**GOOD["rows"][0], "ms": 4.0}]}, "the median must lie between least and most"),
])  # fmt: skip
def test_what_was_edited_by_hand_is_found(changes, sentence):
    assert wrong_with("x900_fla", results.file_text({**GOOD, **changes})) == sentence
    assert wrong_with("x900_fla", json.dumps({**GOOD, **changes}, indent=1) + "\n") == "each row must stand on a line of its own"
