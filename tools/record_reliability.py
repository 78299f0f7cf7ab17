#!/usr/bin/env python3
"""Writes benchmarks/results/h200_reliability.json (what ran on a GPU, how often, how long, how it ended) from logs alone.

    record_reliability.py OUT.json LOG...

Logs, told apart by their content; any number may be given, those of the newest commit first. Each says which commit ran, in a
line "commit: ..." (build_info() has it); one that does not is refused:
    pytest's --junitxml of tests/python, with the text log of the same name beside it, which names the commit and says whether
    the run was cut short; or the text log alone, of which the last line counts. A case's properties "calls", of values like
    "chunk_forward sm90 bfloat16 3" (operation, path, dtype, how often), say which path has computed it; its property "requirement"
    which requirement of docs/testing.md it is about
    what cuda_generic_test and the Hopper harnesses print ("<group>: N cases, M failed, S s", and behind that
    "; sm90 120, cuda_generic 30" where a group counts the cases of each path)
    what `python -m flash_qla check` prints
    an earlier record (.json): its runs of compute-sanitizer are kept where no log has any
    what compute-sanitizer prints around one of those programs, after a line "== compute-sanitizer --tool T PROGRAM.."; with
    cuda_generic_test --kernels it also says which build it is, which of the library's kernels a run has launched, and with which
    tails: the record has these by tool, over all of its runs that ended, for the kernels that the first commit's program has, each
    with the build and the commit of the first run that launched it, and a digest of what it was compiled from then
"""

import datetime
import functools
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path
from typing import Iterable

from kernel_sources import Sources

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "flash_qla" / "cli"))
from results import file_text  # noqa: E402

COMMIT = re.compile(r"^commit: (\S+)$", re.MULTILINE)
CASES = re.compile(r"^(?P<group>[^=\n][^:\n]*): (?P<cases>\d+) cases, (?P<failed>\d+) failed, (?P<seconds>[\d.]+) s"
                   r"(?:[^\n]*; (?P<paths>\w+ \d+(?:, \w+ \d+)*)$)?", re.MULTILINE)
CHECK = re.compile(r"^check (?P<set>\w+), (?P<heads>\d+) heads, cuda, .*: (?P<passed>\d+) of (?P<cases>\d+) cases passed, (?P<seconds>\d+) s", re.MULTILINE)
SANITIZER = re.compile(r"^== compute-sanitizer --tool (?P<tool>\w+) (?P<options>(?:--[\w-]+ (?:kns=\S+ |\d+ )?)*)(?:\S*/)?(?P<command>.*)$", re.MULTILINE)
WITHOUT, ALONE = re.compile(r"--kernel-name-exclude kns=(\S+)"), re.compile(r"--kernel-name kns=(\S+)")
# racecheck sums up in a form of its own.
SUMMARY = re.compile(r"^=+ (?:ERROR SUMMARY: (\d+) errors?|RACECHECK SUMMARY: (\d+) hazards? displayed.*)", re.MULTILINE)
SECONDS = re.compile(r"-- (\d+) s$", re.MULTILINE)  # behind half a line, where a tool was ended
PYTEST = re.compile(r"^=* ?\d+ (?:passed|failed).* in [\d.]+s.*$", re.MULTILINE)
BUILD = re.compile(r"^build: (\S+)$", re.MULTILINE)
HAS, LAUNCHED = (re.compile(rf"^{words} (.+)$", re.MULTILINE) for words in ("the program has", "launched"))
# "tails of PATH: 3 calls, 1 strided, 2 with tokens after the last sequence; tokens of the last chunk 0 1 64; K 16 128; bf16"
TAILS = re.compile(r"^tails of (?P<path>[^:]+): (?P<calls>\d+) calls, (?P<strided>\d+) strided, (?P<padded>\d+) [^;]*; (?P<sets>.*)$", re.MULTILINE)
GPU = re.compile(r"^gpu_0: ([^,\n]+)", re.MULTILINE)


def subject_of(file: str, name: str, properties: Iterable) -> str:
    """ "requirement 7" of a test that has the property ("requirement", "7"); else its file's name without "test_". Of logs from
    before there was such a property: by the name, test_rung7_lengths, or the file's, test_07_*."""
    given = dict(properties).get("requirement")
    if given is not None:
        return f"requirement {int(given)}"
    numbered = re.match(r"test_rung(\d+)", name) or re.match(r"test_(0[1-9]|[1-9]\d)_", file)
    return f"requirement {int(numbered.group(1))}" if numbered else re.sub(r"^test_(\d+_)?", "", file)


