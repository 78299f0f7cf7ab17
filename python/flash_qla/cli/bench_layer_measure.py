"""How a row of `bench --mode layer` is checked and timed."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from . import bench_timing
from .bench_layer_rows import Case, Tensors, relative_l2
from .results import Row

_WALL_RUNS_BEFORE = 2

# What a row says of a peer that has not run yet: it stays where that ends the process.
UNDER_WAY = "under way"


def method_of(device: str, runs: int, sizes: Dict[str, Any]) -> Dict[str, Any]:
    """The file's "method", as it is after JSON."""
    lists = {name: list(value) if isinstance(value, tuple) else value for name, value in sizes.items()}
    return {"device": device, "layer": True, "runs": runs, "sizes": lists}


class _Way(NamedTuple):
    """What is called, in what, and what comes in front of each call, not timed."""

    call: Callable[..., Any]
    around: Callable[[], ContextManager[Any]] = contextlib.nullcontext
    before: Callable[[], Any] = lambda: None


def _wait(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _wall_ms(ways: Sequence[_Way], runs: int, device: str) -> List[List[float]]:
    """Milliseconds of eager calls that take turns."""
    times: List[List[float]] = [[] for _ in ways]
    for run in range(_WALL_RUNS_BEFORE + runs):
        for way, ms in zip(ways, times):
            with way.around():
                way.before()
                start = _wait(device)
                way.call()
                end = _wait(device)
            if run >= _WALL_RUNS_BEFORE:
                ms.append(1e3 * (end - start))
    return times


def _slopes_ms(ways: Sequence[_Way], calls: Tuple[int, int], runs: int, device: str) -> List[List[float]]:
    """Milliseconds until the host has made one more call of a chain, forward and backward."""
    few, many = calls
    slopes: List[List[float]] = [[] for _ in ways]
    for run in range(_WALL_RUNS_BEFORE + runs):
        for way, ms in zip(ways, slopes):
            took = []
            for count in (few, many):
                start = _wait(device)
                way.call(count)
                took.append(time.perf_counter() - start)
            if run >= _WALL_RUNS_BEFORE:
                ms.append(1e3 * (took[1] - took[0]) / (many - few))
    return slopes


def _graphs_ms(ways: Dict[str, _Way], runs: int, missing: Dict[str, str]) -> Dict[str, List[float]]:
    """Milliseconds of each way in a CUDA graph. A peer that cannot be captured has none, and is missing."""
    graphs = {}
    for name, way in ways.items():
        try:
            with way.around():
                graphs[name] = bench_timing.capture(way.call)[1]
        except Exception as error:
            if not name:
                raise
            missing[name] = _why(error)
    return dict(zip(graphs, bench_timing.graphs_ms(list(graphs.values()), runs)))


def _times(
    case: Case, ways: Dict[str, _Way], runs: int, chain: Tuple[int, int], device: str, missing: Dict[str, str]
) -> Dict[str, List[float]]:
    if case.how == "graph" and device == "cuda":
        return _graphs_ms(ways, runs, missing)
    every = list(ways.values())
    if case.how == "host":
        return dict(zip(ways, _slopes_ms(every, chain, runs, device)))
    measured = _wall_ms(every, runs, device)
    return {name: [ms / case.calls for ms in of] for name, of in zip(ways, measured)}


def _errors(found: Tensors, exact: Tensors) -> Dict[str, float]:
    return {name: relative_l2(found[name], right) for name, right in exact.items() if name in found}


def _found(case: Case, way: _Way) -> Tensors:
    with way.around():
        way.before()
        found = way.call(1) if case.how == "host" else way.call()
        return {name: tensor.clone() for name, tensor in (found or {}).items()}


class _Check:
    """Errors of ours, held to the case's bound, and of Transformers', where that bound is a multiple of them."""

    def __init__(self, case: Case, ours: _Way) -> None:
        self._case, self._ours = case, ours
        self.exact = case.exact()
        self.theirs: Dict[str, float] = {}
        if case.of_theirs:
            theirs = _Way(case.peers["transformers"], case.around_theirs, case.before)
            self.theirs = _errors(_found(case, theirs), self.exact)

    def errors(self, when: str) -> Dict[str, float]:
        """Raises ValueError where one is above its bound."""
        found = _found(self._case, self._ours)
        ours = {name: relative_l2(found[name], right) for name, right in self.exact.items()}
        for name, error in ours.items():
            bound = self._case.bound * self.theirs.get(name, 1.0)
            if not error <= bound:  # a NaN is not
                raise ValueError(f"{name}{when}: relative L2 {error:.1e}, bound {bound:.1e}")
        return ours


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _short(errors: Dict[str, float]) -> Dict[str, float]:
    return {name: float(f"{error:.2e}") for name, error in errors.items()}


def rows_of(case: Case, runs: int, chain: Tuple[int, int], device: str, peers: Sequence[str]) -> Iterator[Row]:
    """The row without fla and then, where "fla" is among the peers, with it, all timed in turns. An error of ours is
    raised; what is wrong with fla is in the row ("missing")."""
    ours = _Way(case.chain or case.run, case.around, case.before)
    check = _Check(case, _Way(case.run, case.around, case.before) if case.how != "host" else ours)
    errors = check.errors("")
    ways: Dict[str, _Way] = {"": ours}
    ways.update({name: _Way(peer, case.around_theirs, case.before) for name, peer in case.peers.items()})
    peer_errors = {"transformers": _short(check.theirs)} if check.theirs else {}
    missing: Dict[str, str] = {}

    def row() -> Row:
        times = _times(case, ways, runs, chain, device, missing)
        check.errors(", after it was timed")
        factor = 1e3 if case.unit == "us" else 1.0
        figures = {name: [round(factor * pick(ms), 5) for pick in (statistics.median, min, max)]
                   for name, ms in times.items()}  # fmt: skip
        value, least, most = figures.pop("")
        made: Row = {"name": case.name, "unit": case.unit, "value": value, "value_min": least, "value_max": most}
        made["peers"] = {peer: of[0] for peer, of in figures.items()}
        made["err"] = _short(errors)
        if peer_errors:
            made["peer_err"] = dict(peer_errors)
        if missing:
            made["missing"] = dict(missing)
        return made

    asked = "fla" in peers
    if case.fla is not None:
        missing["fla"] = UNDER_WAY if asked else "not asked for (--peers fla)"
    first = row()
    yield first
    if case.fla is None or not asked:
        return
    second: Optional[Row] = None
    missing.pop("fla")
    try:
        ways["fla"] = _Way(case.fla())
        found = _errors(_found(case, ways["fla"]), check.exact)
        if found:
            peer_errors["fla"] = _short(found)
        second = row()
    except Exception as error:  # another package's trouble: the row is worth having without it
        first["missing"] = {**missing, "fla": _why(error)}
    yield second or first
