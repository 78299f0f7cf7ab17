"""`bench --mode layer`: the operations around the delta rule, a whole layer and a model of such layers under
Transformers, beside its own functions and, where it can be imported, fla's."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console

from . import bench_timing
from .bench_layer_rows import Bench, Case, Sizes, Tensors, cases_of, relative_l2
from .results import Row, load, make_report, save, short_name, why_not_merge

_WALL_RUNS_BEFORE = 2


@dataclasses.dataclass(frozen=True)
class Options:
    runs: int = 15
    only: Sequence[str] = ()  # rows; none: all
    merge: bool = False
    out: Optional[Path] = None
    sizes: Sizes = Sizes()
    cpu: bool = False  # a test's: times of the CPU by the host's clock


def method_of(options: Options) -> Dict[str, Any]:
    return {"device": "cpu" if options.cpu else "cuda", "layer": True, "runs": options.runs}


def _wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _wall_ms(functions: Sequence[Callable[[], Any]], runs: int, device: str) -> List[List[float]]:
    """Milliseconds of eager calls that take turns."""
    times: List[List[float]] = [[] for _ in functions]
    for run in range(_WALL_RUNS_BEFORE + runs):
        for function, ms in zip(functions, times):
            start = _wait(device)
            function()
            if run >= _WALL_RUNS_BEFORE:
                ms.append(1e3 * (_wait(device) - start))
    return times


def _slopes_ms(chain: Callable[[int], Any], calls: Tuple[int, int], runs: int, device: str) -> List[float]:
    """Milliseconds until the host has made one more call of a chain, forward and backward."""
    few, many = calls
    slopes = []
    for run in range(_WALL_RUNS_BEFORE + runs):
        took = []
        for count in (few, many):
            start = _wait(device)
            chain(count)
            took.append(time.perf_counter() - start)
        if run >= _WALL_RUNS_BEFORE:
            slopes.append(1e3 * (took[1] - took[0]) / (many - few))
    return slopes


def _graphs_ms(functions: Sequence[Callable[[], Any]], runs: int, device: str) -> List[List[float]]:
    if device == "cpu":
        return _wall_ms(functions, runs, device)
    return bench_timing.graphs_ms([bench_timing.capture(function)[1] for function in functions], runs)


def _times(case: Case, functions: Sequence[Callable[[], Any]], options: Options, device: str) -> List[List[float]]:
    if case.how == "host":
        assert case.chain is not None
        return [_slopes_ms(case.chain, options.sizes.chain, options.runs, device)]
    measured = (_graphs_ms if case.how == "graph" else _wall_ms)(functions, options.runs, device)
    return [[ms / case.calls for ms in of] for of in measured]


def _errors(found: Tensors, exact: Tensors) -> Dict[str, float]:
    return {name: relative_l2(found[name], right) for name, right in exact.items()}


def _check(case: Case) -> Tuple[Dict[str, float], Dict[str, float], Optional[str]]:
    """Errors of ours, of Transformers' where they are the measure, and what is wrong with ours."""
    exact = case.exact()
    case.restore()
    ours = _errors(case.run(), exact)
    case.restore()
    theirs = _errors(case.peers["transformers"](), exact) if case.of_theirs else {}
    for name, error in ours.items():
        limit = case.bound * theirs[name] if case.of_theirs else case.bound
        if not error <= limit:  # a NaN is not
            return ours, theirs, f"{name}: relative L2 {error:.1e}, bound {limit:.1e}"
    return ours, theirs, None


def _measure(case: Case, options: Options, device: str, console: Console) -> Tuple[Optional[Row], Optional[str]]:
    errors, their_errors, failure = _check(case)
    if failure is not None:
        return None, failure
    functions: Dict[str, Callable[[], Any]] = {"": case.run}
    for peer, function in case.peers.items():
        try:
            function()
            functions[peer] = function
        except Exception as error:  # another package's trouble: the row is worth having without it
            console.print(f"peer {peer}, {case.name}: {type(error).__name__}: {error}")
    times = dict(zip(functions, _times(case, list(functions.values()), options, device)))
    # What was timed is still right.
    failure = _check(case)[2]
    if failure is not None:
        return None, f"after it was timed: {failure}"
    factor = 1e3 if case.unit == "us" else 1.0
    figures = {name: [round(factor * pick(ms), 5) for pick in (statistics.median, min, max)]
               for name, ms in times.items()}  # fmt: skip
    value, least, most = figures.pop("")
    row: Row = {"name": case.name, "unit": case.unit, "value": value, "value_min": least, "value_max": most}
    row["peers"] = {peer: of[0] for peer, of in figures.items()}
    row["err"] = {name: float(f"{error:.2e}") for name, error in errors.items()}
    if their_errors:
        row["peer_err"] = {"transformers": {name: float(f"{error:.2e}") for name, error in their_errors.items()}}
    return row, None


def _describe(row: Row) -> str:
    words = [f"{row['name']}: {row['value']:.4g} {row['unit']} ({row['value_min']:.4g} to {row['value_max']:.4g})"]
    words += [f"{peer} {value:.4g} ({value / row['value']:.2f}x)" for peer, value in row["peers"].items()]
    return " ".join(words) + f" worst error {max(row['err'].values()):.1e}"


def run(options: Options) -> int:
    """Measures and prints; returns the exit code. The file is whole after each row."""
    console = Console(highlight=False, soft_wrap=True)
    device = "cpu" if options.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        console.print("bench: a CUDA GPU must be present (none was found)")
        return 2
    report = make_report(method_of(options), cuda=not options.cpu)
    rows: Dict[str, Row] = {}
    out = options.out and Path(str(options.out).replace("{machine}", short_name(report["machine"])))
    out = out and Path(str(out).replace("{mode}", "layer"))
    if out is not None and options.merge and out.exists():
        old = load(out)
        trouble = why_not_merge(old, report)
        if trouble:
            console.print(f"bench: {out} {trouble}")
            return 2
        rows = {row["name"]: row for row in old["rows"]}
    console.print(f"commit: {report['commit']}\n{report['machine']}; {report['protocol']}")
    failed = False
    for group, make in cases_of(Bench(options.sizes, device)):
        try:
            cases = make()
        except Exception as error:  # the rows after these are worth having
            failed = True
            console.print(f"FAIL {group}: {type(error).__name__}: {error}")
            continue
        for case in cases:
            if options.only and case.name not in options.only:
                continue
            try:
                row, failure = _measure(case, options, device, console)
            except Exception as error:
                row, failure = None, f"{type(error).__name__}: {error}"
            if row is None:
                failed = True
                console.print(f"FAIL {case.name}: {failure}")
                continue
            rows[case.name] = row
            console.print(_describe(row))
            if out is not None:
                save(out, {**report, "rows": list(rows.values())})
        del cases
    if out is not None and rows:
        console.print(f"wrote {out}")
    return 1 if failed else 0