def commit_of(log: Path, text: str) -> str:
    """The one commit that a log names; pytest's XML has it in the text log beside it."""
    beside = log.with_suffix(".txt")
    if log.suffix == ".xml":
        text = beside.read_text(errors="replace") if beside.exists() else ""
    commits = {*COMMIT.findall(text)} - {"unknown"}
    if len(commits) != 1:
        sys.exit(f"{log}: a log must name the commit that ran, in a line \"commit: ...\" ({', '.join(sorted(commits)) or 'none'})")
    return commits.pop()


def count_calls(case: ElementTree.Element, record: dict) -> None:
    """Counts a case for every path and dtype that has computed a call of it, and apart from that those with a gradient."""
    calls = [p.get("value").split() for p in case.iter("property") if p.get("name") == "calls"]
    for name, chosen in (("paths", calls), ("backward", [call for call in calls if call[0] == "chunk_backward"])):
        for path, dtype in {(call[1], call[2]) for call in chosen}:
            of_path = record[name].setdefault(path, {})
            of_path[dtype] = of_path.get(dtype, 0) + 1


def read_pytest(text: str) -> list:
    """One record for each requirement or file. Cases that a path has computed are those that passed."""
    found = defaultdict(lambda: {"cases": 0, "failed": 0, "skipped": 0, "expected_failures": 0, "seconds": 0.0, "paths": {}, "backward": {},
                                 "reasons": {}})  # fmt: skip
    for case in ElementTree.fromstring(text).iter("testcase"):
        if not case.get("classname"):  # the interrupt itself, where a run was cut short
            continue
        properties = [(p.get("name"), p.get("value")) for p in case.iter("property")]
        record = found[subject_of(case.get("classname", "").rpartition(".")[2], case.get("name", ""), properties)]
        skipped = case.find("skipped")
        if skipped is not None:
            record["expected_failures" if skipped.get("type") == "pytest.xfail" else "skipped"] += 1
            reason = skipped.get("message", "")
            record["reasons"][reason] = record["reasons"].get(reason, 0) + 1
            continue
        record["cases"] += 1
        record["seconds"] += float(case.get("time", 0))
        if case.find("failure") is not None or case.find("error") is not None:
            record["failed"] += 1
        else:
            count_calls(case, record)
    order = sorted(found, key=lambda name: (not name.startswith("requirement"), int(name[12:]) if name.startswith("requirement") else 0, name))
    return [{"what": name, **found[name], "seconds": round(found[name]["seconds"], 1)} for name in order]


def read_pytest_text(text: str) -> list:
    """One record: what the last line of pytest says."""
    numbers = {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|skipped)", PYTEST.findall(text)[-1])}
    failed = numbers.get("failed", 0)
    return [{"what": "whole run", "cases": numbers.get("passed", 0) + failed, "failed": failed, "skipped": numbers.get("skipped", 0),
             "seconds": float(re.search(r"in ([\d.]+)s", PYTEST.findall(text)[-1]).group(1))}]


def read_sanitizer(text: str) -> list:
    """One record for each run of a tool; a run without a summary did not end, and one whose program failed, or in which no group
    of cases ended (no memory left, say), has not looked at everything: these have no number of reports."""
    records = []
    starts = [*SANITIZER.finditer(text)]
    for start, end in zip(starts, [*(s.start() for s in starts[1:]), len(text)]):
        part = text[start.end() : end]
        summary, seconds = SUMMARY.search(part), SECONDS.search(part)
        cases, build = [int(m["cases"]) for m in CASES.finditer(part)], BUILD.search(part)
        without, alone = WITHOUT.findall(start["options"]), ALONE.findall(start["options"])
        records.append({
            "tool": start["tool"], **({"build": build.group(1)} if build else {}), **({"without": without} if without else {}), **({"alone": alone} if alone else {}), "command": start["command"].strip(), "cases": sum(cases),
            "reports": None if summary is None or not cases or "application returned an error" in part else int(summary.group(1) or summary.group(2)),
            "seconds": None if seconds is None else int(seconds.group(1))})
    return records


def add_tails(text: str, tails: dict) -> None:
    """What a run's last word on each path was (it repeats itself after each group), into tails[path]."""
    for path, said in {m["path"]: m for m in TAILS.finditer(text)}.items():
        of_path = tails.setdefault(path, {"calls": 0, "strided": 0, "tokens after the last sequence": 0, "dtypes": []})
        for name, count in (("calls", "calls"), ("strided", "strided"), ("tokens after the last sequence", "padded")):
            of_path[name] += int(said[count])
        *sets, dtypes = said["sets"].split(";")
        of_path["dtypes"] = sorted({*of_path["dtypes"], *dtypes.split()})
        for name, values in (re.match(r" ?(.*?)((?: \d+)*)$", part).groups() for part in sets):
            of_path[name] = sorted({*of_path.get(name, []), *map(int, values.split())})


