"""What a row of the bench's serving modes calls, as an adapter for an engine calls it, and what bounds its time."""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Tuple, Union

import torch

import flash_qla

from .bench_options import Call, Tensors
from .results import Row

_CHUNK = 64
_VECTOR = 2 * 128  # bytes of one head's row of q, k, v or o


def _in_kernel(x: Tensors) -> Dict[str, Any]:
    return {
        "use_qk_l2norm_in_kernel": x["q"].dtype != torch.float64,  # the oracle has rows that are normalised
        "use_gate_in_kernel": True,
        "A_log": x["A_log"],
        "dt_bias": x["dt_bias"],
        "use_beta_sigmoid_in_kernel": True,
    }


def _tokens(x: Tensors) -> Dict[str, Any]:
    return {"q": x["q"], "k": x["k"], "v": x["v"], "g": x["a"], "beta": x["b"], "initial_state_indices": x["slots"]}


def _prefill(x: Tensors, name: str, auto_cp: Union[bool, Literal["invariant"]]) -> Call:
    pool = x["h0"].clone()

    def run() -> Tensors:
        o = flash_qla.gated_delta_rule_prefill(
            state_pool=pool, cu_seqlens=x["cu_seqlens"], auto_cp=auto_cp, **_tokens(x), **_in_kernel(x)
        )
        return {"o": o, "final_state": pool}

    return Call(name, run, lambda: pool.copy_(x["h0"]))


def _step(x: Tensors) -> Call:
    pool = x["h0"].clone()

    def run() -> Tensors:
        o = flash_qla.gated_delta_rule_decode(state_pool=pool, **_tokens(x), **_in_kernel(x))
        return {"o": o, "final_state": pool}

    return Call("", run, lambda: pool.copy_(x["h0"]))


def _verify(x: Tensors) -> Call:
    """The pool is read alone; the state after every token is left, for the tokens that are accepted later."""
    count, tokens = x["q"].shape[:2]
    states = x["h0"].new_empty(count, tokens, *x["h0"].shape[1:])
    rows = torch.arange(count, device=states.device, dtype=torch.int32)

    def run() -> Tensors:
        o = flash_qla.gated_delta_rule_verify(
            state_pool=x["h0"],
            parents=x.get("parents"),
            states_out=states,
            states_out_indices=rows,
            **_tokens(x),
            **_in_kernel(x),
        )
        return {"o": o, "h": states.flatten(0, 1)}

    return Call("", run)


def serving_calls(given: Row, x: Tensors) -> List[Call]:
    """The call of a row; of a prefill then the same without a sequence split, and with one that has the same bits in
    every batch."""
    if given["mode"] == "prefill":
        others = [_prefill(x, "auto_cp=False", False), _prefill(x, "auto_cp=invariant", "invariant")]
        return [_prefill(x, "", True), *others]
    return [_step(x) if given["mode"] == "steps" else _verify(x)]


def serving_work(row: Row, flop_of_chunk: float) -> Tuple[float, float]:
    """The smallest traffic of a row in bytes, and its products in FLOP."""
    hq, hv, tokens, count = row["hq"], row["hv"], sum(row["seqlens"]), len(row["seqlens"])
    state = 128 * 128 * hv * (2 if row["state_dtype"] == "bfloat16" else 4)
    written = tokens if row["mode"] == "verify" else count
    moved = tokens * (2 * _VECTOR * hq + 2 * _VECTOR * hv + 4 * hv) + state * (count + written)
    return moved, flop_of_chunk * tokens / _CHUNK * hv
