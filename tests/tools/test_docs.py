"""The documentation: every page says what it is for and is in the index, links lead somewhere, README is short, versions agree."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

PAGES = sorted((ROOT / "docs").rglob("*.md"))
INDEX = ROOT / "docs" / "README.md"
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"))]
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)\)")


def named(path):
    return str(path.relative_to(ROOT))


def prose(text):
    """The text without its blocks of code, in which brackets are no links."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def links(path):
    return [target for target in LINK.findall(prose(path.read_text())) if not re.match(r"[a-z]+:", target)]


def anchors(text):
    """Of a page's headings, as GitHub makes them: small letters, no punctuation, "-" for a space."""
    headings = re.findall(r"^#+ (.*)$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def opening(text):
    """The title and the first line under it."""
    return [line for line in text.splitlines() if line][:2]


def broken_links(path):
    found = []
    for target in links(path):
        name, _, anchor = target.partition("#")
        page = path.parent / name if name else path
        if not page.exists() or (anchor and anchor not in anchors(page.read_text())):
            found.append(target)
    return found


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_a_page_says_in_its_first_line_what_it_is_for(path):
    title, first = opening(path.read_text())
    assert title.startswith("# ") and first.startswith("This page ")


def test_every_page_is_in_the_index_once_with_a_line():
    rows = re.findall(r"^\| \[([^\]]+)\]\(([^)]+)\) \| (.+) \|$", INDEX.read_text(), flags=re.MULTILINE)
    listed = [(INDEX.parent / target).resolve() for _, target, _ in rows]
    assert sorted(listed) == sorted([*(page for page in PAGES if page != INDEX), ROOT / "CONTRIBUTING.md"])
    for title, target, line in rows:
        assert title == target and len(line.split()) > 2


@pytest.mark.parametrize("path", TEXTS, ids=named)
def test_links_lead_somewhere(path):
    assert broken_links(path) == []


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A page (`of.a`, test)\n[here](page.md#a-page-ofa-test) [a](#a) [b](gone.md) [c](https://c.org)\n```\n[d](gone)\n```\n")
    assert broken_links(page) == ["#a", "gone.md"]


def test_readme_fits_its_place():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    at = {line: number for number, line in enumerate(lines)}
    order = ["<!-- headline: begin -->", "## Install", "## Use", "## Train", "## Serve", "## Frameworks", "## Limits", "## Where to ask"]
    places = [at[heading] for heading in order]
    assert places == sorted(places)
    commands = [number for number, line in enumerate(lines) if line.startswith(("    tools/demo.sh", "    tools/test.sh"))]
    assert len(commands) == 2 and at["## Install"] < min(commands) and max(commands) < at["## Use"]


def test_the_changelog_begins_with_the_version_of_the_header():
    header = "".join(path.read_text() for path in (ROOT / "include" / "flash_qla").iterdir())
    version = ".".join(re.search(rf"#define FLASH_QLA_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))
    text = (ROOT / "CHANGELOG.md").read_text()
    assert len(text.splitlines()) <= 60
    headings = re.findall(r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$", text, flags=re.MULTILINE)
    assert headings[0] == ("Unreleased", "") and headings[1][0] == version and headings[1][1]
