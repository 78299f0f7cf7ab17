"""What a row of the GPU bench calls, what that must give by the fp64 oracle, and what bounds its time."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

import torch

import flash_qla
from flash_qla.utils import l2norm

from .bench_inputs import HEAD_DIM, head_dims, kind_of
from .bench_options import Call, Tensors, option_call
from .bench_serving import serving_calls, serving_work
from .bench_serving_inputs import SERVING_LENGTHS
from .check import ORACLES
from .results import Row

_CHUNK = 64

# Sustained memory bandwidth (bytes/s) and dense bfloat16 rate (FLOP/s) by GPU: a copy kernel and a long GEMM reach
# them.
_RATES: Dict[str, Tuple[float, float]] = {"H200": (4.3e12, 790e12)}

# FLOP of one chunk and value head at K = V = 128, the products of docs/math.md counted once each.
_FLOP_FORWARD, _FLOP_BACKWARD = 10.66e6, 24.1e6


def chunks(lengths: List[int]) -> int:
    return sum(-(-n // _CHUNK) for n in lengths)


def bound_ms(row: Row) -> Optional[float]:
    """The roofline: no kernel is faster than its smallest traffic or its products. None for an unknown GPU, and for
    other head dimensions than those whose products are counted here."""
    name = torch.cuda.get_device_name()
    rates = next((r for gpu, r in _RATES.items() if gpu in name), None)
    if rates is None or head_dims(row) != (HEAD_DIM, HEAD_DIM):
        return None
    if row["mode"] in SERVING_LENGTHS:
        moved, computed = serving_work(row, _FLOP_FORWARD)
        return 1e3 * max(moved / rates[0], computed / rates[1])
    hq, hv, tokens, count = row["hq"], row["hv"], sum(row["seqlens"]), len(row["seqlens"])
    state = HEAD_DIM * HEAD_DIM * hv * count * (2 if row["state_dtype"] == "bfloat16" else 4)
    vector = 2 * HEAD_DIM  # bytes of one head's row of q, k, v, o or a gradient
    whole = tokens / _CHUNK * hv
    saved = 2 * _CHUNK * hv + 4 * hv  # A and the cumsum, a token
    forward = (tokens * (2 * vector * hq + 2 * vector * hv + 8 * hv) + 2 * state, _FLOP_FORWARD * whole)
    backward = (tokens * (4 * vector * hq + 3 * vector * hv + 16 * hv + saved) + 3 * state, _FLOP_BACKWARD * whole)
    moved, computed = {
        "fwd": forward,
        "decode": forward,
        "options": forward,  # without what an option stores
        "bwd": backward,
        "train": (forward[0] + backward[0] + tokens * saved, forward[1] + backward[1]),
    }[kind_of(row)]
    return 1e3 * max(moved / rates[0], computed / rates[1])


def _forward(x: Tensors) -> Tuple[torch.Tensor, ...]:
    return flash_qla.chunk_gated_delta_rule_fwd(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["h0"], cu_seqlens=x["cu_seqlens"]
    )


def _backward(x: Tensors, g: Any, A: Any) -> Tensors:
    gradients = flash_qla.chunk_gated_delta_rule_bwd(
        x["q"], x["k"], x["v"], g, x["beta"], A, x["do"], x["dht"], initial_state=x["h0"], cu_seqlens=x["cu_seqlens"]
    )
    return dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), gradients))


def _step(x: Tensors) -> Tensors:
    g, A, o, _, final_state = _forward(x)
    return {"o": o, "final_state": final_state, **_backward(x, g, A)}


def _inference(x: Tensors, auto_cp: bool = True) -> Tensors:
    with torch.inference_mode():
        o, final_state = flash_qla.chunk_gated_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            x["g"],
            x["beta"],
            initial_state=x["h0"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
            auto_cp=auto_cp,
        )
    return {"o": o, "final_state": final_state}


def _autograd_step(x: Tensors) -> Tensors:
    """A training step as a model makes it."""
    names = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta", "h0": "dh0"}
    leaves = {n: x[n].detach().requires_grad_() for n in names}
    o, final_state = flash_qla.chunk_gated_delta_rule(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        leaves["g"],
        leaves["beta"],
        initial_state=leaves["h0"],
        output_final_state=True,
        cu_seqlens=x["cu_seqlens"],
    )
    assert final_state is not None
    gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [x["do"], x["dht"]])
    return {"o": o.detach(), "final_state": final_state.detach(), **dict(zip(names.values(), gradients))}


def _decode(given: Row, x: Tensors) -> Call:
    """A step on a pool of its own, in place."""
    pool = x["h0"].clone()
    slots = torch.arange(len(pool), device=pool.device)

    def run() -> Tensors:
        o = flash_qla.gated_delta_rule_decode(
            x["q"], x["k"], x["v"], x["g"], x["beta"], pool, slots, state_v_first=given["state_v_first"]
        )
        return {"o": o, "final_state": pool}

    return Call("", run, lambda: pool.copy_(x["h0"]))


def calls_of(given: Row, x: Tensors) -> List[Call]:
    """The call of a row; of a forward then the same without its sequence split."""
    path = given.get("path")
    if path is not None:
        unnamed = {**given, "path": None}
        with flash_qla.use_path(path):
            return [_on_path(path, call) for call in calls_of(unnamed, x)]
    if given["mode"] in SERVING_LENGTHS:
        return serving_calls(given, x)
    kind = kind_of(given)
    if kind == "decode":
        return [_decode(given, x)]
    if kind == "options":
        return [option_call(given, x)]
    if kind == "fwd":
        return [Call("", lambda: _inference(x)), Call("auto_cp=False", lambda: _inference(x, auto_cp=False))]
    if kind == "bwd":
        g, A, *_ = _forward(x)
        return [Call("", lambda: _backward(x, g, A))]
    return [Call("", lambda: _step(x))]


def _on_path(path: str, call: Call) -> Call:
    def run() -> Tensors:
        with flash_qla.use_path(path):
            return call.run()

    return Call(call.name, run, call.restore)


def eager_call(given: Row, x: Tensors, default: Call) -> Call:
    """What is called without a graph: a training step goes through autograd."""
    return Call("eager", lambda: _autograd_step(x)) if given["mode"] == "train" else default


def exact(given: Row, x: Tensors, steps: int = 1) -> Tensors:
    """The fp64 oracle's tensors of a row: of its default call, or of the last of several decode steps, each of which
    takes the state that the one before it has left in the pool's dtype."""
    given = {**given, "path": None}
    wide = {n: t.double() if t.is_floating_point() else t for n, t in x.items()}
    if given["mode"] in SERVING_LENGTHS:  # the contract rounds what a kernel normalises to the dtype of q
        wide |= {n: l2norm(x[n]).double() for n in ("q", "k")}
    with flash_qla.use_path(ORACLES["cuda"]):
        for _ in range(steps - 1):
            wide["h0"] = calls_of(given, wide)[0].run()["final_state"].to(x["h0"].dtype).double()
        return calls_of(given, wide)[0].run()
