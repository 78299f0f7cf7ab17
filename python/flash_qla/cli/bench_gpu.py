"""`bench` on a GPU: forward, backward, training step and decode, beside other packages where they are installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.progress import Progress

import flash_qla

from .bench_inputs import HEAD_DIM, graph_ms, make_inputs, rows_of
from .check import ORACLES
from .errors import first_failure
from .results import Row, geometric_mean, label, make_report, peer_names, ratios, write

PROTOCOL = (
    "bfloat16 q, k (normalised), v; float32 g, beta, states; a quarter of the heads without decay; initial state in, "
    "final state out; median of CUDA graph replays of 5 calls; every tensor checked against the fp64 oracle before it "
    "is timed"
)

_MODES = ("fwd", "bwd", "train", "decode")

# Sustained memory bandwidth (bytes/s) and dense bfloat16 rate (FLOP/s) by GPU: a copy kernel and a long GEMM reach
# them.
_RATES: Dict[str, Tuple[float, float]] = {"H200": (4.3e12, 790e12)}

# FLOP of one chunk and value head at K = V = 128, the products of docs/math.md counted once each.
_FLOP_FORWARD, _FLOP_BACKWARD = 10.66e6, 24.1e6

_CHUNK = 64


def _bound_ms(row: Dict[str, Any]) -> Optional[float]:
    """The roofline: no kernel is faster than its smallest traffic or its products. None for an unknown GPU."""
    name = torch.cuda.get_device_name()
    rates = next((r for gpu, r in _RATES.items() if gpu in name), None)
    if rates is None:
        return None
    hq, hv, tokens, count = row["hq"], row["hv"], sum(row["seqlens"]), len(row["seqlens"])
    state = HEAD_DIM * HEAD_DIM * hv * count * (2 if row["state_dtype"] == "bfloat16" else 4)
    vector = 2 * HEAD_DIM  # bytes of one head's row of q, k, v, o or a gradient
    chunks = tokens / _CHUNK * hv
    saved = 2 * _CHUNK * hv + 4 * hv  # A and the cumsum, a token
    forward = (tokens * (2 * vector * hq + 2 * vector * hv + 8 * hv) + 2 * state, _FLOP_FORWARD * chunks)
    backward = (tokens * (4 * vector * hq + 3 * vector * hv + 16 * hv + saved) + 3 * state, _FLOP_BACKWARD * chunks)
    moved, computed = {
        "fwd": forward,
        "decode": forward,
        "bwd": backward,
        "train": (forward[0] + backward[0] + tokens * saved, forward[1] + backward[1]),
    }[row["mode"]]
    return 1e3 * max(moved / rates[0], computed / rates[1])


def _forward(x: Dict[str, torch.Tensor]) -> Tuple[torch.Tensor, ...]:
    return flash_qla.chunk_gated_delta_rule_fwd(
        *(x[n] for n in ("q", "k", "v", "g", "beta")), initial_state=x["h0"], cu_seqlens=x["cu_seqlens"]
    )


def _backward(x: Dict[str, torch.Tensor], g: Any, A: Any) -> Tuple[torch.Tensor, ...]:
    return flash_qla.chunk_gated_delta_rule_bwd(
        x["q"], x["k"], x["v"], g, x["beta"], A, x["do"], x["dht"], initial_state=x["h0"], cu_seqlens=x["cu_seqlens"]
    )


def _inference(x: Dict[str, torch.Tensor]) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    with torch.inference_mode():
        return flash_qla.chunk_gated_delta_rule(
            *(x[n] for n in ("q", "k", "v", "g", "beta")),
            initial_state=x["h0"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
        )


def _decode(x: Dict[str, torch.Tensor], pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    tensors = (x[n] for n in ("q", "k", "v", "g", "beta"))
    return flash_qla.gated_delta_rule_decode(*tensors, pool, slots, state_v_first=False)


def _results(mode: str, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """What is compared with the oracle."""
    if mode == "decode":
        pool, slots = x["h0"].clone(), torch.arange(len(x["h0"]), device="cuda")
        return {"o": _decode(x, pool, slots)}
    if mode == "fwd":
        o, final_state = _inference(x)
        return {"o": o, "final_state": final_state}
    g, A, o, _, final_state = _forward(x)
    dq, dk, dv, db, dg, dh0 = _backward(x, g, A)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dbeta": db, "dg": dg, "dh0": dh0}
    return gradients if mode == "bwd" else {"o": o, "final_state": final_state, **gradients}


def _timed(mode: str, x: Dict[str, torch.Tensor]) -> Callable[[], Any]:
    if mode == "decode":
        pool, slots = x["h0"].clone(), torch.arange(len(x["h0"]), device="cuda")
        return lambda: _decode(x, pool, slots)
    if mode == "fwd":
        return lambda: _inference(x)
    if mode == "bwd":
        g, A, *_ = _forward(x)
        return lambda: _backward(x, g, A)

    def step() -> None:
        g, A, *_ = _forward(x)
        _backward(x, g, A)

    return step


def _peer_times(peers: str, rows: Sequence[Dict[str, Any]], replays: int, console: Console) -> List[Dict[str, float]]:
    """Times by row and peer. Each peer runs in a process of its own."""
    times: List[Dict[str, float]] = [{} for _ in rows]
    script = Path(__file__).with_name("bench_peers.py")
    for item in filter(None, peers.split(",")):
        name, _, folder = item.partition("=")
        # Without this package, whose import name one of them shares; and fla with its own kernels, which it would
        # leave for any flash_qla that it can import.
        environment = {**os.environ, "PYTHONPATH": folder, "FLA_FLASH_QLA": "0"}
        answer = subprocess.run(
            [sys.executable, str(script), name, str(replays)],
            input=json.dumps(rows),
            env=environment,
            capture_output=True,
            text=True,
        )
        if answer.returncode != 0:
            console.print(f"peer {name}: no times: {answer.stderr.strip().splitlines()[-1:]}")
        for line in answer.stdout.splitlines():
            if not line.startswith('{"row"'):
                continue  # something that the peer itself prints
            found = json.loads(line)
            if "ms" in found:
                times[found["row"]][found["peer"]] = round(found["ms"], 4)
            else:
                console.print(f"peer {name}, {label(rows[found['row']])}: {found['error']}")
    return times


def _print_summary(rows: Sequence[Row], console: Console) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        for peer in peer_names(of_mode):
            found = ratios(of_mode, peer)
            console.print(f"{mode}: {geometric_mean(found):.2f}x of {peer} (geometric mean of {len(found)} rows, "
                          f"least {min(found):.2f}x)")  # fmt: skip


def run(modes: Sequence[str], heads: str, seqs: str, peers: str, replays: int, out: Optional[Path]) -> int:
    """Measures and prints; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown:
        console.print(f"bench: --mode must be of {', '.join(_MODES)} ({unknown[0]})")
        return 2
    if not torch.cuda.is_available():
        console.print("bench: a CUDA GPU must be present (none was found); --cpu measures the CPU path")
        return 2
    wanted = [row for mode in modes for row in rows_of(mode, heads, seqs)]
    console.print(f"{torch.cuda.get_device_name()}; {PROTOCOL}")
    peer_times = _peer_times(peers, wanted, replays, console)
    rows: List[Row] = []
    failed = False
    with Progress(console=console, transient=True) as progress:
        for given, others in zip(progress.track(wanted, description="rows"), peer_times):
            mode = given["mode"]
            x = make_inputs(given)
            repeat = (
                f"python -m flash_qla bench --mode {mode} --heads {given['hq']}x{given['hv']} --seqs {given['name']}"
            )
            found = _results(mode, x)
            with flash_qla.use_path(ORACLES["cuda"]):
                exact = _results(mode, {n: t.double() if t.is_floating_point() else t for n, t in x.items()})
            errors, failure = first_failure(found, exact, torch.bfloat16)
            del found, exact
            if failure is not None:
                failed = True
                console.print(f"FAIL {label(given)}: {failure}  repeat: {repeat}")
                continue
            ms = graph_ms(_timed(mode, x), replays)
            bound = _bound_ms(given)
            row: Row = {
                "mode": mode,
                "hq": given["hq"],
                "hv": given["hv"],
                "seqlens": given["seqlens"],
                "options": {} if given["state_dtype"] == "float32" else {"state_dtype": given["state_dtype"]},
                "ms": round(ms, 4),
                # Time of one chunk of one value head on one multiprocessor, the card taken as full.
                "step_us": round(1e3 * ms * _sm_count() / (given["hv"] * _chunks(given["seqlens"])), 3),
                "roofline": None if bound is None else round(bound / ms, 3),
                "err": errors,
                "peers": others,
            }
            rows.append(row)
            beside = " ".join(f"{peer} {t:.4f} ({t / ms:.2f}x)" for peer, t in others.items())
            share = "" if bound is None else f" {100 * bound / ms:.0f}% of roofline"
            options = "".join(f" {key}={value}" for key, value in row["options"].items())
            console.print(f"{label(given)}{options}: {ms:.4f} ms{share} {beside} "
                          f"worst error {max(errors.values()):.1e}  repeat: {repeat}")  # fmt: skip
    _print_summary(rows, console)
    if out is not None and rows:
        write(out, make_report(PROTOCOL, rows, cuda=True))
        console.print(f"wrote {out}")
    return 1 if failed else 0


def _chunks(lengths: Sequence[int]) -> int:
    return sum(-(-n // _CHUNK) for n in lengths)


def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
