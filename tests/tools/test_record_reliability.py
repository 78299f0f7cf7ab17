"""tools/record_reliability.py reads the logs of every program that runs on a GPU, and counts what did not end as not clean."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMIT = "commit: 0123456789ab\n"
TOOL = Path(__file__).resolve().parents[2] / "tools" / "record_reliability.py"

PROGRAM = "gpu_0: NVIDIA H200\nrecurrent, cuda_decode: 150 cases, 1 failed, 31.9 s; largest error over its bound: o 1.2\n1 failed\n"
FUZZ = "FAILED case 3: AssertionError: dg\nfuzz, seed 7, cuda, path auto, against cpu: 200 cases, 2 failed, 95.1 s\n"
CLEAN = "== compute-sanitizer --tool memcheck --error-exitcode 1 /there/cuda_generic_test --cases 8\na: 8 cases, 0 failed, 1.0 s\n" \
        "========= ERROR SUMMARY: 0 errors\n-- 5 s\n"
ENDED = "== compute-sanitizer --tool racecheck --error-exitcode 1 /there/cuda_generic_test --cases 8\n-- 104 s\n"


def run(tmp_path, *paths):
    """The written report, or None, and the finished process."""
    out = tmp_path / "out.json"
    out.unlink(missing_ok=True)
    process = subprocess.run([sys.executable, TOOL, out, *paths], capture_output=True, text=True)
    return json.loads(out.read_text()) if out.exists() else None, process


def record(tmp_path, *logs):
    """The written report and the exit code, of logs made of these texts, which name a commit."""
    paths = [tmp_path / f"log{i}.txt" for i in range(len(logs))]
    for path, text in zip(paths, logs):
        path.write_text(COMMIT + text)
    report, process = run(tmp_path, *paths)
    return report, process.returncode


def test_programs_and_fuzz_are_counted(tmp_path):
    report, code = record(tmp_path, PROGRAM, FUZZ)
    assert report["machine"] == "NVIDIA H200" and report["commits"] == ["0123456789ab"]
    assert [(p["what"], p["cases"], p["failed"]) for p in report["programs"]] == [
        ("recurrent, cuda_decode", 150, 1), ("fuzz, seed 7, cuda, path auto, against cpu", 200, 2)]
    assert report["summary"]["cases"] == 350 and report["summary"]["failed"] == 3
    assert code == 1


def test_a_sanitizer_that_did_not_end_is_not_clean(tmp_path):
    report, code = record(tmp_path, CLEAN)
    assert report["sanitizers"][0]["reports"] == 0 and report["sanitizers"][0]["cases"] == 8 and code == 0
    report, code = record(tmp_path, CLEAN, ENDED)
    assert report["sanitizers"][1]["reports"] is None and report["summary"]["sanitizer_runs_with_reports"] == 1 and code == 1


def test_an_earlier_records_sanitizers_are_kept(tmp_path):
    earlier, _ = record(tmp_path, CLEAN)
    kept, log = tmp_path / "earlier.json", tmp_path / "new.txt"
    kept.write_text(json.dumps(earlier))
    log.write_text("commit: ba9876543210\n" + PROGRAM)
    report, _ = run(tmp_path, log, kept)
    assert report["sanitizers"] == earlier["sanitizers"] and report["commits"] == ["ba9876543210", "0123456789ab"]
    log.write_text("commit: ba9876543210\n" + ENDED)
    report, _ = run(tmp_path, log, kept)
    assert [(run["commit"], run["tool"]) for run in report["sanitizers"]] == [("ba9876543210", "racecheck")]


def test_a_sanitizer_whose_program_ran_nothing_is_not_clean(tmp_path):
    report, code = record(tmp_path, CLEAN.replace("a: 8 cases, 0 failed, 1.0 s\n", "cudaMalloc: out of memory\n"))
    assert report["sanitizers"][0]["reports"] is None and code == 1
    report, code = record(tmp_path, CLEAN.replace("=========", "========= Target application returned an error\n=========", 1))
    assert report["sanitizers"][0]["reports"] is None and code == 1


def seen(tool, launched, tails, end="========= ERROR SUMMARY: 0 errors\n"):
    said = "".join(f"launched {name}\n" for name in launched) + "".join(f"tails of {line}\n" for line in tails)
    return f"== compute-sanitizer --tool {tool} x\nbuild: plain\nthe program has a<1>\nthe program has b\na: 8 cases, 0 failed, 1.0 s\n{said}{end}"


def test_kernels_and_tails_are_counted_by_tool(tmp_path):
    first = "sm90: 2 calls, 1 strided, 1 with tokens after the last sequence; tokens of the last chunk 0 64; K 128; bf16"
    grown = "sm90: 3 calls, 1 strided, 1 with tokens after the last sequence; tokens of the last chunk 0 7 64; K 128; bf16 fp16"
    other = "sm90: 1 calls, 0 strided, 0 with tokens after the last sequence; tokens of the last chunk 1; K 128; bf16"
    report, _ = record(
        tmp_path, seen("memcheck", ["a<1>"], [first, grown]), seen("memcheck", [], [other]), seen("racecheck", ["a<1>", "b"], [], end=""))
    newest = {"commit": "0123456789ab", "build": "plain", "sources": ""}  # no kernels of the library
    assert report["kernels"] == {"a<1>": {"memcheck": newest}, "b": {}}, "a run that did not end has shown nothing"
    assert {run["build"] for run in report["sanitizers"]} == {"plain"}
    assert report["tails"]["memcheck"]["sm90"] == {
        "calls": 4, "strided": 1, "tokens after the last sequence": 1, "dtypes": ["bf16", "fp16"], "tokens of the last chunk": [0, 1, 7, 64],
        "K": [128]}


def test_kernels_that_a_tool_was_told_to_leave_out_are_not_seen(tmp_path):
    options = "--error-exitcode 1 --kernel-name-exclude kns=a< --kernel-name-exclude kns=c --force-blocking-launches"
    report, _ = record(tmp_path, seen("racecheck", ["a<1>", "b"], []).replace("racecheck x", f"racecheck {options} /there/x --once"))
    assert {name: list(tools) for name, tools in report["kernels"].items()} == {"a<1>": [], "b": ["racecheck"]}
    assert report["sanitizers"][0]["command"] == "x --once" and report["sanitizers"][0]["without"] == ["a<", "c"]


def test_kernels_are_those_of_the_first_commit(tmp_path):
    new, old, torn = (tmp_path / name for name in ("new.txt", "old.txt", "torn.txt"))
    new.write_text(COMMIT + seen("memcheck", ["a<1>"], []))
    old.write_text("commit: ba9876543210\n" + seen("memcheck", ["b", "gone"], []).replace("the program has b", "the program has b\nthe program has gone"))
    torn.write_text(COMMIT + seen("racecheck", [], []).replace("0 errors", "1 error").replace("has b", "has b========= Error: Race"))
    report, _ = run(tmp_path, torn, new, old)
    # Of each the commit of its newest run.
    assert {name: {tool: run["commit"] for tool, run in tools.items()} for name, tools in report["kernels"].items()} == {
        "a<1>": {"memcheck": "0123456789ab"}, "b": {"memcheck": "ba9876543210"}}
    assert report["commits"] == ["0123456789ab", "ba9876543210"]
    assert [r["commit"] for r in report["sanitizers"]] == ["0123456789ab", "0123456789ab", "ba9876543210"]


@pytest.mark.parametrize("words", ["", "commit: unknown\n", COMMIT + "commit: ba9876543210\n"])
def test_a_log_without_one_commit_is_refused(words, tmp_path):
    (tmp_path / "log.txt").write_text(words + PROGRAM)
    report, process = run(tmp_path, tmp_path / "log.txt")
    assert report is None and process.returncode == 1
    assert "log.txt: a log must name the commit that ran" in process.stderr


XML = """<testsuites><testsuite>
<testcase classname="tests.python.test_lengths" name="test_a" time="1.5"><properties><property name="requirement" value="7"/>
<property name="calls" value="chunk_forward sm90 bfloat16 3"/><property name="calls" value="chunk_backward sm90 bfloat16 1"/>
<property name="calls" value="chunk_forward cuda_generic float32 1"/><property name="other" value="x y z 1"/></properties></testcase>
<testcase classname="tests.python.test_lengths" name="test_b" time="1"><properties><property name="requirement" value="7"/>
<property name="calls" value="chunk_forward sm90 bfloat16 1"/><property name="calls" value="recurrent sm90 bfloat16 9"/></properties></testcase>
<testcase classname="tests.python.test_lengths" name="test_c" time="1"><properties><property name="requirement" value="7"/>
<property name="calls" value="chunk_forward sm90 float16 1"/></properties><failure message="no"/></testcase>
<testcase classname="tests.python.test_lengths" name="test_d"><properties><property name="requirement" value="7"/></properties><skipped type="pytest.skip" message="path sm90 rejects it"/></testcase>
<testcase classname="tests.python.test_07_lengths" name="test_e"><skipped type="pytest.skip" message="path sm90 rejects it"/></testcase>
<testcase classname="tests.python.test_smoke" name="test_f"><skipped type="pytest.xfail" message="T = 300"/></testcase>
</testsuite></testsuites>"""


def test_cases_count_for_the_paths_that_have_computed_them(tmp_path):
    (tmp_path / "pytest.xml").write_text(XML)
    (tmp_path / "pytest.txt").write_text(COMMIT)
    report, process = run(tmp_path, tmp_path / "pytest.xml")
    lengths, smoke = report["pytest"]
    assert (lengths["what"], lengths["cases"], lengths["failed"], lengths["skipped"], lengths["seconds"]) == ("requirement 7", 3, 1, 2, 3.5)
    # Once a case, however many calls it made; a failed one has computed nothing to count on.
    assert lengths["paths"] == {"sm90": {"bfloat16": 2}, "cuda_generic": {"float32": 1}}
    assert lengths["backward"] == {"sm90": {"bfloat16": 1}}
    assert lengths["reasons"] == {"path sm90 rejects it": 2}
    assert smoke["expected_failures"] == 1 and smoke["skipped"] == smoke["cases"] == 0 and smoke["reasons"] == {"T = 300": 1}
    assert report["commits"] == ["0123456789ab"] and process.returncode == 1
    lines = (tmp_path / "out.json").read_text().splitlines()
    assert [json.loads(line.rstrip(",")) for line in lines if line.startswith('  {"commit"')] == report["pytest"]


def test_pytest_without_its_text_names_no_commit(tmp_path):
    (tmp_path / "pytest.xml").write_text(XML)
    assert "must name the commit" in run(tmp_path, tmp_path / "pytest.xml")[1].stderr


def test_groups_of_programs_say_who_has_computed_their_cases(tmp_path):
    report, _ = record(tmp_path, "backward, sm90: 150 cases, 0 failed, 18.2 s; largest error over its bound: o 0.9; sm90 120, cuda_generic 30\n")
    assert report["programs"][0]["paths"] == {"sm90": 120, "cuda_generic": 30}
    report, _ = record(tmp_path, PROGRAM)
    assert "paths" not in report["programs"][0]
