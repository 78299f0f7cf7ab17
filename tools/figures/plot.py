"""The plot on README's first screen: other packages' time per call as a multiple of ours, as SVG text."""

from xml.sax.saxutils import escape

from figures.choice import TITLES, best, on_a_gpu
from figures.reports import MODES

NAME = "speed.svg"

# Pixels: of the whole, where bars begin, the longest bar, a bar's row, between two groups.
WIDTH, LEFT, LONGEST, ROW, GAP = 760, 150, 400, 22, 16

# Text, background and bars in a light and in a dark scheme; the background is drawn, so that the text is readable on any page.
STYLE = """\
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f }
.title { font-size: 15px; font-weight: 600 } .group { font-weight: 600 } .small { font-size: 11px; fill: #57606a }
.back { fill: #ffffff } .other { fill: #a9b4c0 } .ours { fill: #2f7d4f } .range { stroke: #57606a; stroke-width: 1.5 }
.one { stroke: #2f7d4f; stroke-width: 1; stroke-dasharray: 3 3 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } .back { fill: #0d1117 } .other { fill: #56606c } .ours { fill: #3fa869 }
  .range { stroke: #c2ccd6 } .one { stroke: #3fa869 }
}"""


def groups(reports: dict) -> list:
    """(mode's word, [(package, comparison)]) of every mode in which another package was timed on the GPU."""
    tables = on_a_gpu(reports)
    found = []
    for mode in ("fwd", "bwd", "train", "decode"):
        of_mode = [(title, best(tables, mode, only)) for only, title in TITLES.items()]
        of_mode = [(title, comparison) for title, comparison in of_mode if comparison]
        if of_mode:
            found.append((MODES[mode], of_mode))
    return found


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={chr(34)}{kind}{chr(34)}" if kind else ""}>{escape(words)}</text>'


def bar(y: float, length: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{LEFT}" y="{y:g}" width="{length:.1f}" height="{ROW - 6}" rx="2"/>'


def draw(reports: dict) -> str:
    """The file; empty without anything to compare with."""
    found = groups(reports)
    if not found:
        return ""
    comparisons = [comparison for _, of_mode in found for _, comparison in of_mode]
    scale = LONGEST / max(max(comparison.ratios) for comparison in comparisons)
    machine = comparisons[0].machine
    parts, y = [text(16, 28, f"Time per call as a multiple of flash_qla's, {machine} (shorter is faster)", "title")], 44
    for word, of_mode in found:
        y += GAP
        parts.append(text(16, y + 8, word, "group"))
        y += ROW - 4
        top = y
        parts += [text(32, y + 13, "flash_qla"), bar(y, scale, "ours"), text(LEFT + scale + 8, y + 13, "1")]
        for title, comparison in of_mode:
            y += ROW
            least, most = (LEFT + scale * end for end in (min(comparison.ratios), max(comparison.ratios)))
            middle = y + (ROW - 6) / 2
            parts += [text(32, y + 13, title), bar(y, scale * comparison.mean, "other")]
            parts.append(f'<path class="range" d="M{least:.1f} {middle - 4:g}v8M{least:.1f} {middle:g}H{most:.1f}m0 -4v8"/>')
            span = f" ({comparison.span})" if comparison.span else ""
            calls = f"{comparison.mean:.2f}{span}, {len(comparison.ratios)} calls {comparison.marks}"
            parts.append(text(max(most, LEFT + scale * comparison.mean) + 8, y + 13, calls.rstrip(), "small"))
        parts.append(f'<path class="one" d="M{LEFT + scale:.1f} {top:g}V{y + ROW - 6:g}"/>')
        y += ROW
    notes = [
        "Bar: geometric mean of all calls in which both were timed; line: from the least to the most.",
        "Where a package has several modes: the fastest of them in each call.",
    ]
    marks = "".join(comparison.marks for comparison in comparisons)
    meant = {"†": "† times of an earlier run on the same kind of machine.", "§": "§ by an earlier version of the bench (docs/benchmarks.md)."}
    if any(mark in marks for mark in meant):
        notes.append(" ".join(note for mark, note in meant.items() if mark in marks))
    parts += [text(16, y + 18 + 16 * i, note, "small") for i, note in enumerate(notes)]
    height = y + 18 + 16 * len(notes)
    described = "; ".join(f"{word}: " + ", ".join(f"{title} {c.mean:.2f}" for title, c in of_mode) for word, of_mode in found)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}" role="img">\n'
        f"<title>Time per call as a multiple of flash_qla's, on an {escape(machine)}</title>\n<desc>{escape(described)}</desc>\n"
        f'<style>\n{STYLE}\n</style>\n<rect class="back" width="{WIDTH}" height="{height:g}" rx="8"/>'
    )
    return "\n".join([head, *parts, "</svg>"]) + "\n"
