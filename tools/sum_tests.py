#!/usr/bin/env python3
"""Adds up JUnit result files and prints "N passed, N failed, N skipped". Exit code 1: a failure, or nothing ran."""

import sys
import xml.etree.ElementTree as ElementTree


def count(path: str) -> tuple:
    """(passed, failed, skipped) of one file; both pytest's and ctest's dialect keep a child element per outcome."""
    passed = failed = skipped = 0
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed += 1
        elif "skipped" in outcomes or case.get("status") in ("notrun", "disabled"):
            skipped += 1
        else:
            passed += 1
    return passed, failed, skipped


def main() -> int:
    passed, failed, skipped = (sum(column) for column in zip(*map(count, sys.argv[1:])))
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
