"""`bench --mode layer`: the operations around the delta rule, a whole layer and a model of such layers under
Transformers, beside its own functions and, where that is asked for, fla's.

On a GPU the rows are measured in a process of their own: one that a faulty kernel ends, or in which it waits for ever,
costs its row alone, and the others follow in another process. The file is whole after each row."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console

from . import bench_layer_rows
from .bench_layer_measure import UNDER_WAY, method_of, rows_of
from .bench_layer_rows import SMALL, Bench, Sizes
from .results import Report, Row, load, make_report, save, short_name, why_not_merge

__all__ = ["SMALL", "Options", "run"]

# A process that has not finished a row for so long is ended: the longest row takes some ten seconds, and fla's kernels
# compile.
_SILENCE_S, _SILENCE_WITH_FLA_S = 45.0, 120.0


@dataclasses.dataclass(frozen=True)
class Options:
    runs: int = 15
    only: Sequence[str] = ()  # rows; none: all
    peers: Sequence[str] = ()
    cpu: bool = False
    seconds: float = 85.0  # no row begins later
    merge: bool = False
    out: Optional[Path] = None
    sizes: Sizes = Sizes()

    @property
    def device(self) -> str:
        return "cpu" if self.cpu else "cuda"


def _refusal(options: Options) -> Optional[str]:
    known = bench_layer_rows.names(options.sizes)
    for row in options.only:
        if row not in known:
            return f"--rows must be of {', '.join(known)} ({row})"
    for peer in options.peers:
        if peer != "fla":
            return f"--peers must be fla with --mode layer; Transformers is always compared ({peer})"
    if options.cpu and options.peers:
        return "--peers needs a GPU (--cpu was given)"
    if options.merge and options.out is None:
        return "--merge needs --out (no file was named)"
    if not options.cpu and not torch.cuda.is_available():
        return "a CUDA GPU must be present (none was found); --cpu measures a small version"
    return None


class _File:
    """The report, and its file (none for None)."""

    def __init__(self, report: Report, path: Optional[Path]) -> None:
        self.report, self.path = report, path
        self.rows: Dict[str, Row] = {}
        self.failures: Dict[str, str] = {}
        self.left_out: List[str] = []

    def keep(self, old: Report) -> None:
        self.rows = {row["name"]: row for row in old["rows"]}
        self.failures = dict(old.get("failures", {}))
        self.left_out = list(old.get("left_out", []))

    def begin(self, name: str) -> None:
        """What an earlier run says of a row is no longer said."""
        self.rows.pop(name, None)
        self.failures.pop(name, None)
        self.left_out = [other for other in self.left_out if other != name]

    def save(self, order: Sequence[str]) -> None:
        if self.path is None:
            return
        rows = [self.rows[name] for name in order if name in self.rows]
        parts: Dict[str, Any] = {"failures": self.failures, "left_out": self.left_out}
        save(self.path, {**self.report, **{key: part for key, part in parts.items() if part}, "rows": rows})


def _describe(row: Row) -> str:
    words = [f"{row['name']}: {row['value']:.4g} {row['unit']} ({row['value_min']:.4g} to {row['value_max']:.4g})"]
    words += [f"{peer} {value:.4g} ({value / row['value']:.2f}x)" for peer, value in row["peers"].items()]
    words += [f"without {peer}: {why}" for peer, why in row.get("missing", {}).items()]
    return ", ".join([*words, f"worst error {max(row['err'].values()):.1e}"])


def measure(options: Options, file: _File, wanted: Sequence[str], deadline: float) -> None:
    """Measures these rows in this process. What fails is in the file, and the rows behind it follow."""
    console = Console(highlight=False, soft_wrap=True)
    order = bench_layer_rows.names(options.sizes)
    bench = Bench(options.sizes, options.device)
    for names, make in bench_layer_rows.groups(options.sizes).values():
        mine = [name for name in names if name in wanted]
        late = bool(mine) and time.monotonic() > deadline
        cases = {}
        if mine and not late:
            try:
                cases = {case.name: case for case in make(bench)}
            except Exception as error:  # the rows behind these are worth having
                for name in mine:
                    file.begin(name)
                    file.failures[name] = f"{type(error).__name__}: {error}"
                    console.print(f"FAIL {name}: {file.failures[name]}")
                file.save(order)
                continue
        for name in mine:
            file.begin(name)
            if late or time.monotonic() > deadline:
                file.left_out.append(name)
                console.print(f"{name}: left out, {options.seconds:g} s are over")
                file.save(order)
                continue
            try:
                for row in rows_of(cases[name], options.runs, options.sizes.chain, options.device, options.peers):
                    file.rows[name] = row
                    file.save(order)
                console.print(_describe(file.rows[name]))
            except Exception as error:
                file.rows.pop(name, None)
                file.failures[name] = f"{type(error).__name__}: {error}"
                console.print(f"FAIL {name}: {file.failures[name]}")
                file.save(order)
                if options.device == "cuda" and not _device_answers():
                    return  # nothing more can be had of this process
            cases.pop(name, None)
        del cases
        if options.device == "cuda" and mine:
            torch.cuda.empty_cache()


def _device_answers() -> bool:
    try:
        torch.cuda.synchronize()
        return bool(torch.ones(1, device="cuda").item())
    except RuntimeError:
        return False


_WORK = "import sys; from flash_qla.cli import bench_layer; bench_layer.work(sys.argv[1])"


def work(given: str) -> None:
    """In a process of its own: measures what `_apart` says, into a file that begins without rows."""
    said = json.loads(given)
    deadline = time.monotonic() + said["seconds_left"]
    options = Options(said["runs"], peers=said["peers"], seconds=said["seconds"])
    file = _File({}, Path(said["path"]))
    measure(options, file, said["rows"], deadline)
    file.save(bench_layer_rows.names(options.sizes))


def _apart(command: Sequence[str], path: Path, silence: float) -> Tuple[bool, str]:
    """Runs a process that writes `path` again and again; returns whether it has ended well, and how."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    process = subprocess.Popen(command, env=environment)
    written, since = 0, time.monotonic()
    try:
        while True:
            try:
                code = process.wait(0.2)
                return code == 0, f"its process ended with exit code {code}"
            except subprocess.TimeoutExpired:
                now = path.stat().st_mtime_ns if path.exists() else 0
                if now != written:
                    written, since = now, time.monotonic()
                if time.monotonic() - since > silence:
                    return False, f"its process said nothing for {silence:g} s and was ended"
    finally:  # nor does it go on where this one is interrupted
        process.kill()
        process.wait()


