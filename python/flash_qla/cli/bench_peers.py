"""Runs another package on the bench's rows, in a process of its own: some of them share our import name.

    python bench_peers.py <fla | flashqla | flashinfer | vllm | sglang> <replays> <folder>

The first line of stdin has the rows as JSON, [[index, row], ...]. Each is run once, which compiles what it needs, and
says {"row": index, "peer": name, "error": why not} where it cannot be run; then comes the line {"ready": true}. Each
further line of stdin, {"row": index, "turn": number, "last": true or false}, asks for a turn: a line for each way of
calling the package, {"row": index, "peer": name and version, "ms": times of a call}, with "peak_bytes", its memory
beside the inputs, in turn 0 and with "tensors", a file in <folder> with the results by name, in the last; then {"row":
index, "done": true}. Without replays (0) there are no times.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import torch

if __package__:
    from . import bench_timing
    from .bench_engines import ENGINES
    from .bench_inputs import head_dims, kind_of, make_inputs
    from .bench_serving_inputs import SERVING_LENGTHS
else:  # run as a script, without this package
    import bench_timing  # type: ignore[no-redef]
    from bench_engines import ENGINES  # type: ignore[no-redef]
    from bench_inputs import head_dims, kind_of, make_inputs  # type: ignore[no-redef]
    from bench_serving_inputs import SERVING_LENGTHS  # type: ignore[no-redef]

Inputs = Dict[str, Any]
_GRADIENTS = ("dq", "dk", "dv", "dbeta", "dg", "dh0")


def _scale(row: Dict[str, Any]) -> float:
    return head_dims(row)[0] ** -0.5


@dataclasses.dataclass(frozen=True)
class Peer:
    """One way of calling a package on one row."""

    name: str  # with version
    run: Callable[[], Any]
    tensors: Callable[[Any], Dict[str, Any]]  # of what run() returns: named and laid out as ours


def _packed(name: str, forward: Any, backward: Any, cache: bool, row: Dict[str, Any], x: Inputs) -> Peer:
    """Calls of the two packages that have a low-level pair. They differ in what the pair hands over."""
    kind = kind_of(row)
    common = dict(scale=_scale(row), initial_state=x["h0"], cu_seqlens=x["cu_seqlens"])
    given = [x[n] for n in ("q", "k", "v", "g", "beta")]
    extra = dict(enable_fwd_cp_cache=True) if cache and kind != "fwd" else {}

    def run_forward() -> Any:
        return forward(*given, output_final_state=True, **common, **extra)

    def run_backward(saved: Any) -> Any:
        if cache:
            q, k, v, _, beta = given
            return backward(q, k, v, saved[0], beta, saved[1], x["do"], x["dht"], cp_cache=saved[5], **common)
        return backward(
            q=x["q"], k=x["k"], v=x["v"], g=saved[0], beta=x["beta"], A=saved[2], do=x["do"], dht=x["dht"], **common
        )

    def run_both() -> Any:
        saved = run_forward()
        return saved, run_backward(saved)

    def outputs(saved: Any) -> Dict[str, Any]:
        return {"o": saved[2 if cache else 1], "final_state": saved[4 if cache else 3]}

    def gradients(results: Any) -> Dict[str, Any]:
        return dict(zip(_GRADIENTS, results))

    if kind == "fwd":
        return Peer(name, run_forward, outputs)
    if kind == "train":
        return Peer(name, run_both, lambda both: {**outputs(both[0]), **gradients(both[1])})
    saved = run_forward()
    return Peer(name, lambda: run_backward(saved), gradients)


def _fla(row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    name = f"fla {importlib.metadata.version('fla-core')}"
    if row["mode"] == "decode":
        q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
        state = x["h0"]
        yield Peer(
            name,
            lambda: fused_recurrent_gated_delta_rule(
                q, k, v, g=g, beta=beta, scale=_scale(row), initial_state=state, output_final_state=True,
                state_v_first=row["state_v_first"],
            ),
            lambda results: dict(zip(("o", "final_state"), results)),
        )  # fmt: skip
    else:
        yield _packed(name, chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd, False, row, x)


def _flashqla(row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    if row["mode"] == "decode":
        return
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    name = f"flashqla {importlib.metadata.version('flash-qla')}"
    yield _packed(name, chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd, True, row, x)


def _flashinfer_decode(row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    """Its decode makes the gates itself, of raw ones in bfloat16: those that give this row's, as near as these can."""
    from flashinfer.gdn_decode import gated_delta_rule_decode, gated_delta_rule_decode_pretranspose

    q, k, v, state = (x[n] for n in ("q", "k", "v", "h0"))
    raw_gate = torch.expm1(-x["g"]).log().clamp(min=-80.0).bfloat16()  # softplus undone; a head without decay: exp(-80)
    raw_beta = torch.logit(x["beta"]).bfloat16()
    zeros = torch.zeros(v.shape[2], device=v.device)
    arguments = dict(
        A_log=zeros, a=raw_gate, dt_bias=zeros, b=raw_beta, scale=_scale(row), output=torch.empty_like(v),
        use_qk_l2norm=False,
    )  # fmt: skip
    slots = torch.arange(len(state), device=state.device, dtype=torch.int32)

    def run(pool: Any) -> Any:
        if row["state_v_first"]:
            o, _ = gated_delta_rule_decode_pretranspose(
                q, k, v, None, initial_state=pool, initial_state_indices=slots, **arguments
            )
        else:
            o, _ = gated_delta_rule_decode(q, k, v, pool, **arguments)
        return o

    def results(_: Any) -> Dict[str, Any]:
        pool = state.clone()
        return {"o": run(pool), "final_state": pool}

    timed = state.clone()
    yield Peer(f"flashinfer {importlib.metadata.version('flashinfer-python')}", lambda: run(timed), results)


