"""README's figure, its plot, its table of five rows and its status: which measurements they show, and what they say of them."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from figures import choice, plot, readme, reports  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"


def row(mode, ms, seqlens=(64,), **others):
    return {"mode": mode, "hq": 2, "hv": 8, "seqlens": list(seqlens), "options": {}, "ms": ms, "peers": {}, **others}


def report(rows, machine="NVIDIA X900", driver="580", date="2026-01-01"):
    return {"machine": machine, "driver": driver, "date": date, "rows": rows}


# Two calls: the fastest other package is FlashInfer's second mode in one, FlashQLA in the other: 2 and 8 times our time.
SAME_RUN = report([
    row("fwd", 1.0, peers={"flashinfer 1.2 auto_cp": 3.0, "flashinfer 1.2 no_cp": 2.0, "flashqla 0.1": 4.0}),
    row("fwd", 1.0, peers={"flashinfer 1.2 auto_cp": 9.0, "flashqla 0.1": 8.0}),
])  # fmt: skip
RECORDED = report([row("fwd", 1.0, recorded={"fla 0.6": 5.0, "fla as published": 0.1})] * 3 + [row("decode", 2.0, recorded={"fla 0.6": 1.0})])
REPORTS = {"x900_peers": SAME_RUN, "x900_forward": RECORDED}


@pytest.fixture
def earlier(monkeypatch):
    def mark(*names):
        for module in (reports, choice, readme):
            monkeypatch.setattr(module, "EARLIER", set(names))

    mark()
    return mark


def test_a_comparison_is_against_the_fastest_of_each_row(earlier):
    found = choice.best(REPORTS, "fwd")
    assert (found.table, found.kind, found.ratios) == ("x900_peers", "peers", (2.0, 8.0))
    assert found.mean == pytest.approx(4.0) and found.span == "2.00 to 8.00" and found.packages == ("FlashInfer 1.2", "FlashQLA 0.1")
    assert choice.best(REPORTS, "fwd", "flashinfer").ratios == (2.0, 9.0), "the faster of its modes"
    assert choice.best(REPORTS, "fwd", "fla").ratios == (5.0,) * 3, "times that were published do not count"
    assert choice.best(REPORTS, "train") is None


def test_what_the_present_bench_measured_comes_first(earlier):
    earlier("x900_peers")
    assert choice.best(REPORTS, "fwd").table == "x900_forward"
    earlier("x900_peers", "x900_forward")
    assert choice.best(REPORTS, "fwd").table == "x900_peers", "the same run before an earlier one"


def test_more_packages_then_more_rows_then_the_newer_table(earlier):
    one = report([row("fwd", 1.0, peers={"flashqla 0.1": 3.0})] * 5)
    assert choice.best({**REPORTS, "x900_peers_one": one}, "fwd").table == "x900_peers"
    assert choice.best({**REPORTS, "x900_peers_one": one}, "fwd", "flashqla").table == "x900_peers", "of the same table as the figure of all"
    more = {**SAME_RUN, "rows": SAME_RUN["rows"] * 2}
    assert choice.best({**REPORTS, "x900_peers_more": more}, "fwd").table == "x900_peers_more"
    assert choice.best({"x900_peers_old": SAME_RUN, "x900_peers": {**SAME_RUN, "date": "2026-02-01"}}, "fwd").table == "x900_peers"


def test_only_tables_of_the_fast_path_on_one_gpu_count():
    others = {name: SAME_RUN for name in ("x900_portable_forward", "x900_layer", "x900_several_cards")}
    other_gpu, cpu = report([row("fwd", 1.0)], machine="NVIDIA X100"), report([row("train", 1.0)], machine="a CPU", driver="none")
    found = choice.on_a_gpu({**REPORTS, **others, "x100_forward": other_gpu, "cpu": cpu})
    assert set(found) == set(REPORTS)
    assert set(choice.on_a_cpu({**REPORTS, "cpu": cpu})) == {"cpu"}
    assert choice.on_a_gpu({}) == {}


def test_the_headline_has_a_figure_with_its_range(earlier):
    text = readme.headline(REPORTS)
    assert "On an NVIDIA X900 its forward is **4.00 times as fast** as the fastest other package on the same call" in text
    assert "geometric mean of 2 calls, from 2.00 to 8.00, against FlashInfer 1.2 and FlashQLA 0.1 timed in the same run." in text
    assert "(docs/images/speed.svg)" in text
    earlier("x900_peers", "x900_forward")
    assert "by an earlier version of the bench ([§](#speed))" in readme.headline(REPORTS)
    assert readme.headline({}) == reports.NOTHING


def test_the_table_has_a_row_for_each_mode_and_one_for_the_cpu(earlier):
    cpu = report([row("train", 1.0, peers={"transformers 5": 7.0})], machine="a CPU", driver="none")
    text = readme.speed({**REPORTS, "cpu": cpu})
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    assert lines == [
        "| forward | NVIDIA X900 | 4.00 | 2.00 to 8.00 | 2 | FlashInfer 1.2 and FlashQLA 0.1 | x900_peers |",
        "| decode | NVIDIA X900 | 0.50 |  | 1 | FLA 0.6 | x900_forward † |",
        "| forward + backward | a CPU | 7.00 |  | 1 | Transformers 5 | cpu |",
    ]
    assert "Below 1 ours takes longer. † the others' times" in text and "§" not in text
    earlier("x900_forward")
    assert "x900_forward § †" in readme.speed(REPORTS) and "; § measured by an earlier version of the bench" in readme.speed(REPORTS)
    assert readme.speed({}) == reports.NOTHING


def test_readme_has_the_five_rows():
    """With the results as they are committed."""
    text = readme.speed(reports.load(ROOT / "benchmarks" / "results"))
    assert [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")][2:] == [
        "| forward", "| backward", "| forward + backward", "| decode", "| forward + backward",
    ]  # fmt: skip


PART = {"what": "requirement 7", "cases": 9, "failed": 1, "skipped": 2, "expected_failures": 1,
        "paths": {"sm90": {"bfloat16": 5, "float16": 2}}, "backward": {"sm90": {"bfloat16": 3}}}  # fmt: skip
OTHER = {**PART, "what": "smoke", "paths": {"cuda_generic": {"float32": 4}}, "backward": {}}
RECORD = {"machine": "a card", "commits": ["abc"], "date": "today", "pytest": [PART, OTHER], "summary": {"cases": 20, "failed": 3}}


def test_the_status_says_what_the_hopper_kernels_have_passed(earlier):
    text = readme.status({"card_reliability": RECORD})
    assert "18 cases of the Python tests, 2 failed, 2 more failed as expected ([known misses](tests/python/known_misses.py)), 4 skipped." in text
    assert "(path `sm90`) have passed cases of requirements 7 (with gradients 7) in bfloat16.\n" in text
    assert "(path `sm90`) have passed cases of requirements 7 in float16.\n" in text and "cuda_generic" not in text
    both = {**PART, "backward": {"sm90": {"bfloat16": 3, "float16": 1}}}
    assert "in bfloat16 and float16.\n" in readme.status({"card_reliability": {**RECORD, "pytest": [both]}})
    assert readme.status({}) == reports.NOTHING


def drawn(found):
    """The plot's bars and lines: (kind, length) by class, and its words."""
    tree = ElementTree.fromstring(plot.draw(found))
    bars = [(element.get("class"), float(element.get("width"))) for element in tree.iter(f"{SVG}rect") if element.get("class") != "back"]
    lines = [tuple(map(float, re.match(r"M([\d.]+) .*H([\d.]+)", element.get("d")).groups())) for element in tree.iter(f"{SVG}path")
             if element.get("class") == "range"]  # fmt: skip
    return bars, lines, [element.text for element in tree.iter(f"{SVG}text")]