def _take(file: _File, path: Path, todo: Sequence[str]) -> List[str]:
    """What a process has left of these rows comes into the file; returns the rows of which it says nothing."""
    found = load(path) if path.exists() else {"rows": []}
    rows = {row["name"]: row for row in found["rows"]}
    failures, left_out = found.get("failures", {}), found.get("left_out", [])
    for name in todo:
        if name in rows or name in failures or name in left_out:
            file.begin(name)
        if name in rows:
            file.rows[name] = rows[name]
        elif name in failures:
            file.failures[name] = failures[name]
        elif name in left_out:
            file.left_out.append(name)
    return [name for name in todo if name not in rows and name not in failures and name not in left_out]


def _blame(file: _File, begun: Sequence[str], todo: List[str], end: str) -> str:
    """The row that was under way when a process ended; it leaves `todo`."""
    for name in begun:
        missing = file.rows.get(name, {}).get("missing", {})
        for peer in [peer for peer, why in missing.items() if why == UNDER_WAY]:
            missing[peer] = end
            return f"{name}, {peer}"
    name = todo.pop(0)
    file.begin(name)
    file.failures[name] = end
    return name


def _measure_apart(options: Options, file: _File, wanted: Sequence[str], deadline: float, console: Console) -> None:
    order = bench_layer_rows.names(options.sizes)
    silence = _SILENCE_WITH_FLA_S if options.peers else _SILENCE_S
    todo = list(wanted)
    with tempfile.TemporaryDirectory() as folder:
        while todo:
            path = Path(folder) / f"{len(todo)}.json"
            given = {"runs": options.runs, "peers": list(options.peers), "seconds": options.seconds, "path": str(path),
                     "seconds_left": deadline - time.monotonic(), "rows": todo}  # fmt: skip
            try:
                well, end = _apart([sys.executable, "-c", _WORK, json.dumps(given)], path, silence)
            except KeyboardInterrupt:  # what has been measured is not lost
                _take(file, path, todo)
                file.save(order)
                raise
            begun, todo = todo, _take(file, path, todo)
            # One that ends well with rows left has told of a row after which the device no longer answers.
            if not well and (todo or _is_under_way(file, begun)) or todo == begun:
                console.print(f"FAIL {_blame(file, begun, todo, end)}: {end}")
            file.save(order)


def _is_under_way(file: _File, names: Sequence[str]) -> bool:
    return any(UNDER_WAY in file.rows.get(name, {}).get("missing", {}).values() for name in names)


def _path_of(out: Path, report: Report) -> Path:
    machine = "cpu" if report["method"]["device"] == "cpu" else short_name(report["machine"])
    return Path(str(out).replace("{machine}", machine).replace("{mode}", "layer"))


def run(options: Options) -> int:
    """Measures and prints; returns the exit code: 1 where a row has failed, 2 for what is refused."""
    console = Console(highlight=False, soft_wrap=True)
    refusal = _refusal(options)
    if refusal is not None:
        console.print(f"bench: {refusal}")
        return 2
    deadline = time.monotonic() + options.seconds
    method = method_of(options.device, options.runs, dataclasses.asdict(options.sizes))
    report = make_report(method, cuda=not options.cpu)
    file = _File(report, options.out and _path_of(options.out, report))
    if options.merge and file.path is not None and file.path.exists():
        old = load(file.path)
        trouble = why_not_merge(old, report)
        if trouble is None and old["method"] != report["method"]:
            trouble = "must be measured with the same method"
        if trouble:
            console.print(f"bench: {file.path} {trouble}")
            return 2
        file.keep(old)
    console.print(f"commit: {report['commit']}\n{report['machine']}; {report['protocol']}")
    order = bench_layer_rows.names(options.sizes)
    wanted = [name for name in order if not options.only or name in options.only]
    if options.cpu:
        measure(options, file, wanted, deadline)
    else:
        _measure_apart(options, file, wanted, deadline, console)
    file.save(order)
    if file.path is not None:
        console.print(f"wrote {file.path}")
    return 1 if any(name in file.failures for name in wanted) else 0
