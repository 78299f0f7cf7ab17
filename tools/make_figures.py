#!/usr/bin/env python3
"""Writes what README.md and docs/benchmarks.md say about speed and tests, and docs/sanitizers.md, from benchmarks/results/*.json
and nothing else.

    make_figures.py            rewrites docs/benchmarks.md, docs/sanitizers.md, and in README.md what stands between the marks
    make_figures.py --check    changes nothing; exit code 1 if any is out of date

Files with rows are written by `python -m flash_qla bench`, h200_reliability.json by tools/record_reliability.py.
"""

import json
import sys
from collections import defaultdict
from pathlib import Path

from kernel_sources import Sources
from sanitizer_page import page, spans, table

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python" / "flash_qla" / "cli"))
from results import geometric_mean  # noqa: E402

MODES = {"fwd": "forward", "bwd": "backward", "train": "forward + backward", "decode": "decode", "options": "forward"}
NOTHING = "No results have been recorded yet.\n"

# Files that an earlier version of the bench, or of the record, has written: the protocol in them is no longer one that it writes.
# A file that is measured again leaves the list (tests/tools/test_results.py).
EARLIER = {"h200_decode"}
EARLIER_BENCH = (
    "written by an earlier version of the bench: medians of graphs of five calls, with no load before them, and what they left was "
    "not checked; errors of what is zero were divided by sqrt(n), so that they are in no ratio here"
)

DAGGER = "† times recorded in an earlier run on the same kind of machine."
PUBLISHED = "‡ times published by that package's authors, of a machine of theirs."
SECTION = f"§ {EARLIER_BENCH}."


