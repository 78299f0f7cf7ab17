"""The results file of the bench command: one form for every machine and mode, with the table, CSV and plot made from
it."""

from __future__ import annotations

import csv
import datetime
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Sequence

Row = Dict[str, Any]


def _commit() -> str:
    """The source tree's commit, with "+changes" if files differ from it. A copy of the tree without its history may
    have a file COMMIT at its root that says so; "unknown" without either."""
    here = Path(__file__).resolve().parent
    note = here.parents[2] / "COMMIT"
    if note.exists():
        return note.read_text().strip()
    try:
        run = [
            subprocess.run(
                ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=True
            ).stdout.strip()
            for arguments in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "--untracked-files=no"])
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run[0] + ("+changes" if run[1] else "")


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, IndexError, subprocess.CalledProcessError):
        return "none"


def make_report(protocol: str, rows: Sequence[Row], cuda: bool) -> Dict[str, Any]:
    """The file's content: where and how the rows were measured, and the rows."""
    import torch

    machine = torch.cuda.get_device_name() if cuda else f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "machine": machine,
        "driver": _driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "protocol": protocol,
        "rows": list(rows),
    }


def geometric_mean(values: Sequence[float]) -> float:
    """NaN for no values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def ratios(rows: Sequence[Row], peer: str, kind: str = "peers") -> List[float]:
    """How many times ours goes into a peer's time, for the rows that have it. `kind`: "peers" (the same run) or
    "recorded" (an earlier one)."""
    return [row[kind][peer] / row["ms"] for row in rows if row.get(kind, {}).get(peer)]


def peer_names(rows: Sequence[Row], kind: str = "peers") -> List[str]:
    return sorted({name for row in rows for name in row.get(kind, {})})


def label(row: Row) -> str:
    """A row's case in a few characters: "fwd 16/64 8192x4"."""
    lengths = row["seqlens"]
    if row["mode"] == "decode":
        return f"decode {row['hq']}/{row['hv']} batch {len(lengths)}"
    many = len(lengths) > 1 and len(set(lengths)) == 1
    case = f"{lengths[0]}x{len(lengths)}" if many else "+".join(map(str, lengths))
    return f"{row['mode']} {row['hq']}/{row['hv']} {case}"


def save(path: Path, report: Dict[str, Any]) -> None:
    """Writes `path` (.json) alone, in one step: a run that ends meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(report, indent=1) + "\n")
    unfinished.replace(path)


def write(path: Path, report: Dict[str, Any]) -> None:
    """Writes `path` (.json), and beside it the rows as .csv and the ratios as .png (where matplotlib is installed)."""
    save(path, report)
    rows = report["rows"]
    peers = peer_names(rows)
    with path.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["case", "options", "ms", "step_us", "roofline", *(f"{p} ms" for p in peers)])
        for row in rows:
            options = " ".join(f"{k}={v}" for k, v in row["options"].items())
            table.writerow(
                [label(row), options, row["ms"], row["step_us"], row["roofline"], *(row["peers"].get(p) for p in peers)]
            )
    _plot(path.with_suffix(".png"), report)


def _plot(path: Path, report: Dict[str, Any]) -> None:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    rows, peers = report["rows"], peer_names(report["rows"])
    height = 0.28 * max(len(rows), 1)
    figure = Figure(figsize=(9, 1.5 + height), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(peers), 1)
    for i, peer in enumerate(peers):
        bars = [(y, row["peers"][peer] / row["ms"]) for y, row in enumerate(rows) if row["peers"].get(peer)]
        axes.barh([y + (i + 0.5) * width - 0.4 for y, _ in bars], [x for _, x in bars], width, label=peer)
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks(
        range(len(rows)), [" ".join([label(r), *map(str, r["options"].values())]) for r in rows], fontsize=7
    )
    axes.invert_yaxis()
    axes.set_xlabel("times faster than the peer")
    axes.set_title(f"{report['machine']}, {report['date']}, {report['commit']}", fontsize=8)
    if peers:
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)
