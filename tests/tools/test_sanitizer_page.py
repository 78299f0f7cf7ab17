"""docs/sanitizers.md says of each kernel which build and commit a tool saw, and of each report what it is."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from kernel_sources import Sources  # noqa: E402
from sanitizer_page import page  # noqa: E402

TAILS = {"calls": 2, "strided": 0, "tokens after the last sequence": 1, "dtypes": ["bf16"], "tokens of the last chunk": [0, 1, 2, 64], "K": [128]}
RUN = {"commit": "abc", "tool": "memcheck", "build": "plain", "command": "test --small", "cases": 2, "reports": 0, "seconds": 3}


def write_kernel(root, body="int x;", header="int y;"):
    folder = root / "src" / "cuda"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "kernel.cuh").write_text(
        f'#include "part.h"\n// A comment.\ntemplate <int N>\n__global__ void __launch_bounds__(f(N), 1)\n    a_kernel(int n) {{ {body} }}\n')
    (folder / "part.h").write_text(header)
    return Sources(root=root)


def record(kernels, *runs):
    return {"machine": "a card", "commits": ["abc"], "date": "today", "sanitizers": list(runs), "kernels": kernels, "tails": {"memcheck": {"sm90": TAILS}}}


def row(text):
    return next(line for line in text.splitlines() if line.startswith("| `n::a_kernel<2>` |"))


def test_a_kernel_that_changed_after_its_newest_run_says_so(tmp_path):
    sources = write_kernel(tmp_path)
    seen = {"n::a_kernel<2>": {"memcheck": {"commit": "0123456789ab", "build": "plain", "sources": sources.digest("n::a_kernel<2>")},
                               "racecheck": {"commit": "ba9876543210", "build": "FLASH_QLA_RACECHECK", "sources": ""}}}
    assert row(page(record(seen, RUN), sources)) == "| `n::a_kernel<2>` | plain 0123456 | racecheck ba98765, sources unknown |  |  |"
    for changed in ({"body": "int z;"}, {"header": "int z;"}):
        assert "| plain 0123456, changed since |" in row(page(record(seen, RUN), write_kernel(tmp_path, **changed)))
    same = write_kernel(tmp_path, header="// What y is.\n\nint y;  // y\n")
    assert "| plain 0123456 |" in row(page(record(seen, RUN), same)), "comments and empty lines are no change"


def test_a_kernel_that_the_library_no_longer_has_is_counted_and_not_listed(tmp_path):
    sources = write_kernel(tmp_path)
    run = {"commit": "0123456789ab", "build": "plain", "sources": "0"}
    text = page(record({"n::a_kernel<2>": {"memcheck": run}, "n::old_kernel<2>": {"memcheck": run}}, RUN), sources)
    assert row(text) and "old_kernel" not in text
    assert "All 1 of the program" in text and "1 more of the record are kernels that the library no longer has" in text


def test_every_kernel_of_the_record_has_sources_or_is_gone():
    kernels = json.loads((ROOT / "benchmarks" / "results" / "h200_reliability.json").read_text())["kernels"]
    sources = Sources()
    unknown = {re.search(r"(\w+)(<.*)?$", name)[1] for name in kernels if not sources.digest(name)}
    everything = "\n".join(sources.texts.values())
    assert len(kernels) > 100 and [name for name in unknown if re.search(rf"\b{name}\b", everything)] == []
    states = sources.files("sm90::sm90_chunk_bwd_states_kernel<__half, (sm90::StatesForm)0>")
    assert {"src/cuda/sm90/chunk_bwd/passes/kernel.cuh", "src/cuda/common/mbarrier.cuh"} <= states
    assert Sources("0000000").digest("list_tiles_kernel") == ""


@pytest.mark.parametrize("reports", [3, None])
def test_reports_that_nothing_explains_are_an_error(tmp_path, reports):
    with pytest.raises(SystemExit, match="nothing explains it"):
        page(record({}, {**RUN, "reports": reports}), write_kernel(tmp_path))


def test_reports_stand_beside_their_explanation(tmp_path):
    command = "cuda_generic_test --small --only sm90 forward, stale --only-case 10"
    text = page(record({}, RUN, {**RUN, "tool": "racecheck", "command": command, "reports": 4}), write_kernel(tmp_path))
    line = next(line for line in text.splitlines() if command in line)
    assert line.startswith("| racecheck | plain | abc |") and "| 4 | Warnings, no errors: lanes of a warp" in line
    assert "| memcheck | plain | abc | 1 | 2 | 0 | 3 |" in text


def test_the_build_of_a_run_that_does_not_name_it_is_that_of_the_script(tmp_path):
    unnamed = {key: value for key, value in RUN.items() if key != "build"}
    runs = [{**unnamed, "tool": tool, "command": f"test --only {group}"} for tool in ("racecheck", "initcheck") for group in ("sm90 backward, one", "decode")]
    text = page(record({"a": ["racecheck"]}, *runs), write_kernel(tmp_path))
    for tool, build, count in (("racecheck", "racecheck", 2), ("initcheck", "racecheck", 1), ("initcheck", "plain", 1)):
        assert f"| {tool} | {build} | abc | {count} |" in text
    assert "| `a` |  | not recorded |  |  |" in text and "does not name its build" in text


def test_tails_are_told_in_spans(tmp_path):
    text = page(record({}, RUN), write_kernel(tmp_path))
    assert "| memcheck | sm90 | 2 | 0 | 1 | bf16 | 0 to 2, 64 |  | 128 |" in text
    assert "No results have been recorded yet" in page({}, write_kernel(tmp_path))


def test_the_page_is_short():
    text = (ROOT / "docs" / "sanitizers.md").read_text()
    assert sum(len(line.split()) for line in text.splitlines() if not line.startswith("|")) <= 1500
    reports = re.search(r"## Reports\n\n(.*?)\n## ", text, re.DOTALL).group(1)
    assert all(len(line.split("|")[6].split()) > 10 for line in reports.splitlines()[2:]), "each says what it is"
