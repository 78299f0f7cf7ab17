"""The results files with rows: which there are, and how many times our time goes into another package's, row by row."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python" / "flash_qla" / "cli"))
from results import geometric_mean  # noqa: E402, F401

MODES = {"fwd": "forward", "bwd": "backward", "train": "forward + backward", "decode": "decode", "options": "forward",
         "portable_forward": "forward", "portable_backward": "backward",
         "prefill": "prefill", "steps": "decode step", "verify": "verification",
         "cp_fwd": "forward over cards", "cp_train": "forward + backward over cards"}  # fmt: skip
NOTHING = "No results have been recorded yet.\n"

# Files that an earlier version of the bench, or of the record, has written: the protocol in them is no longer one that it writes.
# A file that is measured again leaves the list (tests/tools/test_results.py).
EARLIER = {"h200_decode"}
EARLIER_BENCH = (
    "written by an earlier version of the bench: medians of graphs of five calls, with no load before them, and what they left was "
    "not checked; errors of what is zero were divided by sqrt(n), so that they are in no ratio here"
)

DAGGER = "† times recorded in an earlier run on the same kind of machine."
PUBLISHED = "‡ times published by that package's authors, of a machine of theirs."
SECTION = f"§ {EARLIER_BENCH}."

# Where a row has times of other packages, and how the words for each kind go.
KINDS = {"peers": "in the same run", "recorded": "as recorded"}


def load(folder: Path) -> dict:
    """Reports by file name, those with rows of the bench alone."""
    reports = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    return {name: report for name, report in reports.items() if report.get("rows") and "mode" in report["rows"][0]}


def marked(name: str) -> str:
    return f"{name} §" if name in EARLIER else name


def published(name: str) -> bool:
    return name.endswith("as published")


def peers_of(rows: list) -> list:
    """(kind, name) of everything else with times: ours without a sequence split, other packages in the same run, then those
    recorded in an earlier one."""
    unsplit = [("unsplit", "")] if any("unsplit_ms" in row for row in rows) else []
    return unsplit + [(kind, name) for kind in KINDS for name in sorted({n for row in rows for n in row.get(kind, {})})]


def peer_time(row: dict, kind: str, name: str):
    return row.get("unsplit_ms") if kind == "unsplit" else row.get(kind, {}).get(name)


def peer_title(kind: str, name: str) -> str:
    mark = {"peers": "", "recorded": " ‡" if published(name) else " †"}
    return "ours, auto_cp=False" if kind == "unsplit" else name + mark[kind]


def fastest(row: dict, kind: str):
    """Least time of all other packages on a row, of the same run ("peers") or recorded on such a machine ("recorded"); None
    without any."""
    return min((ms for name, ms in row.get(kind, {}).items() if not published(name)), default=None)


def rows_of(report: dict, mode: str) -> list:
    """The rows of a mode that were timed."""
    return [row for row in report["rows"] if row["mode"] == mode and "ms" in row]


def ratios_of(report: dict, mode: str, time) -> list:
    """How many times ours goes into time(row), of the rows of a mode that have both."""
    return [time(row) / row["ms"] for row in rows_of(report, mode) if time(row) is not None]


def compared(report: dict) -> list:
    """(mode, what our time is compared with, how many times ours that takes in each row). Behind the other packages of a kind
    the fastest of them in each row, where they are several."""
    found = []
    for mode in dict.fromkeys(row["mode"] for row in report["rows"]):
        peers = peers_of([row for row in report["rows"] if row["mode"] == mode])
        for kind, name in peers:
            found.append((mode, peer_title(kind, name), ratios_of(report, mode, lambda row: peer_time(row, kind, name))))
        for kind in KINDS:
            if sum(of == kind and not published(name) for of, name in peers) > 1:
                found.append((mode, peer_title(kind, "the fastest of them"), ratios_of(report, mode, lambda row: fastest(row, kind))))
    return [line for line in found if line[2]]


def judged(rows: list) -> list:
    """Packages whose tensors were compared with the oracle as ours were."""
    return sorted({name for row in rows for name in row.get("peer_err_worst_head", {})})


def errors_of(row: dict, peer: str, tensor: str) -> tuple:
    """A tensor's errors, median and worst of the heads: a peer's, or ours for the peer ""; None where there is no number."""
    if not peer:
        return row["err_median_head"][tensor], row["err_worst_head"][tensor]
    return tuple(row.get(f"peer_err_{which}_head", {}).get(peer, {}).get(tensor) for which in ("median", "worst"))


def error_ratios(rows: list, peer: str) -> list:
    """Our error over a peer's, (median, worst head), for every tensor of every row that has both."""
    ratios = []
    for row in rows:
        for tensor in row.get("err_median_head", {}):
            # fla's decode returns the states of a 16-bit pool in float32: another tensor than ours, which is rounded.
            if tensor == "final_state" and row["options"].get("state_dtype", "float32") != "float32":
                continue
            ours, theirs = errors_of(row, "", tensor), errors_of(row, peer, tensor)
            if None not in ours + theirs:
                ratios.append(tuple(a / b for a, b in zip(ours, theirs)))
    return ratios
