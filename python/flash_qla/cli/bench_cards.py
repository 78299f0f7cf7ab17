"""`bench --mode cp_fwd,cp_train`: one long sequence over several cards, forward and training step, beside one card.

Started by torchrun, every process has a card and a share of the tokens, and the slowest counts:

    torchrun --nproc-per-node 2 -m flash_qla bench --mode cp_fwd,cp_train

With --ranks N in one process, N simulated ranks compute one after another on one card: what a card does without the
gather, and the slowest rank counts, beside the plain call on its share of the tokens. Inputs are drawn by every rank
for itself, in the same way however many there are.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as distributed
from rich.console import Console

import flash_qla

from . import bench_timing
from .bench_cards_inputs import GATES, MODES, call, checked_heads, make_share, needed_bytes, picked, rows_of
from .bench_cards_ranks import Ranks
from .check import ORACLES
from .errors import first_failure, head_errors
from .results import Report, Row, label, load, make_report, merge, save, short_name, title, why_not_merge, write

Pieces = Dict[Tuple[str, int], torch.Tensor]
Tensors = Dict[str, torch.Tensor]

# What a row has of other packages, by their names.
_OF_OTHERS = ("peers", "peer_ms_min", "peer_ms_max", "peer_peak_bytes", "peer_err_median_head", "peer_err_worst_head")

# What several cards' errors may be in those of one card: both round to the inputs' dtype.
_OF_ONE_CARD = {"dg": 1.3}
_OF_ONE_CARD_ELSE = 1.1


@dataclasses.dataclass(frozen=True)
class Options:
    modes: Sequence[str]
    heads: str = ""
    seqs: str = ""
    gates: str = ""
    ranks: Optional[int] = None  # simulated
    cpu: bool = False
    runs: int = 15
    seconds: float = float("inf")
    peer_results: Sequence[Path] = ()  # folders of bench_cards_peers.py
    merge: bool = False
    out: Optional[Path] = None


class _Simulated:
    """Ranks of one process. The links that a rank sends do not depend on what it receives: after one round of calls all
    are there, and calls give what they would with the others beside them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sent: Dict[Tuple[int, int], torch.Tensor] = {}  # by gather of a call, and rank
        self._gathered: Dict[int, torch.Tensor] = {}
        self._rank, self._number, self._complete = 0, 0, False

    def begin(self, rank: int, complete: bool) -> None:
        """In front of a call. `complete`: all ranks have made theirs before."""
        self._rank, self._number = rank, 0
        if complete and not self._complete:
            count = len(self._sent) // self._size
            self._gathered = {i: torch.stack([self._sent[i, r] for r in range(self._size)]) for i in range(count)}
        self._complete = complete

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        number = self._number
        self._number += 1
        if self._complete:
            return self._gathered[number]
        self._sent[number, self._rank] = x.detach().clone()
        return torch.zeros((self._size, *x.shape), dtype=x.dtype, device=x.device)


def _function(context: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, g, beta: flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)[0]


def _offsets(row: Row, device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *row["seqlens"]], dtype=torch.int32, device=device)


@dataclasses.dataclass
class _Measured:
    """Of one way to compute a row. `pieces`: what is checked of its results, where they are checked."""

    ms: List[float]
    peak_bytes: int
    pieces: Pieces
    share_ms: Sequence[float] = ()  # of simulated ranks: the plain call on the share of the slowest


def _cut_over(ranks: Ranks, row: Row, runs: int) -> _Measured:
    """Each rank of torchrun computes its share."""
    context = flash_qla.build_cp_context(_offsets(row, ranks.device), distributed.group.WORLD)
    share = row["seqlens"][0] // ranks.size
    x = make_share(row, ranks.rank * share, (ranks.rank + 1) * share, ranks.device)
    run = lambda: call(row, x, _function(context))  # noqa: E731
    pieces = ranks.together(picked(row, run()))
    return _Measured(ranks.times(run, runs), ranks.peak_bytes(run), pieces)


