"""`bench --cpu`: the chunk operation on the CPU against Transformers' own torch functions."""

from __future__ import annotations

import inspect
import itertools
import statistics
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

import flash_qla

from .errors import first_failure
from .results import Row, label, make_report, write

BATCH, TOKENS, HEADS, HEAD_DIM = 1, 4096, 8, 128

_INPUTS = ("q", "k", "v", "g", "beta")

Function = Callable[..., Tuple[torch.Tensor, Optional[torch.Tensor]]]


def _make_inputs(seed: int = 0) -> Dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, TOKENS, HEADS)

    def normal(*last: int) -> torch.Tensor:
        return torch.randn(*shape, *last, generator=generator)

    return {
        "q": F.normalize(normal(HEAD_DIM), dim=-1),
        "k": F.normalize(normal(HEAD_DIM), dim=-1),
        "v": normal(HEAD_DIM),
        "g": F.logsigmoid(normal()) / 16,
        "beta": normal().sigmoid(),
        "do": normal(HEAD_DIM),
    }


def _transformers_function() -> Tuple[str, Function]:
    """Their torch implementation itself, whatever other packages its module would prefer."""
    import transformers
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    return f"transformers {transformers.__version__}", inspect.unwrap(module.torch_chunk_gated_delta_rule)


def _forward(function: Function, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    with torch.inference_mode():
        return {"o": function(*(x[n] for n in _INPUTS))[0]}


def _train(function: Function, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    leaves = [x[n].detach().requires_grad_() for n in _INPUTS]
    o, _ = function(*leaves)
    gradients = torch.autograd.grad(o, leaves, x["do"])
    return {"o": o.detach(), **{f"d{n}": d for n, d in zip(_INPUTS, gradients)}}


_STEPS = {"fwd": _forward, "train": _train}


def _exact(mode: str, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    with flash_qla.use_path("reference"):
        return _STEPS[mode](_ours, {n: t.double() for n, t in x.items()})


def _ours(*inputs: Any) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    return flash_qla.chunk_gated_delta_rule(*inputs)


def _timed(
    calls: List[Callable[[], Dict[str, torch.Tensor]]], runs: int, progress: Progress
) -> Tuple[List[List[float]], Dict[str, torch.Tensor]]:
    """Milliseconds of interleaved runs, after one of each that warms up, and what the first call's last run has
    returned."""
    times: List[List[float]] = [[] for _ in calls]
    left: Dict[str, torch.Tensor] = {}
    task = progress.add_task("timing", total=(runs + 1) * len(calls))
    for run, (i, call) in itertools.product(range(runs + 1), enumerate(calls)):
        start = time.perf_counter()
        found = call()
        if run > 0:
            times[i].append(1e3 * (time.perf_counter() - start))
        if i == 0:
            left = found
        del found
        progress.advance(task)
    progress.remove_task(task)
    return times, left


def run(runs: int, out: Optional[Path]) -> int:
    """Measures and prints; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    peer, theirs = _transformers_function()
    x = _make_inputs()
    rows: List[Row] = []
    failed = False
    report = make_report({"device": "cpu", "runs": runs}, cuda=False)
    console.print(f"commit: {report['commit']}\n{report['machine']}; {report['protocol']}")
    for mode, step in _STEPS.items():
        exact = _exact(mode, x)
        errors, failure = first_failure(step(_ours, x), exact, torch.float32)
        if failure is None:
            with Progress(console=console, transient=True) as progress:
                times, left = _timed([lambda: step(_ours, x), lambda: step(theirs, x)], runs, progress)
            failure = first_failure(left, exact, torch.float32)[1]
        if failure is not None:
            failed = True
            console.print(f"FAIL {mode}: {failure}")
            continue
        ms, peer_ms = (round(statistics.median(of), 3) for of in times)
        row: Row = {
            "mode": mode,
            "hq": HEADS,
            "hv": HEADS,
            "seqlens": [TOKENS],
            "options": {"dtype": "float32"},
            "ms": ms,
            "ms_min": round(min(times[0]), 3),
            "ms_max": round(max(times[0]), 3),
            # Time of one chunk of one head, on all threads together.
            "step_us": round(1e3 * ms / (BATCH * HEADS * TOKENS / 64), 2),
            "roofline": None,
            "err": errors,
            "peers": {peer: peer_ms},
            "peer_ms_min": {peer: round(min(times[1]), 3)},
            "peer_ms_max": {peer: round(max(times[1]), 3)},
        }
        rows.append(row)
        worst = max(filter(None, errors.values()), default=0.0)
        console.print(f"{label(row)}, K = V = {HEAD_DIM}: {ms:.1f} ms, {peer} {peer_ms:.1f} ms: {peer_ms / ms:.2f}x "
                      f"(worst error {worst:.1e})  repeat: python -m flash_qla bench --cpu --runs {runs}")  # fmt: skip
    if out is not None and rows:
        write(out, {**report, "rows": rows})
        console.print(f"wrote {out}")
    return 1 if failed else 0
