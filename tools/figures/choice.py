"""Which measurements README shows: of each mode one comparison with other packages, by a rule and not by hand."""

import re
from collections import Counter
from dataclasses import dataclass

from figures.reports import EARLIER, KINDS, geometric_mean, marked, published, ratios_of, rows_of

# Tables of calls that the fastest path takes; others (by path, of whole layers, of several cards) stand in docs/benchmarks.md alone.
TABLES = re.compile(r"[a-z0-9]+_(peers(_\w+)?|forward|backward|train|decode)")

TITLES = {"fla": "FLA", "flashqla": "FlashQLA", "flashinfer": "FlashInfer", "transformers": "Transformers"}


def family(name: str) -> str:
    """The package of "flashinfer 0.7.2 auto_cp": "flashinfer"."""
    return name.split()[0]


def titled(name: str) -> str:
    """A package with its version, its modes aside."""
    words = name.split()
    return " ".join([TITLES.get(words[0], words[0]), *words[1:2]])


@dataclass(frozen=True)
class Comparison:
    """Our times of one table and mode beside those of other packages."""

    table: str
    machine: str
    date: str
    kind: str  # of KINDS
    ratios: tuple  # how many times ours the others' least time is, by row
    packages: tuple  # with their versions

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    @property
    def span(self) -> str:
        return f"{min(self.ratios):.2f} to {max(self.ratios):.2f}" if len(self.ratios) > 1 else ""

    @property
    def marks(self) -> str:
        return ("†" if self.kind == "recorded" else "") + ("§" if self.table in EARLIER else "")

    @property
    def source(self) -> str:
        return marked(self.table) + (" †" if self.kind == "recorded" else "")


def comparisons(reports: dict, mode: str, only: str = "") -> list:
    """Of every table, against the fastest of all other packages in each row; of one package against the fastest of its modes.
    Each with the number of all packages that the table has for the mode."""
    found = []
    for name, report in reports.items():
        for kind in KINDS:

            def others(row, only):
                return {n: ms for n, ms in row.get(kind, {}).items() if not published(n) and only in ("", family(n))}

            ratios = ratios_of(report, mode, lambda row: min(others(row, only).values(), default=None))
            packages = sorted({titled(n) for row in rows_of(report, mode) for n in others(row, only)})
            rivals = {family(n) for row in rows_of(report, mode) for n in others(row, "")}
            if ratios:
                found.append((len(rivals), Comparison(name, report["machine"], report["date"], kind, tuple(ratios), tuple(packages))))
    return found


def best(reports: dict, mode: str, only: str = ""):
    """Measured by the present bench before an earlier one, in the same run before recorded times; then of the table with more
    packages, more rows, the newer one. None without any."""

    def order(pair):
        rivals, found = pair
        return found.table not in EARLIER, found.kind == "peers", rivals, len(found.ratios), found.date

    return max(comparisons(reports, mode, only), key=order, default=(0, None))[1]


def on_a_gpu(reports: dict) -> dict:
    """The tables that count, of the GPU with the most rows."""
    found = {name: report for name, report in reports.items() if report["driver"] != "none" and TABLES.fullmatch(name)}
    rows = Counter()
    for report in found.values():
        rows[report["machine"]] += len(report["rows"])
    machine = max(rows, key=lambda name: (rows[name], name), default=None)
    return {name: report for name, report in found.items() if report["machine"] == machine}


def on_a_cpu(reports: dict) -> dict:
    return {name: report for name, report in reports.items() if report["driver"] == "none"}
