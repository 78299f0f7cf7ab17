"""Figures in README and docs are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import make_figures  # noqa: E402

REPORT = {
    "machine": "a card",
    "driver": "580",
    "cuda": "13.0",
    "torch": "2.13.0",
    "commit": "abc",
    "date": "today",
    "protocol": "medians",
    "rows": [
        {"mode": "fwd", "hq": 2, "hv": 8, "seqlens": [64, 64], "options": {}, "ms": 2.0, "err": {"o": 1e-3, "dq": 2e-3},
         "err_worst_head": {"o": 3e-3}, "peers": {"slow": 8.0}},
        {"mode": "fwd", "hq": 2, "hv": 8, "seqlens": [64, 32], "options": {"dtype": "fp16"}, "ms": 2.0,
         "err": {"o": 4e-4}, "peers": {"slow": 2.0, "other": 3.0}},
    ],
}  # fmt: skip


def test_readme_and_docs_are_up_to_date():
    done = subprocess.run([sys.executable, ROOT / "tools" / "make_figures.py", "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_every_row_stands_in_the_full_table():
    text = make_figures.full({"card": REPORT})
    assert "| forward | 2/8 | 2 x 64 |  | 2 |  | 3.0e-03 |  | 8 (4.00x) |" in text
    assert "| forward | 2/8 | 64 + 32 | dtype fp16 | 2 |  | 4.0e-04 | 3 (1.50x) | 2 (1.00x) |" in text


def test_summary_is_the_geometric_mean():
    text = make_figures.summary({"card": REPORT})
    assert "| a card | card | forward | slow | 2 | 2.00x | 1.00 to 4.00 |" in text
    assert "| a card | card | forward | other | 1 | 1.50x |  |" in text


JUDGED = {
    **REPORT,
    "rows": [
        {**REPORT["rows"][0], "unsplit_ms": 3.0, "err_median_head": {"o": 1e-3, "final_state": 2e-3},
         "err_worst_head": {"o": 2e-3, "final_state": 2e-3}, "peer_err_median_head": {"slow": {"o": 2e-3, "final_state": None}},
         "peer_err_worst_head": {"slow": {"o": 8e-3, "final_state": None}}},
    ],
}  # fmt: skip


def test_errors_stand_beside_those_of_peers():
    text = make_figures.full({"card": JUDGED})
    assert "| forward | 2/8 | 2 x 64 |  | o | 1.00e-03 / 2.00e-03 | 2.00e-03 / 8.00e-03 |" in text
    assert "final_state" not in text  # no peer has a number
    text = make_figures.summary({"card": JUDGED})
    assert "| forward | slow | 1 | 0.50x to 0.50x | 0.25x to 0.25x |" in text
    assert "| a card | card | forward | ours, auto_cp=False | 1 | 1.50x |  |" in text


def test_records_without_timings_are_passed_over(tmp_path):
    (tmp_path / "record.json").write_text('{"cases": 3}')
    assert make_figures.load(tmp_path) == {}
