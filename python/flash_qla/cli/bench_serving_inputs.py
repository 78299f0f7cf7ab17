"""Rows and inputs of the bench's serving modes: what an engine hands over. This file needs torch alone: bench_peers.py
uses it in another process.

"prefill": sequences of mixed lengths; "steps": a decode step of many sequences; "verify": draft tokens. q, k and v are
parts of one tensor, as a convolution leaves them, gates come as projections leave them, and states lie in a pool whose
slots are in no order."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

_DIM = 128  # of every head

Heads = Tuple[int, int]

# Qwen3-Next and Qwen3.5 on one card and on four, and the largest of them on eight.
SERVING_HEADS: List[Heads] = [(16, 32), (4, 8), (2, 8)]

# By mode: the sequences' lengths. Draft tokens: so many of each of so many sequences.
SERVING_LENGTHS: Dict[str, Dict[str, List[int]]] = {
    "prefill": {
        "1x8192": [8192],
        "1x2048": [2048],
        "mixed8k": [4096, 2048, 1024, 512, 257, 128, 65, 33, 19, 10],
        "128x64": [128] * 64,
        "2017+1x31": [2017, *[1] * 31],  # a prompt's part between tokens of sequences that decode
    },
    "steps": {f"batch{n}": [1] * n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)},
    "verify": {f"{tokens}x{n}": [tokens] * n for tokens in (4, 6, 8) for n in (1, 16, 64)},
}

# Draft tokens that are a tree: its rows, and each token's parent for so many tokens.
TREES = ("8x16", "8x64")
PARENTS = (-1, 0, 0, 1, 1, 2, 2, 3)

SERVING_SHORT: Dict[str, List[str]] = {
    "prefill": ["1x8192", "mixed8k"],
    "steps": ["batch1", "batch16", "batch256"],
    "verify": ["4x16", "8x64"],
}

_STATE_DTYPES = ("float32", "bfloat16")


Row = Dict[str, Any]


def serving_rows(mode: str, heads: Optional[List[Heads]], names: Optional[List[str]], short: bool) -> List[Row]:
    """Rows of a mode: of these heads and lengths (None: all). `short`: the few of one card."""
    lengths = SERVING_LENGTHS[mode]
    chosen = SERVING_HEADS if heads is None else heads
    wanted = list(lengths) if names is None else [name for name in lengths if name in names]
    if short:
        chosen = [pair for pair in chosen if pair == SERVING_HEADS[0]]
        wanted = [name for name in wanted if name in SERVING_SHORT[mode]]
    return [_row(mode, pair, name, *kind) for pair in chosen for name in wanted for kind in _kinds(mode, name)]


def _kinds(mode: str, name: str) -> Iterator[Tuple[str, str]]:
    for option in ("", "tree") if mode == "verify" and name in TREES else ("",):
        for state_dtype in _STATE_DTYPES:
            yield option, state_dtype


def _row(mode: str, heads: Heads, name: str, option: str, state_dtype: str) -> Row:
    return {
        "mode": mode,
        "short": heads == SERVING_HEADS[0] and name in SERVING_SHORT[mode],
        "gates": "mixed",
        "hq": heads[0],
        "hv": heads[1],
        "name": name,
        "seqlens": SERVING_LENGTHS[mode][name],
        "dtype": "bfloat16",
        "option": option,
        "state_dtype": state_dtype,
        "state_v_first": True,
    }


def make_serving_inputs(row: Row, seed: int = 0, device: str = "cuda") -> Dict[str, torch.Tensor]:
    """Tensors of a row: mixed [tokens, 2 Hq K + Hv V] and q, k, v in it; raw gates a and b [tokens, Hv] of its dtype;
    float32 A_log, dt_bias; a pool of one slot more than there are sequences, and their slots. A quarter of the heads
    next to does not decay."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hq, hv, lengths = row["hq"], row["hv"], row["seqlens"]
    tokens, count, keys = sum(lengths), len(lengths), row["hq"] * _DIM
    dtype = getattr(torch, row["dtype"])
    mixed, a, b = (normal(tokens, size).to(dtype) for size in (2 * keys + hv * _DIM, hv, hv))
    outer = (1, tokens) if row["mode"] == "prefill" else (count, tokens // count)
    A_log = torch.full((hv,), -2.8, device=device)  # 1 / 16
    A_log[torch.randperm(hv, generator=generator, device=device)[: hv // 4]] = -20.0
    x = {
        "mixed": mixed,
        "q": mixed[:, :keys].view(*outer, hq, _DIM),
        "k": mixed[:, keys : 2 * keys].view(*outer, hq, _DIM),
        "v": mixed[:, 2 * keys :].view(*outer, hv, _DIM),
        "a": a.view(*outer, hv),
        "b": b.view(*outer, hv),
        "A_log": A_log,
        "dt_bias": normal(hv) / 8,
        "h0": normal(count + 1, hv, _DIM, _DIM).to(getattr(torch, row["state_dtype"])),
        # Slot 0 is nobody's: some engines keep it for rows without a sequence.
        "slots": (torch.randperm(count, generator=generator, device=device) + 1).to(torch.int32),
        "cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32),
    }
    if row["option"] == "tree":
        x["parents"] = torch.tensor([PARENTS] * count, dtype=torch.int32, device=device)
    return x
