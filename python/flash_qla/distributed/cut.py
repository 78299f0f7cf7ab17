"""How one stream of tokens is cut over ranks: the parts of all ranks, and what this rank has to know of its own."""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any, Callable, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .. import _torch_links
from .exchange import Ranks

Bounds = Tuple[int, int]


class Parts(NamedTuple):
    """What the operations read of this rank's parts, on the device of the call (flash_qla/sequence_cut.h)."""

    rows: Tensor  # [P, 2] index
    enters: Tensor  # [P] bool
    leaves: Tensor  # [P] bool
    through: Tensor  # [P] bool
    entering_rows: Tensor  # [P] index
    leaving_rows: Tensor  # [P] index
    starts_here: Tensor  # [R] bool
    ends_here: Tensor  # [R] bool
    order: Optional[Tensor]  # [L] index: row of the gathered links with the stream's i-th part
    place: Tensor  # [P] index; one of them where parts are batch rows


def _each(parts: Parts, function: Callable[[Tensor], Tensor]) -> Parts:
    return Parts(*(None if t is None else function(t) for t in parts))  # type: ignore[arg-type]


# Those of a StreamCut beside its parts.
_TENSORS = ("own_bounds", "cu_seqlens", "local_cu_seqlens", "sequences", "halo_tokens", "row_counts")


@dataclasses.dataclass
class StreamCut:
    """A stream of packed sequences over ranks. What is on a device is written in place by refresh()."""

    ranks: Ranks
    bounds: List[Bounds]  # of all parts, in the stream's order
    places: Tuple[int, ...]  # this rank's parts among them
    all_rows: bool
    exchange: str
    crosses: bool  # some sequence crosses a cut, as far as the host knows: always with all_rows
    own_bounds: Tensor  # [P, 2] those of this rank's parts, on the device
    cu_seqlens: Tensor  # [N + 1] of the whole stream, on the device
    local_cu_seqlens: Tensor  # [R + 1]
    sequences: Tensor  # [R] number of each row in the whole stream
    halo_tokens: Tensor  # [P]
    parts: Parts
    row_counts: Tensor  # [P] rows of each part
    part_rows: List[int]  # the same on the host
    # Without all_rows the host knows the cut as well: local_cu_seqlens, and of each part entering_rows, leaving_rows.
    local_offsets: Optional[List[int]] = None
    entering_rows: Tuple[int, ...] = ()
    leaving_rows: Tuple[int, ...] = ()

    @property
    def part_tokens(self) -> List[int]:
        """Tokens of each of this rank's parts, those after the last sequence included."""
        return [self.bounds[place][1] - self.bounds[place][0] for place in self.places]

    def refresh(self, cu_seqlens: Tensor) -> None:
        """Writes the cut of other offsets in place."""
        self.cu_seqlens.copy_(cu_seqlens)
        _run_cut(self)

    def to(self, device: torch.device) -> StreamCut:
        """The same with its tensors on another device."""
        if self.parts.rows.device == device:
            return self
        moved = {
            name: getattr(self, name).to(device)
            for name in _TENSORS
        }
        return dataclasses.replace(self, parts=_each(self.parts, lambda t: t.to(device)), **moved)

    def clone(self) -> StreamCut:
        """The same with tensors of its own."""
        copied = {
            name: getattr(self, name).clone() for name in _TENSORS
        }
        return dataclasses.replace(self, parts=_each(self.parts, Tensor.clone), **copied)


def _outputs(cut: StreamCut) -> tuple:
    """What sequence_cut writes, as its C structure lists it."""
    parts = cut.parts
    return (
        *(cut.local_cu_seqlens, cut.sequences, parts.starts_here, parts.ends_here, cut.row_counts),
        *(parts.rows, parts.enters, parts.leaves, parts.through, parts.entering_rows, parts.leaving_rows),
        cut.halo_tokens,
    )


def _run_cut(cut: StreamCut) -> None:
    last = len(cut.bounds) - 1
    last_part = cut.places.index(last) if last in cut.places else -1
    _torch_links.sequence_cut(cut.cu_seqlens, cut.own_bounds, last_part, cut.all_rows, _outputs(cut))


def zigzag_order(world: int, device: torch.device) -> Tensor:
    """Row of the gathered links with the stream's i-th part. They lie rank by rank, a rank's front part first."""
    return torch.tensor([2 * i if i < world else 2 * (2 * world - 1 - i) + 1 for i in range(2 * world)], device=device)


def places_of(rank: int, world: int, layout: str) -> Tuple[int, ...]:
    """Which of the stream's parts a rank holds: its own, or with "zigzag" one from either end."""
    return (rank,) if layout == "contiguous" else (rank, 2 * world - 1 - rank)


