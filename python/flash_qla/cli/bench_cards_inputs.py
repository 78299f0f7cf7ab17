"""Rows and inputs of the bench over several cards. This file needs torch alone: bench_cards_peers.py uses it in other
processes."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

if __package__:
    from .bench_inputs import HEAD_DIM, Heads, draw_still, make_inputs
else:  # run by a script, without this package
    from bench_inputs import HEAD_DIM, Heads, draw_still, make_inputs  # type: ignore[no-redef]

Row = Dict[str, Any]
Tensors = Dict[str, torch.Tensor]

MODES = ("cp_fwd", "cp_train")
_HEADS: List[Heads] = [(8, 32), (16, 64)]
_LENGTHS = ("1x131072", "1x1048576")
GATES = ("mixed", "none", "strong")

# Tokens are drawn in blocks, each from its own seed: a rank draws its share alone, whatever the others have.
BLOCK = 8192

# Of longer streams two key heads with their value heads are checked: the two with most heads that do not decay.
CHECKED_WHOLE = 262144

# What has a row a token, by the heads that it has.
_OF_KEY_HEADS = ("q", "k", "dq", "dk")
_GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "g": "dg", "beta": "dbeta"}

# Bytes that a call needs, in those of q, k and v: these, the results, what is kept for the backward pass, scratch.
_NEEDED = {"cp_fwd": 2.5, "cp_train": 6.0}


def rows_of(modes: Sequence[str], heads: str, lengths: str, gates: str) -> List[Row]:
    """Rows of one sequence each: heads and lengths of the table, or those chosen by comma-separated `heads` ("8x32"),
    `lengths` ("1x131072") and `gates`."""
    pairs = [(int(hq), int(hv)) for hq, _, hv in (h.partition("x") for h in heads.split(","))] if heads else _HEADS
    return [
        {"mode": mode, "hq": hq, "hv": hv, "name": name, "seqlens": [int(name.partition("x")[2])], "gates": kind,
         "dtype": "bfloat16", "state_dtype": "float32"}
        for mode in modes
        for name in (lengths.split(",") if lengths else _LENGTHS)
        for hq, hv in pairs
        for kind in (gates.split(",") if gates else ["mixed"])
    ]  # fmt: skip


def needed_bytes(row: Row, tokens: int) -> int:
    """About what a call on so many of a row's tokens takes."""
    return int(_NEEDED[row["mode"]] * 2 * HEAD_DIM * (2 * row["hq"] + row["hv"]) * tokens)


def still_heads(row: Row) -> torch.Tensor:
    return draw_still(row["hv"], torch.Generator().manual_seed(0))


def checked_heads(row: Row) -> List[int]:
    """The key heads whose results are compared with the oracle."""
    if sum(row["seqlens"]) <= CHECKED_WHOLE or row["hq"] <= 2:
        return list(range(row["hq"]))
    ratio, still = row["hv"] // row["hq"], still_heads(row).tolist()
    return sorted(sorted(range(row["hq"]), key=lambda h: -sum(head // ratio == h for head in still))[:2])


def heads_of(row: Row, name: str, x: torch.Tensor, key_head: int) -> torch.Tensor:
    """The part of a tensor [1, T, H, ..] that belongs to a key head."""
    ratio = 1 if name in _OF_KEY_HEADS else row["hv"] // row["hq"]
    return x[:, :, key_head * ratio : (key_head + 1) * ratio]


def make_share(row: Row, begin: int, end: int, device: torch.device, key_head: Optional[int] = None) -> Tensors:
    """Tokens begin .. end - 1 of a row's stream, of all heads or of those of a key head: q, k, v, g, beta, do."""
    drawn: Dict[str, torch.Tensor] = {}
    still = still_heads(row).to(device)
    for block in range(begin // BLOCK, -(-end // BLOCK)):
        first = block * BLOCK
        x = make_inputs({**row, "seqlens": [BLOCK]}, seed=block, device=str(device), still=still)
        at = max(begin - first, 0), min(end - first, BLOCK)
        for name in (*_GRADIENTS, "do"):
            part = x[name][:, at[0] : at[1]]
            part = part if key_head is None else heads_of(row, name, part, key_head)
            if name not in drawn:
                drawn[name] = part.new_empty((1, end - begin, *part.shape[2:]))
            drawn[name][:, first + at[0] - begin : first + at[1] - begin] = part
    return drawn


def call(row: Row, x: Tensors, function: Any) -> Tensors:
    """A row's results. `function`: of q, k, v, g, beta, which gives o."""
    if row["mode"] == "cp_fwd":
        with torch.inference_mode():
            return {"o": function(*(x[name] for name in _GRADIENTS))}
    leaves = [x[name].detach().requires_grad_() for name in _GRADIENTS]
    o = function(*leaves)
    return {"o": o.detach(), **dict(zip(_GRADIENTS.values(), torch.autograd.grad(o, leaves, x["do"])))}


def picked(row: Row, results: Tensors) -> Dict[Tuple[str, int], torch.Tensor]:
    """What is checked of a row's results, by name and key head, in memory of its own."""
    heads = checked_heads(row)
    return {(name, h): heads_of(row, name, x, h).contiguous() for name, x in results.items() for h in heads}