@functools.cache
def sources_of(commit: str) -> Sources:
    return Sources(commit)


def main() -> int:
    out = Path(sys.argv[1])
    report = {"machine": None, "commits": [], "date": None, "pytest": [], "programs": [], "check": [], "sanitizers": []}
    newest = 0.0
    kernels, reached, tails, earlier = {}, defaultdict(dict), defaultdict(dict), {}
    for argument in sys.argv[2:]:
        log = Path(argument)
        text = log.read_text(errors="replace")
        if log.suffix == ".json":
            earlier = json.loads(text)
            continue
        commit = commit_of(log, text)
        if commit not in report["commits"]:
            report["commits"].append(commit)
        newest = max(newest, log.stat().st_mtime)
        if log.suffix == ".xml" or (PYTEST.search(text) and not CASES.search(text)):
            beside = log.with_suffix(".txt")
            told = beside.read_text(errors="replace") if beside.exists() else text
            gpu = GPU.search(told)
            report["machine"] = report["machine"] or (gpu and gpu.group(1))
            cut = "KeyboardInterrupt" in told
            records = read_pytest(text) if log.suffix == ".xml" else read_pytest_text(text)
            report["pytest"] += [{"commit": commit, "cut_short": cut, **record} for record in records]
            continue
        gpu = GPU.search(text)
        report["machine"] = report["machine"] or (gpu and gpu.group(1))
        if SANITIZER.search(text):
            records = read_sanitizer(text)
            report["sanitizers"] += [{"commit": commit, **record} for record in records]
            # Where the tool has words of its own they may stand in the middle of the program's.
            if all(record["reports"] == 0 for record in records):
                kernels.setdefault(commit, set()).update(HAS.findall(text))
            if len(records) == 1 and records[0]["reports"] is not None:
                without, alone = records[0].get("without", []), records[0].get("alone", [""])
                for name in LAUNCHED.findall(text):
                    if not any(part in name for part in without) and any(part in name for part in alone):
                        # The newest run is the first that is given.
                        run = {"commit": commit, "build": records[0].get("build", "unknown"), "sources": sources_of(commit).digest(name)}
                        reached[records[0]["tool"]].setdefault(name, run)
                add_tails(text, tails[records[0]["tool"]])
            continue
        for m in CHECK.finditer(text):
            cases = int(m["cases"])
            report["check"].append({"commit": commit, "set": m["set"], "heads": int(m["heads"]), "cases": cases, "failed": cases - int(m["passed"]),
                                    "seconds": int(m["seconds"])})
        for m in CASES.finditer(text):
            paths = {path: int(count) for path, count in re.findall(r"(\w+) (\d+)", m["paths"] or "")}
            report["programs"].append({"commit": commit, "what": m["group"], "cases": int(m["cases"]), "failed": int(m["failed"]),
                                       "seconds": float(m["seconds"]), **({"paths": paths} if paths else {})})
    if earlier and not report["sanitizers"]:
        report["sanitizers"] = earlier["sanitizers"]
        report["commits"] += sorted({run["commit"] for run in earlier["sanitizers"]} - set(report["commits"]))
        report |= {part: earlier[part] for part in ("kernels", "tails") if part in earlier}
    report["date"] = datetime.datetime.fromtimestamp(newest, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    counted = [*report["pytest"], *report["programs"], *report["check"]]
    failed = sum(record["failed"] for record in counted)
    reports = sum(record["reports"] is None or record["reports"] > 0 for record in report["sanitizers"])
    cases = sum(record["cases"] for record in counted)
    kernels = next(iter(kernels.values()), set())  # of the first commit
    if kernels:
        report["kernels"] = {name: {tool: reached[tool][name] for tool in sorted(reached) if name in reached[tool]} for name in sorted(kernels)}
        report["tails"] = tails
    report["summary"] = {"cases": cases, "failed": failed, "sanitizer_runs": len(report["sanitizers"]), "sanitizer_runs_with_reports": reports}
    out.write_text(file_text(report))
    print(f"{out}: {cases} cases, {failed} failed; {len(report['sanitizers'])} sanitizer runs, {reports} not clean")
    for tool in sorted(reached):
        missing = sorted(kernels - reached[tool].keys())
        print(f"{tool}: {len(kernels) - len(missing)} of {len(kernels)} kernels" + (f"; not {', '.join(missing)}" if missing else ""))
    return 1 if failed or reports else 0


if __name__ == "__main__":
    sys.exit(main())
