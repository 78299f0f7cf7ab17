"""`bench` on a GPU: forward, backward, training step and decode, beside other packages where they are installed."""

from __future__ import annotations

import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.progress import Progress

import flash_qla

from .bench_inputs import HEAD_DIM, graph_ms, make_inputs, peak_bytes, recorded_times, rows_of
from .check import ORACLES
from .errors import first_failure, head_errors
from .results import Row, geometric_mean, label, make_report, peer_names, ratios, save, write

PROTOCOL = (
    "bfloat16 q, k (normalised), v; float32 g, beta, states; a quarter of the heads without decay; initial state in, "
    "final state out; median of CUDA graph replays of 5 calls; every tensor checked against the fp64 oracle before it "
    "is timed; peers timed afterwards on the same inputs, one process each; recorded times are of an earlier run"
)

_MODES = ("fwd", "bwd", "train", "decode")
_FILE_NAMES = {"fwd": "forward", "bwd": "backward", "train": "train", "decode": "decode"}

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


def _decode(given: Row, x: Dict[str, torch.Tensor], pool: torch.Tensor) -> Callable[[], torch.Tensor]:
    tensors = [x[n] for n in ("q", "k", "v", "g", "beta")]
    slots = torch.arange(len(pool), device=pool.device)
    return lambda: flash_qla.gated_delta_rule_decode(*tensors, pool, slots, state_v_first=given["state_v_first"])


