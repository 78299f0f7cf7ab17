"""The tokens before a rank's parts, for causal convolutions: one gather of the last tokens of every part, and of their
gradients on the way back."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .cut import places_of
from .exchange import Ranks, gather, ranks_of

_OPERATION = "conv_halo"


class _Parts(NamedTuple):
    """Where a rank's parts lie among all."""

    ranks: Optional[Ranks]  # None: one card
    lengths: List[int]  # tokens of all parts, in the stream's order
    places: Tuple[int, ...]  # of this rank's parts
    layout: str
    dense: bool  # parts are batch rows, all of the same length
    before: Optional[Tensor]  # [P] tokens of the entering sequence before each part; None: all of the stream's

    @property
    def own(self) -> List[int]:
        """Tokens of this rank's parts."""
        return [self.lengths[place] for place in self.places]


def _parts_of(context: Any, x: Tensor) -> _Parts:
    cut = getattr(context, "cut", None)
    if cut is not None:
        cut = cut.to(x.device)
        lengths = [end - begin for begin, end in cut.bounds]
        layout = "contiguous" if len(cut.places) == 1 else "zigzag"
        found = _Parts(cut.ranks, lengths, cut.places, layout, False, cut.halo_tokens)
    else:
        group, ranks = getattr(context, "group", None), getattr(context, "ranks", None)
        if ranks is None and group is not None:
            ranks = ranks_of(group)
        dense = getattr(context, "cu_seqlens", None) is None
        found = _foreign_parts(context, x, ranks, dense)
    if x.dim() != 3:
        raise ValueError(f"{_OPERATION}: x.ndim ({x.dim()}) must be 3: [1, T, D], or [B, T, D] without cu_seqlens")
    if x.shape[1] != sum(found.own):
        own = sum(found.own)
        raise ValueError(
            f"{_OPERATION}: x.shape[1] ({x.shape[1]}) must be the tokens that the context gives this rank ({own})"
        )
    if not found.dense and x.shape[0] != 1:
        raise ValueError(f"{_OPERATION}: x.shape[0] ({x.shape[0]}) must be 1 with the cu_seqlens of the context")
    return found


