"""docs/benchmarks.md: a summary of each file, then every row."""

from typing import Optional

from figures import layer_page
from figures.ladder import ladder
from figures.markdown import table
from figures.reports import (
    DAGGER,
    EARLIER,
    EARLIER_BENCH,
    KINDS,
    MODES,
    NOTHING,
    PUBLISHED,
    SECTION,
    compared,
    error_ratios,
    errors_of,
    fastest,
    geometric_mean,
    judged,
    marked,
    peer_time,
    peer_title,
    peers_of,
    ratios_of,
)  # fmt: skip

CASE = ["mode", "heads Hq/Hv", "sequences", "options"]


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
    "one card": lambda row: f"{row['one_card_ms']:.4g} ({row['speedup']:.2f}x)" if "speedup" in row else "",
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


def sentence(reports: dict) -> str:
    """Each mode against the fastest other package of each row, by table."""
    lines = []
    for mode, word in MODES.items():
        found = []
        for kind, how in KINDS.items():
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
    """Against the fastest, then a line for each file, mode and peer."""
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
    marks = {"†": DAGGER + " They stand in `benchmarks/recorded`.", "‡": PUBLISHED, "§": SECTION}
    notes = [note for mark, note in marks.items() if any(mark in cell for line in lines for cell in line)]
    notes = "".join(f"\n{note}\n" for note in notes)
    return f"{sentence(reports)}{table(header, lines)}{notes}{beside}"


HEAD = """# Benchmarks

This page has every measured row, a summary of them, and which path has passed which tests on a GPU. Generated by `tools/make_figures.py` from `benchmarks/results`: do not edit.

Times are medians in milliseconds; the ratio beside a peer's time is how many times it is ours. Every row was checked for correctness in the run that measured it: the largest error is the relative L2 error of the worst tensor, head by head, against fp64. The roofline counts the least traffic with DRAM and the products at the tensor cores' sustained rate; states that stay in the L2 cache can pass it. fla's decode reads 16-bit states and writes float32 ones; FlashInfer's makes the gates itself, from raw ones in bfloat16.
"""


def full(reports: dict, records: dict, layers: Optional[dict] = None) -> str:
    """The page. `layers`: reports of the layer (layer_page.py)."""
    parts = [HEAD, f"## In short\n\n{summary(reports)}"]
    for name, report in reports.items():
        parts.append(f"## {name}\n\n{where(name, report)}{times(report['rows'])}{accuracy(report)}")
    parts += [layer_page.section(name, report) for name, report in (layers or {}).items()]
    return "\n".join([*parts, ladder(records)])