def _flashinfer(row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    if row["mode"] == "decode" and (row["state_v_first"] or row["state_dtype"] == "float32"):
        yield from _flashinfer_decode(row, x)
    if row["mode"] != "fwd":
        return
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    version = importlib.metadata.version("flashinfer-python")
    flat = {n: x[n][0] for n in ("q", "k", "v", "beta")}
    alpha = x["g"][0].exp()  # its gate is the decay itself
    state = x["h0"].transpose(-1, -2).contiguous()  # its states are [N, Hv, V, K]

    def prefill(use_cp: Any) -> Any:
        return chunk_gated_delta_rule(
            **flat, g=alpha, scale=_scale(row), initial_state=state, cu_seqlens=x["cu_seqlens"],
            output_final_state=True, use_cp=use_cp,
        )  # fmt: skip

    for word, use_cp in (("auto_cp", "auto"), ("no_cp", False)):
        yield Peer(
            f"flashinfer {version} {word}",
            functools.partial(prefill, use_cp),
            lambda results: {"o": results[0][None], "final_state": results[1].transpose(-1, -2)},
        )


def _none(row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    yield from ()


def _serving(package: str, row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    """What is timed goes on from the states that it has left; what is compared starts from those of the row."""
    for way in ENGINES[package](row, x) if package in ENGINES else ():
        timed = way.pool()

        def results(_: Any, way: Any = way) -> Dict[str, Any]:
            pool = way.pool()
            return way.results(pool, way.run(pool))

        yield Peer(way.name, functools.partial(way.run, timed), results)


# By package: of the rows that are not of a serving mode.
PEERS: Dict[str, Callable[[Dict[str, Any], Inputs], Iterator[Peer]]] = {
    "fla": _fla,
    "flashqla": _flashqla,
    "flashinfer": _flashinfer,
    "vllm": _none,
    "sglang": _none,
}


def ways(package: str, row: Dict[str, Any], x: Inputs) -> Iterator[Peer]:
    """The ways of calling a package on a row."""
    return _serving(package, row, x) if row["mode"] in SERVING_LENGTHS else PEERS[package](row, x)


def _say(line: Dict[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class _Row:
    """A row whose turns have begun: the ways of calling the package on its tensors, and their graphs."""

    def __init__(self, package: str, row: Dict[str, Any], timed: bool) -> None:
        self.peers: List[Peer] = [*ways(package, row, make_inputs(row))]
        self.peak_bytes = [bench_timing.peak_bytes(peer.run) for peer in self.peers]
        self.graphs = [bench_timing.capture(peer.run)[1] for peer in self.peers] if timed else []


def _turn(package: str, asked: Dict[str, Any], row: _Row, replays: int, folder: Path) -> None:
    times = bench_timing.graphs_ms(row.graphs, replays) if row.graphs else [[] for _ in row.peers]
    for peer, ms, peak in zip(row.peers, times, row.peak_bytes):
        answer = {"row": asked["row"], "peer": peer.name, "ms": ms}
        if asked["turn"] == 0:
            answer["peak_bytes"] = peak
        if asked["last"]:
            answer["tensors"] = str(folder / f"{package} {asked['row']} {len(list(folder.iterdir()))}.pt")
            found = peer.tensors(peer.run())
            torch.save({name: tensor.cpu() for name, tensor in found.items()}, answer["tensors"])
        _say(answer)


def main() -> None:
    package, replays, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    rows = dict(json.loads(sys.stdin.readline()))

    def refuse(i: int, error: Exception) -> None:
        _say({"row": i, "peer": package, "error": f"{type(error).__name__}: {error}"[:300]})

    for i, row in rows.items():
        try:
            for peer in ways(package, row, make_inputs(row)):
                peer.run()
            torch.cuda.synchronize()
        except Exception as error:  # a row that a peer cannot run stays empty, and says why
            refuse(i, error)
    torch.cuda.empty_cache()
    _say({"ready": True})
    begun: Any = None
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if asked["turn"] == 0:
                begun = None
                torch.cuda.empty_cache()
                begun = _Row(package, rows[asked["row"]], replays > 0)
            _turn(package, asked, begun, replays, folder)
            if asked["last"]:
                begun = None
                torch.cuda.empty_cache()  # the memory is for others' rows now
        except Exception as error:
            refuse(asked["row"], error)
        _say({"row": asked["row"], "done": True})


if __name__ == "__main__":
    main()