def _results(given: Row, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """What is compared with the oracle."""
    mode = given["mode"]
    if mode == "decode":
        pool = x["h0"].clone()
        return {"o": _decode(given, x, pool)(), "final_state": pool}
    if mode == "fwd":
        o, final_state = _inference(x)
        return {"o": o, "final_state": final_state}
    g, A, o, _, final_state = _forward(x)
    dq, dk, dv, db, dg, dh0 = _backward(x, g, A)
    gradients = {"dq": dq, "dk": dk, "dv": dv, "dbeta": db, "dg": dg, "dh0": dh0}
    return gradients if mode == "bwd" else {"o": o, "final_state": final_state, **gradients}


def _timed(given: Row, x: Dict[str, torch.Tensor]) -> Callable[[], Any]:
    mode = given["mode"]
    if mode == "decode":
        return _decode(given, x, x["h0"].clone())
    if mode == "fwd":
        return lambda: _inference(x)
    if mode == "bwd":
        g, A, *_ = _forward(x)
        return lambda: _backward(x, g, A)

    def step() -> None:
        g, A, *_ = _forward(x)
        _backward(x, g, A)

    return step


def _options(given: Row) -> Dict[str, str]:
    """What differs from the default call."""
    if given["mode"] != "decode":
        return {}
    return {"state_dtype": given["state_dtype"], "state_layout": "[V, K]" if given["state_v_first"] else "[K, V]"}


def _measure(given: Row, replays: int) -> Tuple[Optional[Row], Optional[str]]:
    """One row, checked and then timed; or None and what the check found."""
    x = make_inputs(given)
    found = _results(given, x)
    with flash_qla.use_path(ORACLES["cuda"]):
        exact = _results(given, {n: t.double() if t.is_floating_point() else t for n, t in x.items()})
    errors, failure = first_failure(found, exact, torch.bfloat16)
    heads = {name: head_errors(name, found[name], exact[name]) for name in exact}
    del found, exact
    # What is timed gets memory of its own, not pieces of what the oracle's larger tensors have left.
    torch.cuda.empty_cache()
    if failure is not None:
        return None, failure
    call = _timed(given, x)
    peak = peak_bytes(call)
    ms = graph_ms(call, replays)
    bound = _bound_ms(given)
    row: Row = {
        "mode": given["mode"],
        "hq": given["hq"],
        "hv": given["hv"],
        "seqlens": given["seqlens"],
        "options": _options(given),
        "ms": round(ms, 4),
        "peak_bytes": peak,
        # Time of one chunk of one value head on one multiprocessor, the card taken as full.
        "step_us": round(1e3 * ms * _sm_count() / (given["hv"] * _chunks(given["seqlens"])), 3),
        "roofline": None if bound is None else round(bound / ms, 3),
        "err": errors,
        "err_median_head": {name: statistics.median(of_heads) for name, of_heads in heads.items()},
        "err_worst_head": {name: max(of_heads) for name, of_heads in heads.items()},
        "peers": {},
        "peer_peak_bytes": {},
        "recorded": {},
    }
    return row, None


def _repeat(given: Row) -> str:
    heads = f"{given['hq']}x{given['hv']}"
    return f"python -m flash_qla bench --mode {given['mode']} --heads {heads} --seqs {given['name']}"


def _describe(row: Row) -> str:
    options = "".join(f" {key} {value}" for key, value in row["options"].items())
    share = "" if row["roofline"] is None else f" {100 * row['roofline']:.0f}% of roofline"
    return f"{label(row)}{options}: {row['ms']:.4f} ms{share}, {row['peak_bytes'] / 1e6:.0f} MB"


_PEER_SCRIPT = Path(__file__).with_name("bench_peers.py")

# A peer's process that says nothing for this long is ended: compiling one of their kernels takes half a minute.
_PEER_SILENCE_S = 120.0


def _run_peer(
    item: str, given: Sequence[Row], replays: int, seconds: float, take: Callable[[Row], None]
) -> Optional[str]:
    """Times one peer ("name" or "name=folder") in a process of its own, at most `seconds` long, and hands over each of
    its answers as it comes. Returns what went wrong, or None."""
    name, _, folder = item.partition("=")
    # Without this package, whose import name one of them shares; and fla with its own kernels, which it would leave for
    # any flash_qla that it can import.
    environment = {**os.environ, "PYTHONPATH": folder, "FLA_FLASH_QLA": "0"}
    with tempfile.TemporaryFile("w+") as rows, tempfile.TemporaryFile("w+") as complaints:
        json.dump(list(given), rows)
        rows.seek(0)
        process = subprocess.Popen(
            [sys.executable, str(_PEER_SCRIPT), name, str(replays)],
            stdin=rows,
            stdout=subprocess.PIPE,
            stderr=complaints,
            env=environment,
            text=True,
        )
        assert process.stdout is not None
        lines: "queue.Queue[Optional[str]]" = queue.Queue()

        def read() -> None:
            for line in process.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        end = time.monotonic() + seconds
        try:
            while True:
                line = lines.get(timeout=max(0.0, min(end - time.monotonic(), _PEER_SILENCE_S)))
                if line is None:
                    process.wait()
                    break
                if line.startswith('{"row"'):  # the rest is what the peer itself prints
                    take(json.loads(line))
        except queue.Empty:
            return "ended: it took too long"
        finally:
            process.kill()
            process.wait()
        complaints.seek(0)
        last = complaints.read().strip().splitlines()[-1:]
    return None if process.returncode == 0 or not last else last[0]


def _print_summary(rows: Sequence[Row], console: Console) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        for kind, note in (("peers", ""), ("recorded", ", its times recorded earlier")):
            for peer in peer_names(of_mode, kind):
                found = ratios(of_mode, peer, kind)
                console.print(f"{mode}: {geometric_mean(found):.2f}x of {peer}{note} (geometric mean of {len(found)} "
                              f"rows, least {min(found):.2f}x)")  # fmt: skip


def run(
    modes: Sequence[str],
    heads: str,
    seqs: str,
    short: bool,
    peers: str,
    peer_seconds: float,
    recorded: Optional[Path],
    replays: int,
    out: Optional[Path],
) -> int:
    """Measures and prints; returns the exit code. The results are complete after each row, and the rows of the short run
    come first: a run that is cut short loses the rest alone. With "{mode}" in the name of `out` every mode has a file
    of its own: h200_{mode}.json gives h200_forward.json."""
    console = Console(highlight=False, soft_wrap=True)
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown:
        console.print(f"bench: --mode must be of {', '.join(_MODES)} ({unknown[0]})")
        return 2
    if not torch.cuda.is_available():
        console.print("bench: a CUDA GPU must be present (none was found); --cpu measures the CPU path")
        return 2
    wanted = [row for mode in modes for row in rows_of(mode, heads, seqs, short)]
    places = {id(row): place for place, row in enumerate(wanted)}  # in the tables
    earlier = {} if recorded is None else recorded_times(recorded)
    console.print(f"{torch.cuda.get_device_name()}; {PROTOCOL}")
    given: List[Row] = []  # of those in `rows`
    rows: List[Row] = []
    report = make_report(PROTOCOL, rows, cuda=True)

    def keep(put: Callable[[Path, Dict[str, Any]], None] = save) -> List[Path]:
        in_order = [row for _, row in sorted(zip((places[id(g)] for g in given), rows), key=lambda pair: pair[0])]
        files: Dict[Path, List[Row]] = {}
        for row in in_order if out is not None else ():
            files.setdefault(Path(str(out).replace("{mode}", _FILE_NAMES[row["mode"]])), []).append(row)
        for path, part in files.items():
            put(path, {**report, "rows": part})
        return list(files)

    failed = False
    with Progress(console=console, transient=True) as progress:
        for row_given in progress.track(sorted(wanted, key=lambda row: not row["short"]), description="rows"):
            try:
                row, failure = _measure(row_given, replays)
            except Exception as error:  # the rows after this one are worth having
                row, failure = None, f"{type(error).__name__}: {error}"
            if row is None:
                failed = True
                console.print(f"FAIL {label(row_given)}: {failure}  repeat: {_repeat(row_given)}")
                continue
            if not row["options"]:
                row["recorded"] = earlier.get((row["mode"], row["hq"], row["hv"], row_given["name"]), {})
            given.append(row_given)
            rows.append(row)
            keep()
            earlier_times = row["recorded"].items()
            beside = "".join(f" {peer} {ms:.4f} recorded ({ms / row['ms']:.2f}x)" for peer, ms in earlier_times)
            console.print(f"{_describe(row)}{beside} worst error {max(row['err'].values()):.1e} (of a head "
                          f"{max(row['err_worst_head'].values()):.1e})  repeat: {_repeat(row_given)}")  # fmt: skip
        for item in filter(None, peers.split(",")):
            name = item.partition("=")[0]
            task = progress.add_task(name, total=len(rows))

            def take(answer: Row) -> None:
                row = rows[answer["row"]]
                progress.update(task, completed=answer["row"] + 1)
                if "ms" not in answer:
                    console.print(f"peer {name}, {label(row)}: {answer['error']}")
                    return
                row["peers"][answer["peer"]] = round(answer["ms"], 4)
                row["peer_peak_bytes"][answer["peer"]] = answer["peak_bytes"]
                keep()
                console.print(f"{_describe(row)}, {answer['peer']} {answer['ms']:.4f} "
                              f"({answer['ms'] / row['ms']:.2f}x), {answer['peak_bytes'] / 1e6:.0f} MB")  # fmt: skip

            trouble = _run_peer(item, given, replays, peer_seconds, take)
            if trouble is not None:
                console.print(f"peer {name}: {trouble}")
    _print_summary(rows, console)
    for path in keep(write):
        console.print(f"wrote {path}")
    return 1 if failed else 0


def _chunks(lengths: Sequence[int]) -> int:
    return sum(-(-n // _CHUNK) for n in lengths)


def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