def _cut_simulated(ranks: Ranks, row: Row, runs: int, size: int) -> _Measured:
    """This process computes every rank's share."""
    group, share = _Simulated(size), row["seqlens"][0] // size
    contexts = []
    for rank in range(size):
        group.begin(rank, False)
        contexts.append(flash_qla.build_cp_context(_offsets(row, ranks.device), group))
    parts: Dict[Tuple[str, int], List[torch.Tensor]] = {}
    measured: List[_Measured] = []
    for complete in (False, True):
        for rank, context in enumerate(contexts):
            x = make_share(row, rank * share, (rank + 1) * share, ranks.device)

            def run(rank: int = rank, context: Any = context, x: Tensors = x) -> Tensors:
                group.begin(rank, complete)
                return call(row, x, _function(context))

            found = run()
            if complete:
                for key, piece in picked(row, found).items():
                    parts.setdefault(key, []).append(piece)
                del found
                plain = lambda x=x: call(row, x, _function(None))  # noqa: E731
                ms, share_ms = _alone(ranks, (run, plain), runs)
                measured.append(_Measured(ms, ranks.peak_bytes(run), {}, share_ms))
    slowest = max(measured, key=lambda one: statistics.median(one.ms))
    pieces = {key: torch.cat(of, 1) for key, of in parts.items()}
    return _Measured(slowest.ms, max(one.peak_bytes for one in measured), pieces, slowest.share_ms)


def _alone(ranks: Ranks, functions: Sequence[Callable[[], Any]], runs: int) -> List[List[float]]:
    """Milliseconds of calls that no other rank makes; on a GPU in graphs, so that the host's time is not in them."""
    if ranks.device.type == "cpu":
        return [ranks.times(function, runs, alone=True) for function in functions]
    return bench_timing.graphs_ms([bench_timing.capture(function)[1] for function in functions], runs)


def _on_one_card(ranks: Ranks, row: Row, runs: int) -> _Measured:
    """The whole stream here, by the plain call."""
    x = make_share(row, 0, row["seqlens"][0], ranks.device)
    run = lambda: call(row, x, _function(None))  # noqa: E731
    pieces = picked(row, run())
    return _Measured(ranks.times(run, runs, alone=True), ranks.peak_bytes(run, alone=True), pieces)


def _oracle(row: Row, ranks: Ranks) -> Pieces:
    """What is checked, by the token recurrence in fp64. A GPU takes all heads together in little more time than one;
    where their tensors in fp64 do not fit, and on a CPU, key heads come one after another."""
    heads, tokens, device = checked_heads(row), row["seqlens"][0], ranks.device
    # Eight bytes a value, where needed_bytes() counts two.
    together = device.type == "cuda" and 4 * needed_bytes(row, tokens) < ranks.free_bytes(alone=True)
    found: Pieces = {}
    with flash_qla.use_path(ORACLES[device.type]):
        for head in [None] if together and len(heads) == row["hq"] else heads:
            x = {name: t.double() for name, t in make_share(row, 0, tokens, device, head).items()}
            results = call(row, x, _function(None))
            found.update(picked(row, results) if head is None else {(name, head): t for name, t in results.items()})
    return found


def _whole(row: Row, pieces: Pieces) -> Tensors:
    """The checked heads beside each other, by name."""
    return {
        name: torch.cat([pieces[name, head] for head in checked_heads(row)], 2)
        for name in dict.fromkeys(name for name, _ in pieces)
    }


def _times(name: str, ms: Sequence[float]) -> Row:
    values = {name: statistics.median(ms), f"{name}_min": min(ms), f"{name}_max": max(ms)}
    return {key: round(value, 5) for key, value in values.items()}


def _heads(found: Tensors, right: Tensors) -> Tuple[Dict[str, float], Dict[str, float]]:
    """Median and worst of the heads' relative errors, by tensor."""
    heads = {name: head_errors(name, found[name], right[name]) for name in right}
    return {name: statistics.median(of) for name, of in heads.items()}, {name: max(of) for name, of in heads.items()}


