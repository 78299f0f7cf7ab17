"""`bench` on a GPU: forward, backward, training step and decode, beside other packages where they are installed."""

from __future__ import annotations

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.progress import Progress

import flash_qla

from .bench_inputs import GATES, HEAD_DIM, graphs_ms, make_inputs, peak_bytes, recorded_times, rows_of
from .bench_processes import prepare_peers, run_peers
from .check import ORACLES
from .errors import first_failure, head_errors
from .results import Row, geometric_mean, label, make_report, peer_names, ratios, save, write

PROTOCOL = (
    "bfloat16 q, k (normalised), v; float32 g, beta, states; a quarter of the heads without decay; initial state in, "
    "final state out; median of CUDA graph replays of 5 calls, the forward's with and without its sequence split in "
    "turns; every tensor checked against the fp64 oracle before it is timed; peers compiled ahead or beside each other, "
    "then timed one after another on the same inputs, their tensors compared with the same oracle; fla runs its own "
    "kernels (FLA_FLASH_QLA=0), as its autotuner chose them while the others compiled; recorded times are of an "
    "earlier run"
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


def _inference(x: Dict[str, torch.Tensor], auto_cp: bool = True) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    with torch.inference_mode():
        return flash_qla.chunk_gated_delta_rule(
            *(x[n] for n in ("q", "k", "v", "g", "beta")),
            initial_state=x["h0"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
            auto_cp=auto_cp,
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


def _timed(given: Row, x: Dict[str, torch.Tensor]) -> List[Callable[[], Any]]:
    """The call of a row; of a forward then the same without its sequence split."""
    mode = given["mode"]
    if mode == "decode":
        return [_decode(given, x, x["h0"].clone())]
    if mode == "fwd":
        return [lambda: _inference(x), lambda: _inference(x, auto_cp=False)]
    if mode == "bwd":
        g, A, *_ = _forward(x)
        return [lambda: _backward(x, g, A)]

    def step() -> None:
        g, A, *_ = _forward(x)
        _backward(x, g, A)

    return [step]


def _options(given: Row) -> Dict[str, str]:
    """What differs from the default call."""
    if given["mode"] != "decode":
        return {} if given["gates"] == "mixed" else {"gates": given["gates"]}
    return {"state_dtype": given["state_dtype"], "state_layout": "[V, K]" if given["state_v_first"] else "[K, V]"}


def _exact(given: Row, x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """The fp64 oracle's tensors of a row."""
    with flash_qla.use_path(ORACLES["cuda"]):
        return _results(given, {n: t.double() if t.is_floating_point() else t for n, t in x.items()})


def _of_heads(found: Dict[str, torch.Tensor], exact: Dict[str, torch.Tensor]) -> Dict[str, Dict[str, Optional[float]]]:
    """Median and worst of the heads' errors, by tensor; None for one that stands where the oracle has other NaN or
    infinities."""
    heads = {name: head_errors(name, found[name], exact[name]) for name in exact if name in found}
    both = {"median": statistics.median, "worst": max}
    return {
        which: {name: e if math.isfinite(e := pick(of_heads)) else None for name, of_heads in heads.items()}
        for which, pick in both.items()
    }


def _measure(given: Row, replays: int) -> Tuple[Optional[Row], Optional[str]]:
    """One row, checked and then timed; or None and what the check found."""
    x = make_inputs(given)
    found = _results(given, x)
    exact = _exact(given, x)
    errors, failure = first_failure(found, exact, torch.bfloat16)
    heads = _of_heads(found, exact)
    del found, exact
    # What is timed gets memory of its own, not pieces of what the oracle's larger tensors have left.
    torch.cuda.empty_cache()
    if failure is not None:
        return None, failure
    calls = _timed(given, x)
    peak = peak_bytes(calls[0])
    ms, *others = graphs_ms(calls, replays)
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
        "err_median_head": heads["median"],
        "err_worst_head": heads["worst"],
        "peers": {},
        "peer_peak_bytes": {},
        "peer_err_median_head": {},
        "peer_err_worst_head": {},
        "recorded": {},
    }
    if others:
        row["unsplit_ms"] = round(others[0], 4)  # auto_cp=False
    return row, None


def _repeat(given: Row) -> str:
    heads, gates = f"{given['hq']}x{given['hv']}", "" if given["gates"] == "mixed" else f" --gates {given['gates']}"
    return f"python -m flash_qla bench --mode {given['mode']} --heads {heads} --seqs {given['name']}{gates}"


def _describe(row: Row) -> str:
    options = "".join(f" {key} {value}" for key, value in row["options"].items())
    share = "" if row["roofline"] is None else f" {100 * row['roofline']:.0f}% of roofline"
    return f"{label(row)}{options}: {row['ms']:.4f} ms{share}, {row['peak_bytes'] / 1e6:.0f} MB"


def _print_summary(rows: Sequence[Row], console: Console) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode]
        for kind, note in (("peers", ""), ("recorded", ", its times recorded earlier")):
            for peer in peer_names(of_mode, kind):
                found = ratios(of_mode, peer, kind)
                console.print(f"{mode}: {geometric_mean(found):.2f}x of {peer}{note} (geometric mean of {len(found)} "
                              f"rows, least {min(found):.2f}x)")  # fmt: skip
        gains = [row["unsplit_ms"] / row["ms"] for row in of_mode if "unsplit_ms" in row]
        if gains:
            console.print(f"{mode}: {geometric_mean(gains):.2f}x of the same calls without a sequence split (geometric "
                          f"mean of {len(gains)} rows, least {min(gains):.2f}x)")  # fmt: skip


def run(
    modes: Sequence[str],
    heads: str,
    seqs: str,
    choice: str,
    gates: str,
    peers: str,
    peer_seconds: float,
    recorded: Optional[Path],
    replays: int,
    out: Optional[Path],
    compile_only: bool = False,
) -> int:
    """Measures and prints; returns the exit code. `choice`: "all", "short" or "peers", as rows_of() says. The results
    are complete after each row, and the rows of the short run come first: a run that is cut short loses the rest alone.
    With "{mode}" in the name of `out` every mode has a file of its own: h200_{mode}.json gives h200_forward.json.

    compile_only: the peers compile for the rows, into the caches that they keep on disk, and nothing is measured."""
    console = Console(highlight=False, soft_wrap=True)
    unknown = [mode for mode in modes if mode not in _MODES]
    if unknown:
        console.print(f"bench: --mode must be of {', '.join(_MODES)} ({unknown[0]})")
        return 2
    if not torch.cuda.is_available():
        console.print("bench: a CUDA GPU must be present (none was found); --cpu measures the CPU path")
        return 2
    wrong = [kind for kind in filter(None, gates.split(",")) if kind not in GATES]
    if wrong:
        console.print(f"bench: --gates must be of {', '.join(GATES)} ({wrong[0]})")
        return 2
    wanted = [row for mode in modes for row in rows_of(mode, heads, seqs, choice, gates)]
    if compile_only:
        with tempfile.TemporaryDirectory() as folder:
            ready, troubles = prepare_peers(
                peers.split(","), wanted, replays, peer_seconds, Path(folder), lambda row: console.print(str(row))
            )
        for peer in ready:
            peer.end()
        for trouble in troubles:
            console.print(trouble)
        console.print(f"{len(ready)} processes compiled for {len(wanted)} rows")
        return 1 if troubles else 0
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
        if peers:
            torch.cuda.empty_cache()  # they share the GPU's memory
            task = progress.add_task("peers", total=None)
            oracle = _Oracle(given)

            def take(answer: Row) -> None:
                row, peer = rows[answer["row"]], answer["peer"]
                progress.update(task, description=f"{peer}, {label(row)}")
                if "error" in answer:
                    console.print(f"peer {peer}, {label(row)}: {answer['error']}")
                    return
                row["peers"][peer] = round(answer["ms"], 4)
                row["peer_peak_bytes"][peer] = answer["peak_bytes"]
                keep()
                console.print(f"{_describe(row)}, {peer} {answer['ms']:.4f} ({answer['ms'] / row['ms']:.2f}x), "
                              f"{answer['peak_bytes'] / 1e6:.0f} MB")  # fmt: skip

            def compare(answer: Row) -> None:
                row, peer = rows[answer["row"]], answer["peer"]
                heads_of_peer = oracle.errors(answer["row"], Path(answer["tensors"]))
                row["peer_err_median_head"][peer] = heads_of_peer["median"]
                row["peer_err_worst_head"][peer] = heads_of_peer["worst"]
                keep()

            with tempfile.TemporaryDirectory() as folder:
                for trouble in run_peers(peers.split(","), given, replays, peer_seconds, Path(folder), take, compare):
                    console.print(trouble)
    _print_summary(rows, console)
    for path in keep(write):
        console.print(f"wrote {path}")
    return 1 if failed else 0


class _Oracle:
    """What the rows' exact tensors say of other packages' ones. Keeps those of the row that was asked for last."""

    def __init__(self, given: Sequence[Row]) -> None:
        self._given = given
        self._place: Optional[int] = None
        self._tensors: Dict[str, torch.Tensor] = {}

    def errors(self, place: int, found: Path) -> Dict[str, Dict[str, Optional[float]]]:
        """As _of_heads(), of the tensors by name in the file `found`, which goes."""
        if place != self._place:
            self._tensors = {}
            self._tensors = _exact(self._given[place], make_inputs(self._given[place]))
            self._place = place
        device = next(iter(self._tensors.values())).device
        of_heads = _of_heads(torch.load(found, map_location=device), self._tensors)
        found.unlink()
        return of_heads


def _chunks(lengths: Sequence[int]) -> int:
    return sum(-(-n // _CHUNK) for n in lengths)


def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
