"""Rows and inputs of the GPU bench. This file needs torch alone: bench_peers.py uses it in another process."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F

if __package__:
    from .bench_serving_inputs import SERVING_LENGTHS, make_serving_inputs, serving_rows
else:  # run by a script, without this package
    from bench_serving_inputs import SERVING_LENGTHS, make_serving_inputs, serving_rows  # type: ignore[no-redef]

HEAD_DIM = 128

# One quarter of the heads (rounded down) does not decay at all; the others forget slowly. Published tables use this
# mix.
_DECAYING_HEADS = 0.75
_DECAY_DIVISOR = 16

Heads = Tuple[int, int]

FORWARD_HEADS: List[Heads] = [(2, 8), (4, 16), (8, 32), (16, 64), (16, 32), (8, 24), (16, 48), (16, 16), (32, 32)]
BACKWARD_HEADS: List[Heads] = [(16, 32), (8, 16), (4, 8), (2, 4)]
DECODE_HEADS: List[Heads] = [(16, 32)]


def _forward_lengths() -> Dict[str, List[int]]:
    singles = {f"1x{n}": [n] for n in (32768, 16384, 8192, 4096, 2048)}
    pairs = ((28672, 4096), (16384, 16384), (4096, 28672), (12288, 4096), (4096, 4096), (1024, 7168))
    equal = ((8192, 4), (4096, 8), (2048, 4), (1024, 8))
    return {**singles, **{f"{a}+{b}": [a, b] for a, b in pairs}, **{f"{n}x{count}": [n] * count for n, count in equal}}


def _cut(count: int, total: int) -> List[int]:
    """`total` tokens in `count` sequences, cut at places drawn once and for all."""
    if count == 1:
        return [total]
    generator = torch.Generator().manual_seed(42)
    places = torch.randperm(total - 1, dtype=torch.int32, generator=generator)[: count - 1] + 1
    edges = [0, *sorted(places.tolist()), total]
    return [end - begin for begin, end in zip(edges, edges[1:])]


FORWARD_LENGTHS: Dict[str, List[int]] = _forward_lengths()
BACKWARD_LENGTHS: Dict[str, List[int]] = {
    f"{total // 1024}k_{n}seq": _cut(n, total) for total in (8192, 32768) for n in (1, 2, 4, 8)
}
# Decode: so many sequences of one token each.
DECODE_LENGTHS: Dict[str, List[int]] = {f"batch{n}": [1] * n for n in (1, 16, 256)}

# A few rows of each mode that show what it is about: a full card, few heads, one long sequence, short ones, sizes that
# do not divide evenly. For runs that have minutes, not an hour.
SHORT: Dict[str, List[Tuple[Heads, str]]] = {
    "fwd": [
        *(((16, 64), name) for name in ("8192x4", "4096x8", "2048x4", "1024x8", "1x32768", "1x8192", "28672+4096")),
        *(((8, 32), name) for name in ("8192x4", "4096x8", "2048x4", "1024x8", "1x32768", "1x8192", "1x2048")),
        *(((2, 8), name) for name in ("1024x8", "1x32768", "1x8192", "1x2048")),
        *(((4, 16), name) for name in ("1024x8", "1x32768", "1x8192")),
        *(((16, 48), name) for name in ("4096x8", "8192x4", "1x32768")),
        *(((8, 24), name) for name in ("2048x4", "1x32768")),
        ((16, 16), "8192x4"),
    ],
    "bwd": [
        *(((16, 32), name) for name in ("8k_1seq", "8k_4seq", "8k_8seq", "32k_1seq", "32k_8seq")),
        *(((8, 16), name) for name in ("8k_1seq", "32k_1seq")),
        *(((2, 4), name) for name in ("8k_1seq", "32k_1seq")),
        ((4, 8), "32k_1seq"),
    ],
    "train": [((16, 32), "8k_1seq"), ((16, 32), "8k_4seq"), ((16, 32), "32k_1seq"), ((2, 4), "32k_1seq")],
    "decode": [((16, 32), name) for name in ("batch1", "batch16", "batch256")],
}

# Of the gates: "mixed" as above; "none": no head decays, so that nothing can be left out where a sequence is cut;
# "strong": every head forgets within a few tokens; "changing": as "mixed", but no head decays in the first half of the
# tokens.
GATES = ("mixed", "none", "strong", "changing")
_STRONG_DECAY = 16

# Rows with other gates than the mixed ones, measured where no gates are asked for: the ends between which a sequence
# split works.
GATED: Dict[str, List[Tuple[Heads, str, str]]] = {
    "fwd": [(heads, "1x32768", gates) for heads in ((2, 8), (8, 32)) for gates in ("none", "strong")],
}

# Where other packages are compared that compile their kernels for each head count, half a minute to minutes each: the
# short rows, other gates where a split or a plan may choose otherwise for them, and the rows in which the fastest of
# their recorded times were nearest to ours.
PEER_ROWS: Dict[str, List[Tuple[Heads, str, str]]] = {
    mode: [(heads, name, "mixed") for heads, name in rows] for mode, rows in SHORT.items()
}
PEER_ROWS["fwd"] += [((16, 64), "1024x8", "none"), ((16, 64), "1024x8", "strong"), *GATED["fwd"]]
PEER_ROWS["fwd"] += [(heads, "1024+7168", "mixed") for heads in ((4, 16), (16, 16))]
PEER_ROWS["fwd"] += [((16, 32), "8192x4", "mixed"), ((32, 32), "8192x4", "mixed"), ((16, 16), "4096x8", "mixed")]
PEER_ROWS["bwd"] += [((16, 32), "8k_1seq", "none"), ((16, 32), "8k_1seq", "strong")]

# Calls that are planned as if a split were worth it where no head decays, and are slower for it.
GATED["fwd"] += [((4, 16), "1x4096", "none"), ((8, 24), "1x8192", "none"), ((8, 32), "1x8192", "none")]
GATED["fwd"] += [((2, 8), "4096+4096", "none")]

# Forwards that do more than the plain call, one row for each thing (bench_options.py): heads, lengths, gates, option.
OPTIONS: List[Tuple[Heads, str, str, str]] = [
    ((16, 64), "8192x4", "mixed", "A, dense"),
    ((16, 32), "8192x4", "mixed", "A, packed"),
    ((16, 64), "4096x8", "mixed", "h"),
    ((8, 32), "4096x8", "mixed", "checkpoints"),
    ((2, 8), "1x32768", "mixed", "listed token"),
    ((8, 32), "1x32768", "mixed", "pool"),
    ((16, 64), "2048x4", "mixed", "pool"),
    ((16, 64), "8192x4", "mixed", "float16"),
    ((8, 32), "1x8192", "mixed", "bfloat16 states"),
    ((2, 8), "1x32768", "changing", "kinds of heads"),
]

# Heads and head dimensions of the path for every GPU since Ampere, which is named: one long sequence, and four.
PORTABLE_PATH = "sm80"
PORTABLE: List[Tuple[Heads, int, int]] = [
    ((16, 32), 128, 128),
    ((8, 8), 64, 64),
    ((8, 16), 64, 128),
    ((8, 8), 96, 96),
    ((30, 30), 96, 192),
    ((8, 8), 128, 256),
    ((8, 8), 256, 256),
]
PORTABLE_LENGTHS: Dict[str, List[int]] = {"1x8192": [8192], "2048x4": [2048] * 4}

# What rows of a mode call, where that is not the mode's name.
_KINDS = {"portable_forward": "fwd", "portable_backward": "bwd"}


def kind_of(row: Dict[str, Any]) -> str:
    return _KINDS.get(row["mode"], row["mode"])


def head_dims(row: Dict[str, Any]) -> Tuple[int, int]:
    """K and V."""
    return row.get("K", HEAD_DIM), row.get("V", HEAD_DIM)


def _portable_rows(mode: str, heads: str, lengths: str, choice: str, gates: str) -> List[Dict[str, Any]]:
    names = lengths.split(",") if lengths else list(PORTABLE_LENGTHS)[: 1 if choice == "short" else None]
    extra = {"option": "", "state_dtype": "float32", "state_v_first": False, "path": PORTABLE_PATH}
    return [
        _row(mode, (h, name, kind), PORTABLE_LENGTHS, {**extra, "K": K, "V": V})
        for h, K, V in PORTABLE
        if not heads or f"{h[0]}x{h[1]}" in heads.split(",")
        for name in names
        if name in PORTABLE_LENGTHS
        for kind in (gates.split(",") if gates else ["mixed"])
    ]


def rows_of(mode: str, heads: str, lengths: str, choice: str = "all", gates: str = "") -> List[Dict[str, Any]]:
    """Rows of a mode, those chosen by the comma-separated `heads` ("16x64"), `lengths` (names) and `gates` (of GATES);
    empty: all, with mixed gates and beside them those of GATED. `choice`: "all", or those of them in SHORT ("short") or
    PEER_ROWS ("peers")."""
    if mode in _KINDS:
        return _portable_rows(mode, heads, lengths, choice, gates)
    if mode in SERVING_LENGTHS:
        if gates not in ("", "mixed") or choice == "peers":
            return []
        pairs = [_pair(h) for h in heads.split(",")] if heads else None
        return serving_rows(mode, pairs, lengths.split(",") if lengths else None, choice == "short")
    all_heads, all_lengths = {
        "fwd": (FORWARD_HEADS, FORWARD_LENGTHS),
        "bwd": (BACKWARD_HEADS, BACKWARD_LENGTHS),
        "train": (BACKWARD_HEADS, BACKWARD_LENGTHS),
        "decode": (DECODE_HEADS, DECODE_LENGTHS),
        "options": (FORWARD_HEADS, FORWARD_LENGTHS),
    }[mode]
    chosen = all_heads
    if heads:
        chosen = [_pair(h) for h in heads.split(",")]
    names = lengths.split(",") if lengths else list(all_lengths)
    kinds = gates.split(",") if gates else ["mixed"]

    def within(rows: List[Tuple[Heads, str, str]]) -> List[Tuple[Heads, str, str]]:
        return [(h, n, kind) for h, n, kind in rows if h in chosen and n in names and (not gates or kind in kinds)]

    # What a row has beside heads, lengths and gates.
    extras: List[Dict[str, Any]] = [{"option": "", "state_dtype": "float32", "state_v_first": False}]
    if mode == "decode":  # it moves little but the states: their dtype and layout count there
        extras = [
            {"option": "", "state_dtype": dtype, "state_v_first": v_first}
            for dtype, v_first in itertools.product(("float32", "bfloat16"), (True, False))
        ]
    if mode == "options":
        return [
            _row(mode, (h, n, kind), all_lengths, {**extras[0], "option": option, **_DTYPES.get(option, {})})
            for h, n, kind, option in OPTIONS
            if within([(h, n, kind)])
        ]
    if choice == "peers":
        wanted = within(PEER_ROWS[mode])
    else:
        wanted = [(h, n, kind) for h in chosen for n in names if n in all_lengths for kind in kinds]
        if choice == "short":
            wanted = [row for row in wanted if row[:2] in SHORT[mode]]
        elif not gates:
            wanted += within(GATED.get(mode, []))
    return [_row(mode, given, all_lengths, extra) for given in wanted for extra in extras]


def _pair(heads: str) -> Heads:
    hq, _, hv = heads.partition("x")
    return int(hq), int(hv)


# Options that are a dtype.
_DTYPES: Dict[str, Dict[str, str]] = {"float16": {"dtype": "float16"}, "bfloat16 states": {"state_dtype": "bfloat16"}}


def _row(mode: str, given: Sequence[Any], all_lengths: Dict[str, List[int]], extra: Dict[str, Any]) -> Dict[str, Any]:
    (hq, hv), name, gates = given
    return {
        "mode": mode,
        "short": ((hq, hv), name) in SHORT.get(mode, []) and gates == "mixed",
        "gates": gates,
        "hq": hq,
        "hv": hv,
        "name": name,
        "seqlens": all_lengths[name],
        "dtype": "bfloat16",
        **extra,
    }


def recorded_times(path: Path) -> Dict[Tuple[str, int, int, str], Dict[str, float]]:
    """Times of other packages that were measured earlier, by (mode, hq, hv, name of the lengths): a CSV with these four
    columns (mode, hq, hv, seqs) and one "<peer> ms" for each peer, empty where there is no time."""
    with path.open(newline="") as file:
        return {
            (row["mode"], int(row["hq"]), int(row["hv"]), row["seqs"]): {
                column[: -len(" ms")]: float(value) for column, value in row.items() if column.endswith(" ms") and value
            }
            for row in csv.DictReader(file)
        }


def draw_still(hv: int, generator: torch.Generator) -> torch.Tensor:
    """The value heads that do not decay under mixed gates."""
    return torch.randperm(hv, generator=generator, device=generator.device)[: hv - math.ceil(_DECAYING_HEADS * hv)]


def make_inputs(
    row: Dict[str, Any], seed: int = 0, device: str = "cuda", still: Optional[torch.Tensor] = None
) -> Dict[str, torch.Tensor]:
    """Tensors of a row, by default on the current GPU: q, k (normalised), v of its dtype; float32 g, beta; states of
    its state_dtype. Of a serving mode: make_serving_inputs(). `still`: the heads that do not decay; None: they are
    drawn, too."""
    if row["mode"] in SERVING_LENGTHS:
        return make_serving_inputs(row, seed, device)
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hq, hv, lengths = row["hq"], row["hv"], row["seqlens"]
    K, V = head_dims(row)
    tokens, count = sum(lengths), len(lengths)
    outer = (count, 1) if row["mode"] == "decode" else (1, tokens)
    g = F.logsigmoid(normal(*outer, hv))
    if still is None:
        still = draw_still(hv, generator)
    if row["gates"] == "strong":
        g *= _STRONG_DECAY
    else:
        g /= _DECAY_DIVISOR
        g[..., slice(None) if row["gates"] == "none" else still] = 0.0
    if row["gates"] == "changing":
        g[:, : tokens // 2] = 0.0
    edges = torch.tensor([0, *lengths], device=device).cumsum(0)
    dtype = getattr(torch, row["dtype"])
    return {
        "q": F.normalize(normal(*outer, hq, K), dim=-1).to(dtype),
        "k": F.normalize(normal(*outer, hq, K), dim=-1).to(dtype),
        "v": normal(*outer, hv, V).to(dtype),
        "g": g,
        "beta": normal(*outer, hv).sigmoid(),
        # [N, Hv, K, V] or [N, Hv, V, K]: where layouts differ K = V, so that one draw serves both.
        "h0": normal(count, hv, K, V).to(getattr(torch, row["state_dtype"])),
        "do": normal(*outer, hv, V).to(dtype),
        "dht": normal(count, hv, K, V) / 8,
        "cu_seqlens": edges.to(torch.int32),
    }
