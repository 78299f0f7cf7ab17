#!/usr/bin/env python3
"""Compares two result files of `bench`, row by row: what a change costs, and where another package is faster.

    gate.py OLD NEW [--least 0.97]     OLD and NEW: files of `bench --out`, of one machine, best of one run in turns

Prints the geometric mean of the speeds (old time over new time) over the rows that both have, the ten worst rows, the rows
that only one of them has, and every row of NEW that is slower than another package, measured with it or recorded. Exit
code 1: the mean is below --least, a row is behind another package, or NEW lacks a row.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python" / "flash_qla" / "cli"))
from results import geometric_mean, load, title  # noqa: E402

WORST = 10


def fastest(row: dict) -> tuple:
    """(time in ms, name) of the fastest other package of a row; an infinite time where there is none."""
    others = {**row.get("recorded", {}), **row.get("peers", {})}
    return min(((ms, name) for name, ms in others.items()), default=(float("inf"), ""))


def compare(old: dict, new: dict, least: float) -> tuple:
    """(lines of a report, whether the change passes)."""
    before, after = ({title(row): row for row in report["rows"] if "ms" in row} for report in (old, new))
    both = [name for name in before if name in after]
    speeds = {name: before[name]["ms"] / after[name]["ms"] for name in both}
    mean = geometric_mean(list(speeds.values()))
    lines = [f"{key}: {old[key]}, then {new[key]}" for key in ("machine", "commit", "date")]
    lines.append(f"speed {mean:.4f} of the old (geometric mean of {len(both)} rows, {least:g} at least)")
    for name in sorted(speeds, key=speeds.get)[:WORST]:
        lines.append(f"  {speeds[name]:.3f} {name}: {before[name]['ms']:.4f} ms, then {after[name]['ms']:.4f}")
    missing = [name for name in before if name not in after]
    lines += [f"only in the old file: {name}" for name in missing]
    lines += [f"only in the new file: {name}" for name in after if name not in before]
    behind = [(row, *fastest(row)) for row in after.values() if row["ms"] > fastest(row)[0]]
    lines += [f"behind {name} ({ms:.4f} ms): {title(row)}, {row['ms']:.4f} ms" for row, ms, name in behind]
    passed = mean >= least and not behind and not missing  # NaN, of no rows, is not at least anything
    return [*lines, "passed" if passed else "FAILED"], passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--least", type=float, default=0.97, help="geometric mean of the speeds that is accepted")
    given = parser.parse_args()
    lines, passed = compare(load(given.old), load(given.new), given.least)
    print("\n".join(lines))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