def test_bars_are_as_long_as_their_figures(earlier):
    bars, lines, words = drawn(REPORTS)
    unit = bars[0][1]
    # Forward: ours, FLA 5, FlashQLA sqrt(32), FlashInfer sqrt(18); decode: ours, FLA 0.5.
    assert [kind for kind, _ in bars] == ["ours", "other", "other", "other", "ours", "other"]
    assert [length / unit for _, length in bars] == pytest.approx([1, 5, 32**0.5, 18**0.5, 1, 0.5], rel=0.01)
    assert [((a - plot.LEFT) / unit, (b - plot.LEFT) / unit) for a, b in lines] == [
        pytest.approx(ends, abs=0.01) for ends in ((5, 5), (4, 8), (2, 9), (0.5, 0.5))
    ]
    assert max(b for _, b in lines) == pytest.approx(plot.LEFT + plot.LONGEST), "the longest fills the width"
    assert "5.66 (4.00 to 8.00), 2 calls" in words and "0.50, 1 calls †" in words
    assert any(word.startswith("† times of an earlier run") for word in words) and not any("§" in word for word in words)


def test_the_plot_is_readable_in_a_light_and_in_a_dark_scheme():
    style = plot.draw(REPORTS).split("<style>")[1].split("</style>")[0]
    light, dark = style.split("@media (prefers-color-scheme: dark)")

    def luminance(colour):
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        return sum(w * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4) for w, c in zip((0.2126, 0.7152, 0.0722), channels))

    for scheme in (light, dark):
        text, small, back, ours = (
            luminance(re.search(rf"{kind} {{[^}}]*fill: (#\w{{6}})", scheme)[1]) for kind in ("text", r"\.small", r"\.back", r"\.ours")
        )
        for words, least in ((text, 7), (small, 4.5), (ours, 3)):
            contrast = (max(words, back) + 0.05) / (min(words, back) + 0.05)
            assert contrast >= least


def test_without_measurements_there_is_no_plot():
    assert plot.draw({}) == ""
