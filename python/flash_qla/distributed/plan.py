"""What one call with a context knows of its cut: from contexts of this package, and from those of FLA and FlashQLA by
their fields."""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Tuple

import torch
from torch import Tensor

from .cut import Parts, StreamCut, zigzag_order
from .exchange import Ranks


class Plan(NamedTuple):
    ranks: Ranks
    parts: Parts
    cu_seqlens: Optional[Tensor]  # this rank's offsets; None: rows of the batch, each of which crosses the ranks
    exchanges: bool  # some sequence crosses a cut, as far as the host knows
    serial: bool  # states are handed from rank to rank
    cut: Optional[StreamCut]  # of contexts of this package with cu_seqlens


def plan_of(operation: str, context: Any, q: Tensor, ranks: Ranks) -> Plan:
    """The plan of a call on q with a context of several ranks.

    Raises:
        ValueError: q has not the tokens that this rank holds, or a field is missing.
    """
    serial = getattr(context, "exchange", "gather") == "serial"
    cut = getattr(context, "cut", None)
    if cut is not None:
        cut = cut.to(q.device)
        _check_tokens(operation, q, sum(cut.part_tokens), packed=True)
        return Plan(cut.ranks, cut.parts, cut.local_cu_seqlens, cut.crosses, serial, cut)
    if getattr(context, "cu_seqlens", None) is None:
        lengths = getattr(context, "rank_tokens", None) or [q.shape[1]] * ranks.size
        _check_tokens(operation, q, lengths[ranks.rank], packed=False)
        parts, exchanges = _batch_rows(ranks, lengths, q)
        return Plan(ranks, parts, None, exchanges, serial, None)
    return Plan(ranks, _foreign_parts(operation, context, q, ranks), context.cu_seqlens, True, serial, None)


def _check_tokens(operation: str, q: Tensor, tokens: int, packed: bool) -> None:
    if q.dim() != 4:
        return  # refused where the shapes are looked at
    if packed and q.shape[0] != 1:
        raise ValueError(f"{operation}: q.shape[0] ({q.shape[0]}) must be 1 with the cu_seqlens of cp_context")
    if q.shape[1] != tokens:
        raise ValueError(
            f"{operation}: q.shape[1] ({q.shape[1]}) must be the tokens that cp_context gives this rank ({tokens})"
        )


def _batch_rows(ranks: Ranks, lengths: List[int], q: Tensor) -> Tuple[Parts, bool]:
    """Rows of a batch, all cut alike: a part each. And whether more than one rank has tokens."""
    B = q.shape[0]
    begin, mine, total = sum(lengths[: ranks.rank]), lengths[ranks.rank], sum(lengths)
    enters, leaves = mine > 0 and begin > 0, mine > 0 and begin + mine < total
    # Empty sequences are the last rank's.
    here = mine > 0 if total > 0 else ranks.rank == ranks.size - 1
    numbers = torch.arange(B, device=q.device)
    nobody = torch.full_like(numbers, -1)

    def flag(value: bool) -> Tensor:
        return torch.full((B,), value, dtype=torch.bool, device=q.device)

    rows = (numbers if mine > 0 else nobody)[:, None].expand(B, 2)
    parts = Parts(
        rows=rows,
        enters=flag(enters),
        leaves=flag(leaves),
        through=flag(enters and leaves),
        entering_rows=numbers if enters else nobody,
        leaving_rows=numbers if leaves else nobody,
        starts_here=flag(here and begin == 0),
        ends_here=flag(here and begin + mine == total),
        order=None,
        place=torch.full((1,), ranks.rank, dtype=torch.int64, device=q.device),
    )
    return parts, sum(length > 0 for length in lengths) > 1


def _foreign_parts(operation: str, context: Any, q: Tensor, ranks: Ranks) -> Parts:
    """Of a context of FLA or FlashQLA: its flags, and its counts on the device where it has them, which it may change
    between replays of a graph."""
    cu_seqlens = context.cu_seqlens
    zigzag = getattr(context, "layout", "contiguous") == "zigzag"
    count = 2 if zigzag else 1
    if zigzag:
        first, last = context.is_first_by_part, context.is_last_by_part
        borders = [0, context.front_num_seqs, cu_seqlens.shape[0] - 1]
    else:
        first, last = (context.is_first_rank,), (context.is_last_rank,)
        borders = [0, cu_seqlens.shape[0] - 1]
    before, after = (getattr(context, name, None) for name in ("pre_num_ranks_dev", "post_num_ranks_dev"))
    if before is None and after is None and any(flag is None for flag in (*first, *last)):
        raise ValueError(f"{operation}: cp_context.is_first_rank and is_last_rank ({first}, {last}) must be given")
    device = cu_seqlens.device
    enters = _flags(first, device) if before is None else before.reshape(count) > 0
    leaves = _flags(last, device) if after is None else after.reshape(count) > 0
    filled = cu_seqlens[1:] > cu_seqlens[:-1]
    numbers = torch.arange(filled.shape[0], device=device)
    ends = []
    for begin, end in zip(borders, borders[1:]):
        of_part = filled & (numbers >= begin) & (numbers < end)
        some = of_part.any()
        first_row = torch.where(of_part, numbers, numbers.new_full((), filled.shape[0])).amin()
        last_row = torch.where(of_part, numbers, numbers.new_full((), -1)).amax()
        ends.append(torch.stack((torch.where(some, first_row, -1), last_row)))
    rows = torch.stack(ends)
    enters, leaves = enters & (rows[:, 0] >= 0), leaves & (rows[:, 0] >= 0)
    entering_rows = torch.where(enters, rows[:, 0], -1)
    leaving_rows = torch.where(leaves, rows[:, 1], -1)
    own = torch.ones_like(filled)
    order = None
    places = [ranks.rank]
    if zigzag:
        order = zigzag_order(ranks.size, device)
        places.append(2 * ranks.size - 1 - ranks.rank)
    return Parts(
        rows=rows,
        enters=enters,
        leaves=leaves,
        through=enters & leaves & (rows[:, 0] == rows[:, 1]),
        entering_rows=entering_rows,
        leaving_rows=leaving_rows,
        starts_here=own & (numbers[:, None] != entering_rows).all(1),
        ends_here=own & (numbers[:, None] != leaving_rows).all(1),
        order=order,
        place=torch.tensor(places, device=device),
    )


def _flags(is_end: tuple, device: torch.device) -> Tensor:
    return torch.tensor([not flag for flag in is_end], dtype=torch.bool, device=device)

