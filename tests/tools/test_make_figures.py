"""Figures in README and docs are those of benchmarks/results."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from figures import benchmarks_page, ladder, markdown, peer_tests_page, reports  # noqa: E402

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
    text = benchmarks_page.full({"card": REPORT}, {})
    assert "| forward | 2/8 | 2 x 64 |  | 2 | 3.0e-03 |  | 8 (4.00x) |" in text
    assert "| forward | 2/8 | 64 + 32 | dtype fp16 | 2 | 4.0e-04 | 3 (1.50x) | 2 (1.00x) |" in text


def test_spread_and_eager_times_have_columns_where_a_row_has_them():
    row = {**REPORT["rows"][0], "ms_min": 1.9, "ms_max": 2.25, "eager_ms": 2.5, "eager_host_us": 61.0, "flushed_ms": 2.1, "roofline": 0.5}
    text = benchmarks_page.full({"card": {**REPORT, "rows": [row], "left_out": ["fwd 2/8 5"]}}, {})
    assert "| ms | least to most | flushed | eager, wall | eager, host (us) | of roofline | largest error | slow |" in text
    assert "| 2 | 1.9 to 2.25 | 2.1 | 2.5 | 61 | 50 % | 3.0e-03 | 8 (4.00x) |" in text
    assert "Rows that were not measured, or whose check failed: fwd 2/8 5." in text


def test_rows_over_several_cards_stand_beside_one_card():
    row = {**REPORT["rows"][0], "mode": "cp_fwd", "options": {"cards": 2}, "one_card_ms": 3.0, "speedup": 1.5}
    text = benchmarks_page.full({"h_several_cards": {**REPORT, "rows": [row]}}, {})
    assert "| forward over cards | 2/8 | 2 x 64 | cards 2 | 2 | 3 (1.50x) | 3.0e-03 | 8 (4.00x) |" in text


def test_summary_is_the_geometric_mean():
    text = benchmarks_page.summary({"card": REPORT})
    assert "| a card | card | forward | slow | 2 | 2.00x | 1.00 to 4.00 |" in text
    assert "| a card | card | forward | other | 1 | 1.50x |  |" in text
    assert text in benchmarks_page.full({"card": REPORT}, {})
    assert benchmarks_page.summary({}) == reports.NOTHING


def test_the_fastest_of_all_is_found_row_by_row():
    """4 and 1 times our time, not the geometric mean of whoever is fastest in the mean."""
    rows = [{**row, "recorded": {"third": 5.0, "third as published": 0.1}} for row in REPORT["rows"]]
    text = benchmarks_page.summary({"card": {**REPORT, "rows": rows}})
    assert "| a card | card | forward | the fastest of them | 2 | 2.00x | 1.00 to 4.00 |" in text
    assert "- forward: 2 times as fast in the same run on an a card (card, 2 rows, 1 at least); 2.5 times as fast as recorded" in text
    assert "the fastest of them †" not in text, "there is one alone"
    assert "| third † | 2 | 2.50x | 2.50 to 2.50 |" in text and "| third as published ‡ | 2 | 0.05x |" in text
    assert reports.DAGGER in text and reports.PUBLISHED in text and reports.SECTION not in text
    slower = benchmarks_page.summary({"card": {**REPORT, "rows": [{**row, "ms": 5.0} for row in REPORT["rows"]]}})
    assert "(card, 2 rows, 0.4 at least, slower in 1 of them)" in slower


def test_tables_of_an_earlier_bench_are_marked(monkeypatch):
    for module in (reports, benchmarks_page):
        monkeypatch.setattr(module, "EARLIER", {"card"})
    text = benchmarks_page.summary({"card": JUDGED})
    assert "| a card | card § | forward | slow |" in text and reports.SECTION in text
    assert "Errors against fp64" not in text, "what it calls relative may be none"
    assert reports.EARLIER_BENCH in benchmarks_page.full({"card": JUDGED}, {})


JUDGED = {
    **REPORT,
    "rows": [
        {**REPORT["rows"][0], "unsplit_ms": 3.0, "err_median_head": {"o": 1e-3, "final_state": 2e-3, "dh0": None},
         "err_worst_head": {"o": 2e-3, "final_state": 2e-3, "dh0": None},
         "peer_err_median_head": {"slow": {"o": 2e-3, "final_state": None, "dh0": None}},
         "peer_err_worst_head": {"slow": {"o": 8e-3, "final_state": None, "dh0": None}}},
    ],
}  # fmt: skip


def test_errors_stand_beside_those_of_peers():
    text = benchmarks_page.full({"card": JUDGED}, {})
    assert "| forward | 2/8 | 2 x 64 |  | o | 1.00e-03 / 2.00e-03 | 2.00e-03 / 8.00e-03 |" in text
    assert "final_state" not in text and "dh0" not in text  # no peer has a number; a zero has no relative error
    text = benchmarks_page.summary({"card": JUDGED})
    assert "| card | forward | slow | 1 | 0.50x to 0.50x | 0.25x to 0.25x |" in text
    assert "| a card | card | forward | ours, auto_cp=False | 1 | 1.50x |  |" in text


def test_errors_alone_have_no_table_of_times():
    row = {name: value for name, value in JUDGED["rows"][0].items() if name not in ("ms", "unsplit_ms")} | {"peers": {}}
    report = {**JUDGED, "rows": [row]}
    assert "| 1.00e-03 / 2.00e-03 | 2.00e-03 / 8.00e-03 |" in benchmarks_page.full({"card": report}, {})
    assert "| card | forward | slow | 1 | 0.50x to 0.50x |" in benchmarks_page.summary({"card": report})
    assert "largest error |" not in benchmarks_page.full({"card": report}, {})


PART = {"commit": "abc", "cut_short": False, "what": "requirement 7", "cases": 9, "failed": 1, "skipped": 2, "expected_failures": 1, "seconds": 1.0,
        "paths": {"sm90": {"bfloat16": 5, "float16": 2}}, "backward": {"sm90": {"bfloat16": 3}}, "reasons": {"no path has it": 2, "T = 300": 1}}  # fmt: skip
OTHER = {**PART, "what": "smoke", "cases": 4, "failed": 0, "cut_short": True, "paths": {"cuda_generic": {"float32": 4}}, "backward": {}, "reasons": {}}
RECORD = {"machine": "a card", "commits": ["abc"], "date": "today", "pytest": [PART, OTHER]}


def test_the_record_stands_by_requirement_path_and_dtype():
    text = ladder.ladder({"card_reliability": RECORD})
    assert "| failed as expected | skipped | cuda_generic, float32 | sm90, bfloat16 | sm90, float16 |" in text
    assert "| requirement 7 | abc | 9 | 1 | 1 | 2 |  | 5 (3) | 2 |" in text and "| smoke, cut short | abc | 4 | 0 | 1 | 2 | 4 |  |  |" in text
    assert "- 2: no path has it\n- 1: T = 300\n" in text


def test_an_earlier_record_says_rung_for_requirement():
    earlier = {"card_reliability": {**RECORD, "pytest": [{**part, "what": part["what"].replace("requirement", "rung")} for part in RECORD["pytest"]]}}
    assert ladder.ladder(earlier) == ladder.ladder({"card_reliability": RECORD})


def test_the_record_says_which_requirements_a_path_has_passed():
    text = ladder.ladder({"card_reliability": RECORD})
    assert "13 cases of the Python tests, 1 failed, 2 more failed as expected, 4 skipped." in text
    assert "- Path `sm90` in bfloat16 has computed cases that passed of requirements 7, with a gradient of 7.\n" in text
    assert "- Path `sm90` in float16 has computed cases that passed of requirements 7.\n" in text
    assert "Path `cuda_generic`" not in text, "smoke is no requirement"
    assert reports.NOTHING in ladder.ladder({})


def test_words_go_between_the_marks_of_their_name():
    text = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb <!-- y: begin --><!-- y: end -->"
    assert markdown.between(text, "x", "new\n") == text.replace("old", "new")


def test_records_without_timings_are_passed_over(tmp_path):
    (tmp_path / "record.json").write_text('{"cases": 3}')
    assert reports.load(tmp_path) == {}


def test_runs_of_other_packages_tests_are_a_table_with_what_failed():
    run = {"binding": "low_level", "gpu": "a card, sm_90", "commit": "abc", "wrong": None, "failed": {},
           "files": {"a.py": {"passed": 2, "failed": 0, "skipped": 1}, "b.py": {"passed": 3, "failed": 0, "skipped": 0}},
           "calls": {"fwd sm90 bfloat16": 4, "bwd sm90 bfloat16": 1, "fwd cpu float32": 2}}  # fmt: skip
    bad = {**run, "wrong": "this library was not called", "failed": {"a.py::test": "it broke"}, "calls": {}}
    text = peer_tests_page.table([run, bad])
    assert "| `low_level` | a card | abc | 5 | 0 | 1 | cpu 2, sm90 5 | yes |" in text
    assert "| none | no: this library was not called |" in text
    assert text.endswith("- `low_level`, a.py::test: it broke\n")
    assert peer_tests_page.table([]) == "No run has been recorded yet.\n"


def test_cases_of_two_commits_are_not_added_up():
    again = {**PART, "commit": "def", "cases": 3, "failed": 0}
    text = ladder.ran("card_reliability", {**RECORD, "commits": ["def", "abc"], "pytest": [again, PART, OTHER]})
    assert "commit def, 3 cases of the Python tests, 0 failed" in text and "; commit abc, 13 cases of the Python tests, 1 failed" in text
