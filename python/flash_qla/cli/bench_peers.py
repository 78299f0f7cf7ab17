"""Times another package on the bench's rows, in a process of its own: some of them share our import name.

    python bench_peers.py <fla | flashqla | flashinfer> <replays>      rows as JSON on stdin, one JSON object a line out

Each line is {"row": index, "peer": name and version, "peak_bytes": memory beside the inputs, "ms": time}, or has "error"
in place of the last two.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any, Callable, Dict, Iterator, Tuple

if __package__:
    from .bench_inputs import HEAD_DIM, graph_ms, make_inputs, peak_bytes
else:  # run as a script, without this package
    from bench_inputs import HEAD_DIM, graph_ms, make_inputs, peak_bytes

Call = Callable[[], Any]
Inputs = Dict[str, Any]
SCALE = HEAD_DIM**-0.5


def _packed(forward: Any, backward: Any, cache: bool, row: Dict[str, Any], x: Inputs) -> Call:
    """Calls of the two packages that have a low-level pair. They differ in what the pair hands over."""
    common = dict(scale=SCALE, initial_state=x["h0"], cu_seqlens=x["cu_seqlens"])
    given = [x[n] for n in ("q", "k", "v", "g", "beta")]
    extra = dict(enable_fwd_cp_cache=True) if cache and row["mode"] != "fwd" else {}

    def run_forward() -> Any:
        return forward(*given, output_final_state=True, **common, **extra)

    def run_backward(saved: Any) -> Any:
        if cache:
            q, k, v, _, beta = given
            return backward(q, k, v, saved[0], beta, saved[1], x["do"], x["dht"], cp_cache=saved[5], **common)
        return backward(
            q=x["q"], k=x["k"], v=x["v"], g=saved[0], beta=x["beta"], A=saved[2], do=x["do"], dht=x["dht"], **common
        )

    if row["mode"] == "fwd":
        return run_forward
    if row["mode"] == "train":
        return lambda: run_backward(run_forward())
    saved = run_forward()
    return lambda: run_backward(saved)


def _fla(row: Dict[str, Any], x: Inputs) -> Iterator[Tuple[str, Call]]:
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    name = f"fla {importlib.metadata.version('fla-core')}"
    if row["mode"] == "decode":
        q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
        state = x["h0"]
        yield (
            name,
            lambda: fused_recurrent_gated_delta_rule(
                q, k, v, g=g, beta=beta, scale=SCALE, initial_state=state, output_final_state=True,
                state_v_first=row["state_v_first"],
            ),
        )
    else:
        yield name, _packed(chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd, False, row, x)


def _flashqla(row: Dict[str, Any], x: Inputs) -> Iterator[Tuple[str, Call]]:
    if row["mode"] == "decode":
        return
    from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd

    name = f"flashqla {importlib.metadata.version('flash-qla')}"
    yield name, _packed(chunk_gated_delta_rule_fwd, chunk_gated_delta_rule_bwd, True, row, x)


def _flashinfer(row: Dict[str, Any], x: Inputs) -> Iterator[Tuple[str, Call]]:
    if row["mode"] != "fwd":
        return
    from flashinfer.gdn_prefill import chunk_gated_delta_rule

    version = importlib.metadata.version("flashinfer-python")
    flat = {n: x[n][0] for n in ("q", "k", "v", "beta")}
    alpha = x["g"][0].exp()  # its gate is the decay itself
    for word, use_cp in (("auto_cp", "auto"), ("no_cp", False)):
        yield f"flashinfer {version} {word}", lambda use_cp=use_cp: chunk_gated_delta_rule(
            **flat, g=alpha, scale=SCALE, initial_state=x["h0"], cu_seqlens=x["cu_seqlens"], output_final_state=True,
            use_cp=use_cp,
        )  # fmt: skip


PEERS: Dict[str, Callable[[Dict[str, Any], Inputs], Iterator[Tuple[str, Call]]]] = {
    "fla": _fla,
    "flashqla": _flashqla,
    "flashinfer": _flashinfer,
}


def main() -> None:
    peer, replays = sys.argv[1], int(sys.argv[2])
    for i, row in enumerate(json.load(sys.stdin)):
        answer: Dict[str, Any] = {"row": i}
        try:
            for name, call in PEERS[peer](row, make_inputs(row)):
                answer = {"row": i, "peer": name, "peak_bytes": peak_bytes(call), "ms": graph_ms(call, replays)}
                print(json.dumps(answer), flush=True)
        except Exception as error:  # a row that a peer cannot run stays empty, and says why
            print(json.dumps({"row": i, "peer": peer, "error": f"{type(error).__name__}: {error}"[:300]}), flush=True)


if __name__ == "__main__":
    main()