def stream_bounds(
    operation: str, total: int, world: int, layout: str, rank_tokens: Optional[Sequence[Any]]
) -> List[Bounds]:
    """First token of each part and the one after its last, in the stream's order."""
    count = world if layout == "contiguous" else 2 * world
    if rank_tokens is None:
        divisor = "`world_size`" if layout == "contiguous" else "`2 * world_size`"
        # The words are FLA's, which its callers look for.
        if total < count:
            rule = f"must be at least {divisor} ({count}) for context parallelism"
        elif total % count:
            rule = f"must be divisible by {divisor} ({count}) for context parallelism"
        else:
            return [(total // count * i, total // count * (i + 1)) for i in range(count)]
        raise ValueError(f"{operation}: `total_tokens` ({total}) {rule}; or give rank_tokens")
    lengths = _part_lengths(operation, world, layout, rank_tokens)
    if sum(lengths) < total:
        raise ValueError(
            f"{operation}: the sum of rank_tokens ({sum(lengths)}) must be at least the last of cu_seqlens ({total})"
        )
    ends = [sum(lengths[: i + 1]) for i in range(count)]
    return list(zip([0, *ends], ends))


def _part_lengths(operation: str, world: int, layout: str, rank_tokens: Sequence[Any]) -> List[int]:
    if len(rank_tokens) != world:
        given = f"the length of rank_tokens ({len(rank_tokens)})"
        raise ValueError(f"{operation}: {given} must be the number of ranks ({world})")
    pairs = []
    for rank, given in enumerate(rank_tokens):
        if layout == "zigzag" and isinstance(given, (tuple, list)):
            pair = [int(x) for x in given]
        else:
            tokens = int(given)
            pair = [tokens] if layout == "contiguous" else [tokens - tokens // 2, tokens // 2]
        if len(pair) != (1 if layout == "contiguous" else 2) or min(pair) < 0:
            what = "a number of tokens from 0 on" + ("" if layout == "contiguous" else ", or a pair of them")
            raise ValueError(f"{operation}: rank_tokens[{rank}] ({given}) must be {what}")
        pairs.append(pair)
    if layout == "contiguous":
        return [pair[0] for pair in pairs]
    return [pair[0] for pair in pairs] + [pair[1] for pair in reversed(pairs)]


def _crosses(offsets: List[int], bounds: List[Bounds]) -> bool:
    """Whether a border of parts lies inside of a sequence."""
    for begin, _ in bounds:
        n = bisect.bisect_left(offsets, begin)
        if 0 < n < len(offsets) and offsets[n] > begin:
            return True
    return False


def cut_stream(
    cu_seqlens: Tensor,
    offsets: Optional[List[int]],
    ranks: Ranks,
    layout: str,
    bounds: List[Bounds],
    all_rows: bool,
    exchange: str,
) -> StreamCut:
    """The cut of a stream. `offsets`: cu_seqlens on the host, or None with all_rows."""
    places = places_of(ranks.rank, ranks.size, layout)
    device = cu_seqlens.device
    # Without all_rows the number of rows depends on the offsets: they are counted on the host.
    home = device if all_rows else torch.device("cpu")
    N, P = cu_seqlens.shape[0] - 1, len(places)
    R = P * N if all_rows else N + P

    def index(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int64, device=home)

    def flag(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool, device=home)

    def given(values: Sequence[Any]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=home)

    local_dtype = torch.int64 if bounds[-1][1] > 2**31 - 1 else torch.int32
    order = zigzag_order(ranks.size, home) if layout == "zigzag" else None
    parts = Parts(
        rows=index(P, 2),
        enters=flag(P),
        leaves=flag(P),
        through=flag(P),
        entering_rows=index(P),
        leaving_rows=index(P),
        starts_here=flag(R),
        ends_here=flag(R),
        order=order,
        place=given(places),
    )
    cut = StreamCut(
        ranks=ranks,
        bounds=bounds,
        places=places,
        all_rows=all_rows,
        exchange=exchange,
        crosses=True if offsets is None or all_rows else _crosses(offsets, bounds),
        own_bounds=given([bounds[place] for place in places]),
        cu_seqlens=cu_seqlens.to(torch.int64, copy=True) if all_rows or offsets is None else given(offsets),
        local_cu_seqlens=torch.empty(R + 1, dtype=local_dtype, device=home),
        sequences=index(R),
        halo_tokens=index(P),
        row_counts=index(P),
        parts=parts,
        part_rows=[N] * P,
    )
    _run_cut(cut)
    if all_rows:
        return cut
    cut.part_rows = cut.row_counts.tolist()
    count = sum(cut.part_rows)
    cut.sequences = cut.sequences[:count]
    cut.local_cu_seqlens = cut.local_cu_seqlens[: count + 1]
    cut.parts = parts._replace(starts_here=parts.starts_here[:count], ends_here=parts.ends_here[:count])
    cut.local_offsets = cut.local_cu_seqlens.tolist()
    cut.entering_rows, cut.leaving_rows = tuple(parts.entering_rows.tolist()), tuple(parts.leaving_rows.tolist())
    return cut.to(device)
