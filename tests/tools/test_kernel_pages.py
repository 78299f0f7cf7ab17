"""The pages of the Hopper kernels: short, a drawing each, and the same barriers in page, drawing and code."""

import html
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "kernels"
KERNELS = ROOT / "src" / "cuda" / "sm90"
MOST_WORDS = 1500

# Barriers are constants of a kernel's traits, after a line that says so, or functions of a struct.
CONSTANTS = {
    "forward": "chunk_fwd/traits.h",
    "forward_2cta": "chunk_fwd_2cta/traits.h",
    "context_parallel": "context_parallel/segment_state_roles.cuh",
}
STRUCTS = {
    "backward": {
        "PassBarriers": "chunk_bwd/passes/traits.cuh",
        "GradientsBarriers": "chunk_bwd/gradients/layout.cuh",
    }
}
NO_BARRIERS = {"TailCount"}  # that lies between barriers
PAGES = sorted([*CONSTANTS, *STRUCTS])


def section(text, begin, end):
    start = text.index(begin)
    return text[start : text.index(end, start)]


def barriers_in_code(page):
    if page in CONSTANTS:
        source = (KERNELS / CONSTANTS[page]).read_text()
        text = section(source, "// Barriers, 8 bytes each.", "static_assert(kSmemBytes")
        names = re.findall(r"static constexpr uint32_t k(\w+) =", text)
        return [name for name in names if not name.startswith(("Smem", "Assigned")) and name not in NO_BARRIERS]
    found = []
    for struct, file in STRUCTS[page].items():
        body = section((KERNELS / file).read_text(), f"struct {struct} {{", "\n};")
        found += re.findall(r"__device__ uint32_t (\w+)\(", body)
    return found


def barriers_in_page(text):
    """The first column of every table whose first heading is "barrier"."""
    tables = re.findall(r"^\| barrier \|.*\n\|[-|]+\n((?:\|.*\n)+)", text, flags=re.MULTILINE)
    return [name for table in tables for name in re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)]


def barriers_in_drawing(text):
    labels = re.findall(r'<text class="barrier"[^>]*>([^<]*)</text>', text)
    return {name for label in labels for name in re.sub(r"\(.*\)", "", html.unescape(label)).replace(",", " ").split()}


def words(text):
    return re.findall(r"[^\s|]*\w[^\s|]*", text)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_pages_are_short(path):
    assert len(words(path.read_text())) <= MOST_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_one_drawing(page):
    assert re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (FOLDER / f"{page}.md").read_text()) == [f"{page}.svg"]


def test_every_drawing_is_on_a_page():
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_page_drawing_and_code_name_the_same_barriers(page):
    code, listed = barriers_in_code(page), barriers_in_page((FOLDER / f"{page}.md").read_text())
    assert len(code) >= 7
    assert sorted(listed) == sorted(code)
    assert barriers_in_drawing((FOLDER / f"{page}.svg").read_text()) == set(code)


@pytest.mark.parametrize("page", PAGES)
def test_every_hand_over_has_all_columns(page):
    text = (FOLDER / f"{page}.md").read_text()
    assert "| barrier | stages | arrivals | who waits | what it protects | fence |" in text
    rows = re.findall(r"^\| `\w+` \|.*$", text, flags=re.MULTILINE)
    rows = [row for row in rows if re.match(r"\| `(\w+)`", row).group(1) in barriers_in_code(page)]
    assert rows and all(row.count("|") == 7 and all(cell.strip() for cell in row.split("|")[1:-1]) for row in rows)


def test_the_comparison_sees_a_difference():
    """What it reads is what it should."""
    tables = "| barrier | stages |\n|---|---|\n| `FullK` | 5 |\n\n| role | x |\n|---|---|\n| `NoBarrier` | 1 |\n"
    assert barriers_in_page(tables) == ["FullK"]
    drawing = '<text class="barrier" x="1">Done (both CTAs), TailV</text><text class="note">K</text>'
    assert barriers_in_drawing(drawing) == {"Done", "TailV"}
    assert "FullDescriptor" in barriers_in_code("forward_2cta") and "late_rows_full" in barriers_in_code("backward")
