#!/usr/bin/env python3
"""Writes what README.md says about speed and tests, its plot, docs/benchmarks.md, docs/sanitizers.md and the table of
docs/peer_tests.md, from benchmarks/results and nothing else.

    make_figures.py            rewrites the generated files, and in README.md what stands between the marks
    make_figures.py --check    changes nothing; exit code 1 if any is out of date

Files with rows are written by `python -m flash_qla bench`, h200_reliability.json by tools/record_reliability.py, those in
peer_tests by tools/peer_tests.sh. The parts
are in tools/figures.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from figures import layer_page, peer_tests_page, plot, readme  # noqa: E402
from figures.benchmarks_page import full  # noqa: E402
from figures.markdown import between  # noqa: E402
from figures.reports import ROOT, load  # noqa: E402
from kernel_sources import Sources  # noqa: E402
from sanitizer_page import page  # noqa: E402


def main() -> int:
    results = ROOT / "benchmarks" / "results"
    records = {path.stem: json.loads(path.read_text()) for path in sorted(results.glob("*_reliability.json"))}
    reports = load(results)
    text = (ROOT / "README.md").read_text()
    for name, words in (("headline", readme.headline(reports)), ("speed", readme.speed(reports)), ("status", readme.status(records))):
        text = between(text, name, words)
    peer_tests = ROOT / "docs" / "peer_tests.md"
    runs = peer_tests_page.table(peer_tests_page.load(results / "peer_tests"))
    wanted = {
        peer_tests: between(peer_tests.read_text(), "peer tests", runs),
        ROOT / "README.md": text,
        ROOT / "docs" / "benchmarks.md": full(reports, records, layer_page.load(results)),
        ROOT / "docs" / "images" / plot.NAME: plot.draw(reports),
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