def load(folder: Path) -> dict:
    """Reports by file name, those with rows of the bench alone."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: report for name, report in reports.items() if report.get("rows") and "mode" in report["rows"][0]}


def lengths(row: dict) -> str:
    """ "4 x 8192" for equal sequences, else "28672 + 4096"."""
    seqlens = row["seqlens"]
    if len(set(seqlens)) == 1:
        return f"{len(seqlens)} x {seqlens[0]}"
    return " + ".join(map(str, seqlens))


def options(row: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in row["options"].items())


def case(row: dict) -> list:
    return [MODES[row["mode"]], f"{row['hq']}/{row['hv']}", lengths(row), options(row)]


CASE = ["mode", "heads Hq/Hv", "sequences", "options"]


def largest_error(row: dict) -> str:
    """Of all tensors, and of all heads where they were told apart; what is zero has none."""
    errors = [e for e in (*row["err"].values(), *row.get("err_worst_head", {}).values()) if e is not None]
    return f"{max(errors):.1e}" if errors else ""


# Columns of our own: title, and what a row says; a column in which no row says anything is left out.
COLUMNS = {
    "ms": lambda row: f"{row['ms']:.4g}",
    "least to most": lambda row: f"{row['ms_min']:.4g} to {row['ms_max']:.4g}" if "ms_min" in row else "",
    "flushed": lambda row: f"{row['flushed_ms']:.4g}" if "flushed_ms" in row else "",
    "eager, wall": lambda row: f"{row['eager_ms']:.4g}" if "eager_ms" in row else "",
    "eager, host (us)": lambda row: f"{row['eager_host_us']:.4g}" if "eager_host_us" in row else "",
    "of roofline": lambda row: "" if row.get("roofline") is None else f"{100 * row['roofline']:.0f} %",
    "largest error": largest_error,
}


def where(name: str, report: dict) -> str:
    driver = "" if report["driver"] == "none" else f", driver {report['driver']}, CUDA {report['cuda']}"
    text = f"{report['machine']}{driver}; torch {report['torch']}; commit {report['commit']}, {report['date']}. {report['protocol']}\n"
    if name in EARLIER:
        text += f"\nThis file was {EARLIER_BENCH}.\n"
    if report.get("left_out"):
        text += f"\nRows that were not measured, or whose check failed: {', '.join(report['left_out'])}.\n"
    return text


def published(name: str) -> bool:
    return name.endswith("as published")


def peers_of(rows: list) -> list:
    """(kind, name) of everything else with times: ours without a sequence split, other packages in the same run, then those
    recorded in an earlier one."""
    unsplit = [("unsplit", "")] if any("unsplit_ms" in row for row in rows) else []
    return unsplit + [(kind, name) for kind in ("peers", "recorded") for name in sorted({n for row in rows for n in row.get(kind, {})})]


def peer_time(row: dict, kind: str, name: str):
    return row.get("unsplit_ms") if kind == "unsplit" else row.get(kind, {}).get(name)


def peer_title(kind: str, name: str) -> str:
    mark = {"peers": "", "recorded": " ‡" if published(name) else " †"}
    return "ours, auto_cp=False" if kind == "unsplit" else name + mark[kind]


def fastest(row: dict, kind: str):
    """Least time of all other packages on a row, of the same run ("peers") or recorded on such a machine ("recorded"); None
    without any."""
    return min((ms for name, ms in row.get(kind, {}).items() if not published(name)), default=None)


def judged(rows: list) -> list:
    """Packages whose tensors were compared with the oracle as ours were."""
    return sorted({name for row in rows for name in row.get("peer_err_worst_head", {})})


def errors_of(row: dict, peer: str, tensor: str) -> tuple:
    """A tensor's errors, median and worst of the heads: a peer's, or ours for the peer ""; None where there is no number."""
    if not peer:
        return row["err_median_head"][tensor], row["err_worst_head"][tensor]
    return tuple(row.get(f"peer_err_{which}_head", {}).get(peer, {}).get(tensor) for which in ("median", "worst"))


def accuracy(report: dict) -> str:
    """Errors of every tensor beside those of the packages that were judged; empty without any."""
    peers = judged(report["rows"])
    if not peers:
        return ""
    lines = []
    for row in report["rows"]:
        for tensor in row["err_median_head"]:
            found = [errors_of(row, peer, tensor) for peer in ("", *peers)]
            if any(None not in pair for pair in found[1:]):
                cells = ["" if None in pair else f"{pair[0]:.2e} / {pair[1]:.2e}" for pair in found]
                lines.append([*case(row), tensor, *cells])
    header = [*CASE, "tensor", "ours", *peers]
    return "\nRelative L2 error against fp64 on the same inputs, median of the heads / worst head:\n\n" + table(header, lines)


def times(rows: list) -> str:
    """Every row that was timed, beside everything that has times; empty without any."""
    rows = [row for row in rows if "ms" in row]
    if not rows:
        return ""
    columns = {title: [cell(row) for row in rows] for title, cell in COLUMNS.items()}
    columns = {title: cells for title, cells in columns.items() if any(cells)}
    for peer in peers_of(rows):
        ms = [(peer_time(row, *peer), row["ms"]) for row in rows]
        columns[peer_title(*peer)] = ["" if t is None else f"{t:.4g} ({t / ours:.2f}x)" for t, ours in ms]
    return "\n" + table([*CASE, *columns], [[*case(row), *cells] for row, *cells in zip(rows, *columns.values())])


def full(reports: dict, records: dict) -> str:
    """docs/benchmarks.md: every row."""
    parts = [
        "# Benchmarks\n\nEvery measured row, and which path has passed which tests on a GPU. Generated by `tools/make_figures.py` from "
        "`benchmarks/results`: do not edit. Times are medians in milliseconds; the ratio beside a peer's time is how many times it is ours. "
        "Every row was checked for correctness in the run that measured it: the largest error is the relative L2 error of the worst "
        "tensor, head by head, against fp64. The roofline counts the least traffic with DRAM and the products at the tensor cores' "
        "sustained rate; states that stay in the L2 cache can pass it. fla's decode reads 16-bit states and writes float32 ones; FlashInfer's "
        f"makes the gates itself, from raw ones in bfloat16.\n\n{DAGGER} They stand in `benchmarks/recorded`. {PUBLISHED}\n"
    ]
    for name, report in reports.items():
        parts.append(f"## {name}\n\n{where(name, report)}{times(report['rows'])}{accuracy(report)}")
    if not reports:
        parts.append(NOTHING)
    return "\n".join([*parts, ladder(records)])


def error_ratios(rows: list, peer: str) -> list:
    """Our error over a peer's, (median, worst head), for every tensor of every row that has both."""
    ratios = []
    for row in rows:
        for tensor in row.get("err_median_head", {}):
            # fla's decode returns the states of a 16-bit pool in float32: another tensor than ours, which is rounded.
            if tensor == "final_state" and row["options"].get("state_dtype", "float32") != "float32":
                continue
            ours, theirs = errors_of(row, "", tensor), errors_of(row, peer, tensor)
            if None not in ours + theirs:
                ratios.append(tuple(a / b for a, b in zip(ours, theirs)))
    return ratios