def _foreign_parts(context: Any, x: Tensor, ranks: Optional[Ranks], dense: bool) -> _Parts:
    """Of a context without a cut of ours: batch rows, one card, or another package's equal shares."""
    if ranks is None or ranks.size < 2:
        return _Parts(None, [x.shape[1]], (0,), "contiguous", dense, x.new_zeros(1, dtype=torch.int64))
    if dense:
        lengths = getattr(context, "rank_tokens", None) or [x.shape[1]] * ranks.size
        return _Parts(ranks, lengths, (ranks.rank,), "contiguous", True, None)
    layout = getattr(context, "layout", "contiguous")
    if layout == "zigzag":
        before, count = context.pre_num_conv_tokens_by_part, 2 * ranks.size
    else:
        before, count = (context.pre_num_conv_tokens,), ranks.size
    lengths = [x.shape[1] // len(before)] * count
    halo = torch.tensor([tokens or 0 for tokens in before], device=x.device)
    return _Parts(ranks, lengths, places_of(ranks.rank, ranks.size, layout), layout, False, halo)


def _sources(parts: _Parts, place: int, halo: int) -> List[int]:
    """Where each token of a part's halo stands among the gathered rows [ranks, parts of one, halo], -1 before the
    stream."""
    assert parts.ranks is not None
    count = 1 if parts.layout == "contiguous" else 2
    rows: List[int] = []  # from the part leftwards
    for left in range(place - 1, -1, -1):
        world = parts.ranks.size
        rank, part = (left, 0) if left < world else (2 * world - 1 - left, 1)
        for i in range(min(parts.lengths[left], halo - len(rows))):
            rows.append((rank * count + part) * halo + halo - 1 - i)
    return [-1] * (halo - len(rows)) + rows[::-1]


def _tails(x: Tensor, lengths: List[int], halo: int) -> Tensor:
    """The last tokens of each run of x [B, T, D] with these lengths, [B, runs, halo, D]. Shorter ones follow zeros."""
    found, end = [], 0
    for length in lengths:
        end += length
        count = min(length, halo)
        tail = x[:, end - count : end]
        found.append(torch.nn.functional.pad(tail, (0, 0, halo - count, 0)))
    return torch.stack(found, 1)


class _Gather(torch.autograd.Function):
    """halo [B, P, halo, D] from x; gradients are gathered likewise and added in the order of the stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parts: _Parts, halo: int, valid: Tensor) -> Tensor:
        tails = _tails(x, parts.own, halo).contiguous()
        everybody = gather(_OPERATION, "last tokens", parts.ranks, tails)  # type: ignore[arg-type]
        rows = everybody.transpose(0, 1).flatten(1, 3)  # [B, ranks * parts * halo, D]
        index = [row for place in parts.places for row in _sources(parts, place, halo)]
        found = rows[:, torch.tensor([max(row, 0) for row in index], device=x.device)]
        ctx.parts, ctx.halo, ctx.shape = parts, halo, x.shape
        ctx.save_for_backward(valid)
        return torch.where(valid[..., None], found.unflatten(1, (len(parts.places), halo)), 0)

    @staticmethod
    def backward(ctx: Any, d_halo: Tensor) -> Tuple[Optional[Tensor], ...]:
        parts, halo = ctx.parts, ctx.halo
        (valid,) = ctx.saved_tensors
        d_halo = torch.where(valid[..., None], d_halo, 0).contiguous()
        everybody = gather(_OPERATION, "gradients of last tokens", parts.ranks, d_halo)
        rows = everybody.transpose(0, 1).flatten(1, 3).to(torch.promote_types(d_halo.dtype, torch.float32))
        dx = rows.new_zeros(ctx.shape)
        for targets, sources in _rounds(parts, halo):
            dx[:, torch.tensor(targets, device=dx.device)] += rows[:, torch.tensor(sources, device=dx.device)]
        return dx.to(d_halo.dtype), None, None, None


def _rounds(parts: _Parts, halo: int) -> List[Tuple[List[int], List[int]]]:
    """This rank's tokens that are in a halo, and the gathered rows with their gradients. A token that several short
    parts have in theirs comes in several rounds, in the stream's order."""
    assert parts.ranks is not None
    count, world = 1 if parts.layout == "contiguous" else 2, parts.ranks.size
    end, token_of = 0, {}  # gathered row of one of this rank's last tokens -> token in x
    for part, length in enumerate(parts.own):
        end += length
        for i in range(min(length, halo)):
            token_of[(parts.ranks.rank * count + part) * halo + halo - 1 - i] = end - 1 - i
    rounds: List[Tuple[List[int], List[int]]] = []
    seen: dict = {}
    for place in range(len(parts.lengths)):
        rank, part = (place, 0) if place < world else (2 * world - 1 - place, 1)
        for i, source in enumerate(_sources(parts, place, halo)):
            token = token_of.get(source)
            if token is None:
                continue
            turn = seen.get(token, 0)
            seen[token] = turn + 1
            if turn == len(rounds):
                rounds.append(([], []))
            rounds[turn][0].append(token)
            rounds[turn][1].append((rank * count + part) * halo + i)
    return rounds


def _width(context: Any, width: Optional[int]) -> int:
    found = getattr(context, "conv1d_kernel_size", None) if width is None else width
    if found is None or int(found) < 1:
        raise ValueError(
            f"{_OPERATION}: width ({found}) must be the taps of the convolution, 1 or more, here or as the context's "
            "conv1d_kernel_size"
        )
    return int(found)


def conv_halo(x: Tensor, context: Any, width: Optional[int] = None) -> Tensor:
    """See flash_qla.distributed.conv_halo()."""
    parts, halo = _parts_of(context, x), _width(context, width) - 1
    P = x.shape[0] if parts.dense else len(parts.places)
    if parts.ranks is None or halo == 0:
        return x.new_zeros((P, halo, x.shape[2])) + 0 * x[:, :0].sum()  # the graph of x, so that backward passes match
    distance = torch.arange(halo, 0, -1, device=x.device)  # from each token of the halo to the part
    before = parts.before
    if before is None:
        before = torch.full((1,), sum(parts.lengths[: parts.places[0]]), dtype=torch.int64, device=x.device)
    valid = (distance <= before[:, None]).expand(x.shape[0], len(parts.places), halo)
    found: Tensor = _Gather.apply(x, parts, halo, valid)
    return found.squeeze(1) if parts.dense else found.squeeze(0)


def with_halo(x: Tensor, context: Any, width: Optional[int] = None) -> Tuple[Tensor, Optional[Tensor]]:
    """See flash_qla.distributed.with_halo()."""
    parts, halo = _parts_of(context, x), _width(context, width) - 1
    found = conv_halo(x, context, width)
    if parts.dense:
        return torch.cat((found, x), 1), None
    pieces: List[Tensor] = []
    for part, tokens in zip(found, x[0].split(parts.own)):
        pieces += [part, tokens]
    return torch.cat(pieces).unsqueeze(0), _offsets(context, x, len(parts.places), halo)


def _offsets(context: Any, x: Tensor, P: int, halo: int) -> Tensor:
    """Offsets with each part's halo in front of its first token: it belongs to that token's sequence. That of a part
    without tokens belongs to the next one, in whose reach it is not."""
    cut = getattr(context, "cut", None)
    if cut is None:
        offsets = context.cu_seqlens
        borders = [0, offsets.shape[0] - 1] if P == 1 else [0, context.front_num_seqs, offsets.shape[0] - 1]
        first = torch.tensor(borders[:-1], device=offsets.device)
    else:
        cut = cut.to(x.device)
        offsets, first = cut.local_cu_seqlens, cut.parts.rows[:, 0]
    R = offsets.shape[0] - 1
    first = torch.where(first < 0, R, first)
    if P == 2:
        first = torch.stack((torch.minimum(first[0], first[1]), first[1]))
    rows = torch.arange(R + 1, device=offsets.device)
    shifts = (first[:, None] < rows).sum(0) * halo
    return offsets + shifts.to(offsets.dtype)


def without_halo(y: Tensor, context: Any, width: Optional[int] = None) -> Tensor:
    """See flash_qla.distributed.without_halo()."""
    halo = _width(context, width) - 1
    cut = getattr(context, "cut", None)
    if cut is not None:
        lengths = cut.part_tokens
    else:
        P = 2 if getattr(context, "layout", "contiguous") == "zigzag" else 1
        lengths = [(y.shape[1] - P * halo) // P] * P
    pieces, end = [], 0
    for length in lengths:
        end += halo + length
        pieces.append(y[:, end - length : end])
    return torch.cat(pieces, 1)