class _Peers:
    """What bench_cards_peers.py has left in folders."""

    def __init__(self, folders: Sequence[Path], cards: int) -> None:
        self._answers: List[Row] = []
        for folder in folders:
            for file in sorted(folder.glob(f"*_{cards}.json")):
                self._answers += json.loads(file.read_text())

    def into(self, row: Row, given: Row, right: Tensors, device: torch.device, console: Console) -> None:
        for answer in self._answers:
            if answer["row"] != given:
                continue
            if "error" in answer:
                console.print(f"peer {answer['peer']}, {label(given)}: {answer['error']}")
                continue
            peer = answer["peer"]
            row["peers"][peer], row["peer_ms_min"][peer], row["peer_ms_max"][peer] = _times("ms", answer["ms"]).values()
            row["peer_peak_bytes"][peer] = answer["peak_bytes"]
            found = _whole(given, torch.load(answer["tensors"], map_location=device))
            row["peer_err_median_head"][peer], row["peer_err_worst_head"][peer] = _heads(found, right)


def _measure(
    given: Row, options: Options, ranks: Ranks, peers: _Peers, console: Console
) -> Tuple[Optional[Row], Optional[str]]:
    """One row, on rank 0, and what is wrong with it; on the other ranks nothing."""
    size = options.ranks or ranks.size
    tokens = sum(given["seqlens"])
    free = ranks.free_bytes()
    if tokens % size:
        return None, f"{tokens} tokens must be a multiple of the ranks ({size})"
    if needed_bytes(given, tokens // size) > free:
        return None, f"does not fit ({free / 1e9:.0f} GB free)"
    if size == 1:
        over = _on_one_card(ranks, given, options.runs)
    elif options.ranks is not None:
        over = _cut_simulated(ranks, given, options.runs, size)
    else:
        over = _cut_over(ranks, given, options.runs)
    if ranks.rank > 0:
        return None, None
    try:  # the others are done with this row: they must not wait for a rank that has gone
        return _judged(given, options, ranks, size, over, peers, console)
    except (RuntimeError, ValueError, OSError) as error:
        return None, f"{type(error).__name__}: {error}"


def _judged(
    given: Row, options: Options, ranks: Ranks, size: int, over: _Measured, peers: _Peers, console: Console
) -> Tuple[Optional[Row], Optional[str]]:
    """The row of what the ranks have measured, beside one card and held to the oracle."""
    alone = None
    if size > 1 and needed_bytes(given, sum(given["seqlens"])) <= ranks.free_bytes(alone=True):
        alone = _on_one_card(ranks, given, options.runs)
    right = _whole(given, _oracle(given, ranks))
    found = _whole(given, over.pieces)
    dtype = getattr(torch, given["dtype"])
    errors, failure = first_failure(found, right, dtype)
    row: Row = {
        **{name: given[name] for name in ("mode", "hq", "hv", "seqlens")},
        "options": {
            "cards": size,
            **({} if options.ranks is None else {"simulated": True}),
            **({} if given["gates"] == "mixed" else {"gates": given["gates"]}),
        },
        **_times("ms", over.ms),
        "peak_bytes": over.peak_bytes,
        "err": errors,
        **dict(zip(("err_median_head", "err_worst_head"), _heads(found, right))),
        **{name: {} for name in _OF_OTHERS},
    }
    if over.share_ms:
        row.update(_times("share_ms", over.share_ms))
        row["work"] = round(row["ms"] / row["share_ms"], 3)
    if failure is None and alone is not None:
        one_errors, failure = first_failure(_whole(given, alone.pieces), right, dtype)
        failure = failure and f"one card: {failure}"
        row.update(_times("one_card_ms", alone.ms), one_card_peak_bytes=alone.peak_bytes, one_card_err=one_errors)
        row["speedup"] = round(row["one_card_ms"] / row["ms"], 3)
    if failure is not None:
        return None, failure
    peers.into(row, given, right, ranks.device, console)
    return row, None


def _excess(row: Row) -> List[str]:
    """What of a row's errors is further above those of one card than another order of rounding explains."""
    one = row.get("one_card_err", {})
    return [
        f"{name} {error / one[name]:.2f} times one card's error"
        for name, error in row["err"].items()
        if error and one.get(name) and error > _OF_ONE_CARD.get(name, _OF_ONE_CARD_ELSE) * one[name]
    ]


def _describe(row: Row) -> str:
    words = [f"{title(row)}: {row['ms']:.4f} ms ({row['ms_min']:.4f} to {row['ms_max']:.4f})"]
    if "work" in row:
        words.append(f"its share by the plain call {row['share_ms']:.4f} ms (work {row['work']:.2f}x)")
    if "speedup" in row:
        words.append(f"one card {row['one_card_ms']:.4f} ms ({row['speedup']:.2f}x)")
    words += [f"{peer} {ms:.4f} ({ms / row['ms']:.2f}x)" for peer, ms in row["peers"].items()]
    worst = ", ".join(f"{name} {error:.1e}" for name, error in row["err_worst_head"].items())
    return ", ".join([*words, f"{row['peak_bytes'] / 1e6:.0f} MB; worst head: {worst}"])


def _refused(options: Options, size: int) -> Optional[str]:
    for what, values, known in (("--mode", options.modes, MODES), ("--gates", options.gates.split(","), GATES)):
        unknown = [value for value in values if value and value not in known]
        if unknown:
            return f"{what} must be of {', '.join(known)} ({unknown[0]})"
    if options.ranks is not None and size > 1:
        return f"--ranks must not be given under torchrun, whose processes are the ranks ({options.ranks})"
    if options.merge and options.out is None:
        return "--merge needs --out (no file was named)"
    if not options.cpu and not torch.cuda.is_available():
        return "a CUDA GPU must be present (none was found); --cpu measures on the CPU"
    return None


def method_of(options: Options) -> Dict[str, Any]:
    return {"device": "cpu" if options.cpu else "cuda", "cards": True, "runs": options.runs}


def run(options: Options) -> int:
    """Measures and prints; returns the exit code. The file is whole after each row."""
    end = time.monotonic() + options.seconds
    console = Console(highlight=False, soft_wrap=True)
    ranks = None
    trouble = _refused(options, Ranks.count())
    if trouble is None:
        ranks = Ranks(options.cpu)
        console = console if ranks.rank == 0 else Console(quiet=True)
    if ranks is None:
        console.print(f"bench: {trouble}")
        return 2
    return ranks.end(_run(options, ranks, end, console))


def _run(options: Options, ranks: Ranks, end: float, console: Console) -> int:
    wanted = rows_of(options.modes, options.heads, options.seqs, options.gates)
    report = make_report(method_of(options), cuda=not options.cpu)
    out, old = options.out, None
    if out is not None:
        out = Path(str(out).replace("{machine}", short_name(report["machine"])))
        old = load(out) if options.merge and out.exists() else None
        trouble = old and why_not_merge(old, report)
        if trouble:
            console.print(f"bench: {out} {trouble}")
            return 2
    console.print(f"commit: {report['commit']}\n{report['machine']}; {report['protocol']}")
    peers = _Peers(options.peer_results, ranks.size)
    rows: List[Row] = []
    failed = False

    def kept(put: Callable[[Path, Report], None]) -> None:
        if out is not None and rows:
            new = {**report, "rows": rows}
            put(out, merge(old, new) if old is not None else new)

    for given in wanted:
        if ranks.worst([float(time.monotonic() > end)])[0]:
            console.print(f"cut after {options.seconds:g} s")
            break
        row, failure = _measure(given, options, ranks, peers, console)
        if failure is not None:
            fits = failure.startswith("does not fit")
            failed = failed or not fits
            console.print(f"{'left out' if fits else 'FAIL'} {label(given)}: {failure}")
        if row is None:
            continue
        rows.append(row)
        kept(save)
        console.print(_describe(row))
        for sentence in _excess(row):
            failed = True
            console.print(f"FAIL {title(row)}: {sentence}")
    if ranks.rank == 0:
        kept(write)
    ranks.wait()
    return 1 if failed else 0