def marked(name: str) -> str:
    return f"{name} §" if name in EARLIER else name


def ratios_of(report: dict, mode: str, time) -> list:
    """How many times ours goes into time(row), of the rows of a mode that have both."""
    rows = [row for row in report["rows"] if row["mode"] == mode and "ms" in row]
    return [time(row) / row["ms"] for row in rows if time(row) is not None]


def compared(report: dict) -> list:
    """(mode, what our time is compared with, how many times ours that takes in each row). Behind the other packages of a kind
    the fastest of them in each row, where they are several."""
    found = []
    for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
        peers = peers_of([row for row in report["rows"] if row["mode"] == mode])
        for kind, name in peers:
            found.append((mode, peer_title(kind, name), ratios_of(report, mode, lambda row: peer_time(row, kind, name))))
        for kind in ("peers", "recorded"):
            if sum(of == kind and not published(name) for of, name in peers) > 1:
                found.append((mode, peer_title(kind, "the fastest of them"), ratios_of(report, mode, lambda row: fastest(row, kind))))
    return [line for line in found if line[2]]


def sentence(reports: dict) -> str:
    """README's words on speed: each mode against the fastest other package of each row, by table."""
    lines = []
    for mode, word in MODES.items():
        found = []
        for kind, how in (("peers", "in the same run"), ("recorded", "as recorded")):
            for name, report in reports.items():
                ratios = ratios_of(report, mode, lambda row: fastest(row, kind))
                if not ratios:
                    continue
                lost = sum(ratio < 1 for ratio in ratios)
                least = f"s, {min(ratios):.4g} at least" if len(ratios) > 1 else ""
                found.append(
                    f"{geometric_mean(ratios):.4g} times as fast {how} on an {report['machine']} ({marked(name)}, {len(ratios)} row{least}"
                    + (f", slower in {lost} of them)" if lost else ")")
                )
        if found:
            lines.append(f"- {word}: {'; '.join(found)}\n")
    return f"Row by row against the fastest other package (geometric means):\n\n{''.join(lines)}\n" if lines else ""


def summary(reports: dict) -> str:
    """README's part on speed: against the fastest, then a line for each file, mode and peer."""
    if not reports:
        return NOTHING
    lines = []
    for name, report in reports.items():
        for mode, peer, values in compared(report):
            span = f"{min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""
            lines.append([report["machine"], marked(name), MODES[mode], peer, str(len(values)), f"{geometric_mean(values):.2f}x", span])
    header = ["machine", "table", "what", "compared with", "rows", "times faster (geometric mean)", "range"]
    errors = []
    for name, report in reports.items():
        for mode in dict.fromkeys(row["mode"] for row in report["rows"]) if name not in EARLIER else ():
            rows = [row for row in report["rows"] if row["mode"] == mode]
            for peer in judged(rows):
                ratios = error_ratios(rows, peer)
                if ratios:
                    cells = [f"{min(r):.2f}x to {max(r):.2f}x" for r in zip(*ratios)]
                    errors.append([name, MODES[mode], peer, str(len(ratios)), *cells])
    told = ["table", "what", "compared with", "tensors", "our error over theirs, median of the heads", "worst head"]
    beside = f"\nErrors against fp64 on the same inputs, of what has a relative error:\n\n{table(told, errors)}" if errors else ""
    marks = {"†": DAGGER, "‡": PUBLISHED, "§": SECTION}
    notes = [note for mark, note in marks.items() if any(mark in cell for line in lines for cell in line)]
    notes = "".join(f"\n{note}\n" for note in notes)
    return f"{sentence(reports)}{table(header, lines)}{notes}{beside}\nEvery row, with machine, commit and protocol: [docs/benchmarks.md](docs/benchmarks.md).\n"


