"""The section of docs/benchmarks.md about the layer: the rows that `bench --mode layer` wrote."""

import json
from pathlib import Path

from figures.markdown import table


def load(folder: Path) -> dict:
    """Reports of that mode by file name."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: report for name, report in reports.items() if report.get("method", {}).get("layer")}


def _worst(errors: dict) -> str:
    return f"{max(errors.values()):.1e}" if errors else ""


def section(name: str, report: dict) -> str:
    """Every row, with the peers' times where they were measured, and what failed or was left out."""
    head = f"{report['machine']}, torch {report['torch']}; commit {report['commit']}, {report['date']}. {report['protocol']}\n"
    peers = sorted({peer for row in report["rows"] for peer in row["peers"]})
    lines = []
    for row in report["rows"]:
        value = f"{row['value']:.4g} {row['unit']}"
        spread = f"{row['value_min']:.4g} to {row['value_max']:.4g}"
        theirs = []
        for peer in peers:
            time, errors = row["peers"].get(peer), row.get("peer_err", {}).get(peer, {})
            theirs.append("" if time is None else f"{time:.4g} ({time / row['value']:.2f}x), error {_worst(errors)}")
        lines.append([row["name"], value, spread, _worst(row["err"]), *theirs])
    text = f"## {name}\n\n{head}\n" + table(["row", "ours", "least to most", "largest error", *peers], lines)
    for row, why in report.get("failures", {}).items():
        text += f"\n`{row}` failed: {why}\n"
    missing = sorted({f"{peer}: {why}" for row in report["rows"] for peer, why in row.get("missing", {}).items()})
    return text + "".join(f"\nNot measured beside it: {line}.\n" for line in missing)
