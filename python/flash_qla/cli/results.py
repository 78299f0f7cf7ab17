"""The results file of the bench command: one form for every machine and mode, with the table, CSV and plot made from
it. To import it takes nothing but Python: tools use it too."""

from __future__ import annotations

import csv
import datetime
import json
import math
import platform
import subprocess
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

Row = Dict[str, Any]
Report = Dict[str, Any]


def file_text(report: Report) -> str:
    """JSON with each row on a line of its own, as each element of any list or dictionary that holds others."""
    parts = []
    for key, value in report.items():
        text = json.dumps(value)
        if isinstance(value, list) and any(isinstance(element, (dict, list)) for element in value):
            text = "[\n" + ",\n".join(f"  {json.dumps(element)}" for element in value) + "\n ]"
        elif isinstance(value, dict) and any(isinstance(element, (dict, list)) for element in value.values()):
            lines = (f"  {json.dumps(name)}: {json.dumps(element)}" for name, element in value.items())
            text = "{\n" + ",\n".join(lines) + "\n }"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


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
    if row["mode"] in ("decode", "steps"):
        return f"{row['mode']} {row['hq']}/{row['hv']} batch {len(lengths)}"
    many = len(lengths) > 1 and len(set(lengths)) == 1
    case = f"{lengths[0]}x{len(lengths)}" if many else "+".join(map(str, lengths))
    return f"{row['mode']} {row['hq']}/{row['hv']} {case}"


def title(row: Row) -> str:
    """label() with the options: no two rows of a file have the same."""
    return " ".join([label(row), *(f"{name} {value}" for name, value in row["options"].items())])


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


def short_name(machine: str) -> str:
    """A file's word for a GPU: "h200" for "NVIDIA H200"."""
    return next((word for word in machine.split() if any(c.isdigit() for c in word)), machine).lower()


def make_report(method: Dict[str, Any], cuda: bool) -> Report:
    """The file's content without its rows: where and how they are measured."""
    import torch

    import flash_qla

    from .bench_protocol import protocol

    machine = torch.cuda.get_device_name() if cuda else f"{_cpu_name()}, {torch.get_num_threads()} threads"
    return {
        "machine": machine,
        "driver": _driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        "torch": torch.__version__,
        "commit": flash_qla.build_info()["commit"],
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "protocol": protocol(method),
        "method": method,
    }


def load(path: Path) -> Report:
    """A results file as it was written."""
    report: Report = json.loads(path.read_text())
    return report


# What must be the same in two runs whose rows come into one file.
_SAME = ("machine", "driver", "cuda", "torch", "commit")


def why_not_merge(old: Report, new: Report) -> Optional[str]:
    """Why rows of the run `new` cannot come into the file `old`: what differs, with both values; None if they can."""
    if "method" not in old:
        return "is of an earlier version of the bench"
    for what in _SAME:
        if old[what] != new[what]:
            return f"must be of the same {what} ({old[what]}, and now {new[what]})"
    for what, value in new["method"].items():
        if not isinstance(value, (dict, bool)) and old["method"].get(what, value) != value:
            return f"must be measured with the same {what} ({old['method'][what]}, and now {value})"
    return None


def merge(old: Report, new: Report) -> Report:
    """The file `old` with the rows of `new`. A row that is in both is the new one, but where that has no time: then
    what it says of other packages goes into the old one."""
    from .bench_protocol import protocol

    method = {**old["method"], **new["method"]}
    for what in ("peers", "judged"):
        both = {**old["method"].get(what, {}), **new["method"].get(what, {})}
        if both:
            method[what] = both
    method["recorded"] = bool(old["method"].get("recorded") or new["method"].get("recorded"))
    rows = {title(row): row for row in old["rows"]}
    for row in new["rows"]:
        known = rows.get(title(row))
        if known is None or "ms" in row or "ms" not in known:
            rows[title(row)] = row
            continue
        theirs = {name: {**known[name], **row[name]} for name in row if name.startswith("peer_")}
        rows[title(row)] = {**known, **theirs}
    left_out = [name for name in (*old.get("left_out", []), *new.get("left_out", [])) if name not in rows]
    report = {**new, "protocol": protocol(method), "method": method}
    report.pop("left_out", None)
    return {**report, **({"left_out": sorted(set(left_out))} if left_out else {}), "rows": list(rows.values())}


_COLUMNS = ("ms", "ms_min", "ms_max", "step_us", "roofline", "eager_ms", "eager_host_us")


def save(path: Path, report: Report) -> None:
    """Writes `path` (.json) alone, in one step: a run that ends meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(file_text(report))
    unfinished.replace(path)


def write(path: Path, report: Report) -> None:
    """Writes `path` (.json), and beside it the rows as .csv and the ratios as .png (where matplotlib is installed)."""
    save(path, report)
    rows = report["rows"]
    peers = peer_names(rows)
    with path.with_suffix(".csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["case", "options", *_COLUMNS, *(f"{p} ms" for p in peers)])
        for row in rows:
            options = " ".join(f"{k}={v}" for k, v in row["options"].items())
            figures = [row.get(name) for name in _COLUMNS]
            table.writerow([label(row), options, *figures, *(row["peers"].get(p) for p in peers)])
    _plot(path.with_suffix(".png"), report)


def _plot(path: Path, report: Report) -> None:
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
