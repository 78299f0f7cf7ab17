"""Forward calls of the GPU bench that do more than the plain one: they save something, or take a pool of states."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, Optional, Tuple

import torch

import flash_qla

from .results import Row

Tensors = Dict[str, torch.Tensor]

_INPUTS = ("q", "k", "v", "g", "beta")

# Tokens between two checkpoints: a block of prefix caches.
_CHECKPOINT_EVERY = 512


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of the library on the tensors of a row; it returns what the oracle has, by name."""

    name: str  # "" for the default call
    run: Callable[[], Tensors]
    # Puts back what a run changes in place; without it every run gives the same.
    restore: Optional[Callable[[], Any]] = None


def option_call(given: Row, x: Tensors) -> Call:
    """The call of a row whose "option" names what it does. A is not compared: its check is the backward's rows, which
    start from it."""
    option = given["option"]
    if option == "A, dense":
        rows = len(given["seqlens"])
        dense = {name: x[name].view(rows, -1, *x[name].shape[2:]) for name in _INPUTS}
        return Call("", lambda: _saving(dense, x["h0"]))
    if option == "A, packed":
        return Call("", lambda: _saving(x, x["h0"], cu_seqlens=x["cu_seqlens"]))
    if option == "h":
        return Call("", lambda: _saving(x, x["h0"], cu_seqlens=x["cu_seqlens"], output_h=True))
    if option in ("pool", "checkpoints", "listed token"):
        return _prefill(given, x)
    return Call("", lambda: _plain(x))


def _inputs(x: Tensors) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return x["q"], x["k"], x["v"], x["g"], x["beta"]


def _plain(x: Tensors) -> Tensors:
    with torch.inference_mode():
        o, final_state = flash_qla.chunk_gated_delta_rule(
            *_inputs(x),
            initial_state=x["h0"],
            output_final_state=True,
            cu_seqlens=x["cu_seqlens"],
        )
    return {"o": o, "final_state": final_state}


def _saving(x: Tensors, h0: torch.Tensor, **options: Any) -> Tensors:
    """The low-level forward, which saves A."""
    _, _, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(*_inputs(x), initial_state=h0, **options)
    results = {"o": o, "final_state": final_state}
    return results if h is None else {**results, "h": h.reshape(-1, *h.shape[-3:])}


def _prefill(given: Row, x: Tensors) -> Call:
    """Prefill on a pool of its own, in place."""
    lengths, device = given["seqlens"], x["q"].device
    count, pool = len(lengths), x["h0"].clone()
    options: Dict[str, Any] = {"state_v_first": False, "cu_seqlens": x["cu_seqlens"]}
    results = {"final_state": pool}
    if given["option"] == "checkpoints":
        starts = torch.tensor([0, *(n // _CHECKPOINT_EVERY for n in lengths)]).cumsum(0)
        results["checkpoints"] = pool.new_zeros(int(starts[-1]), *pool.shape[1:])
        options |= {
            "checkpoint_every": _CHECKPOINT_EVERY,
            "checkpoints": results["checkpoints"],
            "checkpoint_cu_starts": starts.to(device, torch.int32),
        }
    if given["option"] == "listed token":  # one token within a chunk, in a slot behind those of the sequences
        pool = torch.cat([pool, torch.zeros_like(pool[:1])])
        results = {"final_state": pool[:count], "checkpoints": pool[count:]}
        options |= {
            "checkpoint_offsets": torch.tensor([sum(lengths) // 2 + 1], dtype=torch.int32, device=device),
            "checkpoint_indices": torch.tensor([count], dtype=torch.int32, device=device),
        }
    slots = torch.arange(count, device=device)

    def run() -> Tensors:
        o = flash_qla.gated_delta_rule_prefill(*_inputs(x), pool, slots, **options)
        return {"o": o, **results}

    return Call("", run, lambda: pool[:count].copy_(x["h0"]))