def of_paths(record: dict) -> list:
    """(path, dtype) of everything that has computed a case."""
    return sorted({(path, dtype) for part in record["pytest"] for path, dtypes in part["paths"].items() for dtype in dtypes})


def ladder(records: dict) -> str:
    """Which path has passed which rung in which dtype, as the records have it."""
    text = "## The ladder of tests on a GPU\n\n"
    for name, record in records.items():
        text += f"{ran(name, record)}\n"
        if name not in EARLIER:
            text += rungs(record)
    return text if records else text + NOTHING


def rungs(record: dict) -> str:
    columns = of_paths(record)
    lines = []
    for part in record["pytest"]:
        cells = []
        for path, dtype in columns:
            count, backward = (part[kind].get(path, {}).get(dtype, 0) for kind in ("paths", "backward"))
            cells.append("" if not count else f"{count} ({backward})" if backward else str(count))
        counts = [str(part[name]) for name in ("cases", "failed", "expected_failures", "skipped")]
        lines.append([part["what"] + (", cut short" if part["cut_short"] else ""), part["commit"], *counts, *cells])
    header = ["rung or file", "commit", "cases", "failed", "failed as expected", "skipped", *(f"{path}, {dtype}" for path, dtype in columns)]
    reasons = defaultdict(int)
    for part in record["pytest"]:
        for reason, count in part["reasons"].items():
            reasons[reason] += count
    skipped = "".join(f"- {count}: {reason}\n" for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]))
    return (
        "\nA case counts for a path if it has passed and the path has computed at least one call of it; in brackets those with a "
        f"gradient among them.\n\n{table(header, lines)}" + (f"\nSkipped, or failed as expected, and why:\n\n{skipped}" if skipped else "")
    )


def ran(name: str, record: dict) -> str:
    """How much of the ladder has run, and whether it passed."""
    text = f"On an {record['machine']}, commit {', '.join(record['commits'])}, {record['date']}: "
    if name in EARLIER:
        return text + (
            f"{record['summary']['cases']} cases of tests, device programs and `check`, {record['summary']['failed']} failed. This record is "
            "of an earlier version, which does not say which path has computed a case: no rung counts as passed by `sm90` until it is made "
            "again."
        )
    cases, failed, expected, skipped = (sum(part[key] for part in record["pytest"]) for key in ("cases", "failed", "expected_failures", "skipped"))
    return f"{text}{cases} cases of the Python tests, {failed} failed, {expected} more failed as expected, {skipped} skipped."


def passed(records: dict) -> str:
    """README's part on tests: what was passed on a GPU, and by which path."""
    if not records:
        return NOTHING
    text = ""
    for name, record in records.items():
        text += f"{ran(name, record)}\n"
        for path, dtype in of_paths(record) if name not in EARLIER else ():
            numbers = {
                kind: {int(part["what"][5:]) for part in record["pytest"] if part["what"].startswith("rung ") and part[kind].get(path, {}).get(dtype)}
                for kind in ("paths", "backward")
            }
            if numbers["paths"]:
                gradients = f", with a gradient in {spans(sorted(numbers['backward']))}" if numbers["backward"] else ""
                text += f"- Path `{path}` in {dtype} has computed cases that passed in rungs {spans(sorted(numbers['paths']))}{gradients}.\n"
    return f"{text}\nBy rung, path and dtype: [docs/benchmarks.md](docs/benchmarks.md#the-ladder-of-tests-on-a-gpu).\n"


def between(text: str, name: str, words: str) -> str:
    """The text with these words between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    return f"{before}{begin}\n{words}{end}{rest.split(end)[1]}"


def main() -> int:
    results = ROOT / "benchmarks" / "results"
    records = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*_reliability.json"))}
    reports = load(results)
    readme = (ROOT / "README.md").read_text()
    wanted = {
        ROOT / "README.md": between(between(readme, "figures", summary(reports)), "record", passed(records)),
        ROOT / "docs" / "benchmarks.md": full(reports, records),
        ROOT / "docs" / "sanitizers.md": page(records.get("h200_reliability", {}), Sources()),
    }
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run tools/make_figures.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
