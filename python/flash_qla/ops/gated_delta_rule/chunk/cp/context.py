"""Context parallelism: one long stream of tokens, cut over several cards (inter) or over one card's SMs (intra).

Contexts have the field names of FLA and FlashQLA. What is theirs is kept for their callers; a call of this package
reads `ranks`, `cut` and `rank_tokens` of its own contexts, and the public fields of others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple, TypeVar

_Context = TypeVar("_Context", bound="FLACPContext")

_LAYOUTS = ("contiguous", "zigzag")
_EXCHANGES = ("gather", "serial")


@dataclasses.dataclass
class FLACPContext:
    """What a call must know about the cut of its token stream over cards.

    Fields:
        group: torch.distributed process group over which the stream is cut, or None.
        cu_seqlens: [N + 1] int32 or int64, this rank's packed token offsets; replaces the call's own when given.
        cu_seqlens_cpu: the same on the host.
        is_first_rank, is_last_rank: whether this rank holds the beginning (end) of its first (last) sequence.
        pre_num_ranks, post_num_ranks: how many ranks before (after) hold parts of the first (last) sequence.
        conv1d_kernel_size: taps of a short convolution in front of the operation, or None.
        pre_num_conv_tokens: tokens of the first sequence before this rank's.
        pre_num_ranks_dev, post_num_ranks_dev: the counts on the device, where they change between replays of a graph.
        layout: "contiguous": a rank holds one part of the stream. "zigzag": two, and the fields that follow are set.
        part_len, front_num_seqs: tokens of a part; sequences of the first part.
        pre_num_ranks_by_part, post_num_ranks_by_part, is_first_by_part, is_last_by_part, pre_num_conv_tokens_by_part:
            as above, of either part.
    """

    group: Any = None
    cu_seqlens: Any = None
    cu_seqlens_cpu: Any = None
    is_last_rank: Optional[bool] = None
    pre_num_ranks: Optional[int] = None
    is_first_rank: Optional[bool] = None
    post_num_ranks: Optional[int] = None
    conv1d_kernel_size: Optional[int] = None
    pre_num_conv_tokens: Optional[int] = None
    pre_num_ranks_dev: Any = None
    post_num_ranks_dev: Any = None
    layout: str = "contiguous"
    part_len: Optional[int] = None
    front_num_seqs: Optional[int] = None
    pre_num_ranks_by_part: Optional[Tuple[int, int]] = None
    post_num_ranks_by_part: Optional[Tuple[int, int]] = None
    is_first_by_part: Optional[Tuple[bool, bool]] = None
    is_last_by_part: Optional[Tuple[bool, bool]] = None
    pre_num_conv_tokens_by_part: Optional[Tuple[int, int]] = None

    def copy_for_backward(self: _Context) -> _Context:
        """A copy with tensors of its own, for a backward pass that comes when this context has been refreshed."""
        copied = {
            name: value.clone()
            for name in ("cu_seqlens", "cu_seqlens_cpu", "pre_num_ranks_dev", "post_num_ranks_dev", "cut")
            if (value := getattr(self, name, None)) is not None and hasattr(value, "clone")
        }
        if "cut" in copied:
            copied["cu_seqlens"] = copied["cut"].local_cu_seqlens
        return dataclasses.replace(self, **copied)

    @property
    def num_seqs(self) -> int:
        """Sequences of this rank; 0 without cu_seqlens."""
        return 0 if self.cu_seqlens is None else int(self.cu_seqlens.shape[0]) - 1

    @property
    def is_cp_enabled(self) -> bool:
        """Whether the stream is cut over a group of ranks."""
        return self.group is not None


@dataclasses.dataclass
class FlashQLACPContext(FLACPContext):
    """FLACPContext with FlashQLA's fields, and what this package adds.

    Fields, beside those of FLACPContext:
        is_inter: the stream is cut over cards.
        is_intra: the stream may be cut over one card's SMs.
        force_intra_cp: cut it wherever that is possible.
        intra_cp_cu_seqlens, seq_map_r2c, seq_map_c2r, ht_mask, ht_mask_bwd: a plan of segments made in advance. This
            library plans on its own when it is called: it leaves them None, and has no use for a given one.
        rank_tokens: tokens of each rank where they differ, or None.
        exchange: "gather" or "serial", as build_cp_context() explains.
        ranks: this rank and the number of all (flash_qla.distributed.exchange.Ranks); None: one card.
        cut: the cut of packed sequences (flash_qla.distributed.cut.StreamCut); None without cu_seqlens.
    """

    is_inter: bool = False
    is_intra: bool = False
    force_intra_cp: bool = False
    intra_cp_cu_seqlens: Any = None
    seq_map_r2c: Any = None
    seq_map_c2r: Any = None
    ht_mask: Any = None
    ht_mask_bwd: Any = None
    rank_tokens: Optional[List[Any]] = None
    exchange: str = "gather"
    ranks: Any = None
    cut: Any = None

    @property
    def sequences(self) -> Any:
        """[R] which of the stream's sequences each of this rank's rows is; None without cu_seqlens."""
        return None if self.cut is None else self.cut.sequences

    @property
    def starts_here(self) -> Any:
        """[R] bool: rows whose sequence begins at this rank, so that their initial_state counts."""
        return None if self.cut is None else self.cut.parts.starts_here

    @property
    def ends_here(self) -> Any:
        """[R] bool: rows whose sequence ends at this rank, so that their final_state is the sequence's."""
        return None if self.cut is None else self.cut.parts.ends_here

    def refresh(self, cu_seqlens: Any) -> None:
        """Writes other offsets into the context, for calls to come and for graphs that are captured.

        Args:
            cu_seqlens: [N + 1], offsets of as many sequences in a stream that the ranks share out as before.

        Raises:
            ValueError: the context was not built with all_rows, or has another number of sequences.
        """
        if self.cut is None or not self.cut.all_rows:
            raise ValueError("refresh: all_rows (False) must be True in build_cp_context: shapes depend on the offsets")
        if tuple(cu_seqlens.shape) != tuple(self.cut.cu_seqlens.shape):
            given, expected = tuple(cu_seqlens.shape), tuple(self.cut.cu_seqlens.shape)
            raise ValueError(f"refresh: cu_seqlens.shape ({given}) must be that of the context ({expected})")
        self.cut.refresh(cu_seqlens)


def build_cp_context(
    cu_seqlens: Any = None,
    group: Any = None,
    conv1d_kernel_size: Optional[int] = None,
    cu_seqlens_cpu: Any = None,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
    *,
    enable_inter: Optional[bool] = None,
    enable_intra: bool = False,
    num_v_heads: Optional[int] = None,
    chunk_size: Optional[int] = None,
    g: Any = None,
    is_train: bool = False,
    force_intra_cp: bool = False,
    rank_tokens: Optional[Sequence[Any]] = None,
    all_rows: bool = False,
    exchange: str = "gather",
) -> FlashQLACPContext:
    """Builds a context for `cp_context=`, with the arguments of FLA's and of FlashQLA's function of this name.

    Every rank of the group calls it with the same arguments. A call with the context is then made by every rank on its
    own tokens; docs/several_cards.md says what it costs.

    Args:
        cu_seqlens: [N + 1] int32 or int64, packed token offsets of the whole stream. Empty sequences are allowed, and
            tokens after the last offset belong to none. None: rows of the batch are sequences, and every rank holds a
            part of each.
        group: torch.distributed process group over whose ranks the stream is cut, or an object with rank(), size() and
            all_gather(tensor) -> [size, *tensor.shape].
        conv1d_kernel_size: taps of a short convolution in front of the operation, for
            flash_qla.distributed.conv_halo().
        cu_seqlens_cpu: the offsets on the host; else they are copied from the device, which waits for it.
        use_tf32x3_affine_chain: must be True, no effect: states are handed on in float32.
        layout: "contiguous": rank r holds the r-th part of the stream. "zigzag": with W ranks it holds parts r and
            2 W - 1 - r of 2 W, one behind the other in its tensors.
        enable_inter: False: one card, whatever the group. True: with no group given, the default one if there is one.
        enable_intra: let the library cut it over the card's SMs (as auto_cp=True does).
        num_v_heads, chunk_size, g, is_train: accepted, no effect: plans are made when a call is made, on the device.
        force_intra_cp: cut it over the SMs wherever that is possible.
        rank_tokens: tokens of each rank, 0 allowed; with "zigzag" a number, of which the first part has the larger
            half, or a pair. None: equal shares.
        all_rows: every rank has a row for each of the N sequences (2 N with "zigzag"), empty where it holds none of it,
            so that no shape depends on the offsets, which refresh() may change. Otherwise its rows are the sequences
            that it holds tokens of, and empty ones whose offset lies in its part.
        exchange: "gather": one gather of links each way. "serial": states are handed from rank to rank, which computes
            the bits of one rank where parts begin at multiples of 64 tokens of a sequence, with auto_cp=False; it takes
            the time of all ranks together, and is for comparisons.

    Raises:
        ValueError: an unknown layout or exchange; use_tf32x3_affine_chain is False; tokens that cannot be shared out
            equally, or rank_tokens that do not fit; "zigzag" or all_rows without cu_seqlens.
    """
    operation = "build_cp_context"
    if not use_tf32x3_affine_chain:
        raise ValueError(f"{operation}: use_tf32x3_affine_chain ({use_tf32x3_affine_chain}) must be True")
    for name, value, known in (("layout", layout, _LAYOUTS), ("exchange", exchange, _EXCHANGES)):
        if value not in known:
            raise ValueError(f'{operation}: {name} ({value!r}) must be "{known[0]}" or "{known[1]}"')
    common: Dict[str, Any] = dict(
        conv1d_kernel_size=conv1d_kernel_size, is_intra=enable_intra or force_intra_cp, force_intra_cp=force_intra_cp
    )
    ranks = _ranks(group, enable_inter)
    if ranks is None:
        return FlashQLACPContext(
            group=None if enable_inter is False else group,
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_cpu,
            is_last_rank=True,
            pre_num_ranks=0,
            is_first_rank=True,
            post_num_ranks=0,
            pre_num_conv_tokens=0,
            is_inter=bool(enable_inter),
            **common,
        )
    common.update(group=ranks.group, is_inter=True, layout=layout, exchange=exchange, ranks=ranks)
    if cu_seqlens is None:
        return _of_batch_rows(operation, ranks, layout, rank_tokens, all_rows, common)
    return _of_packed(operation, ranks, cu_seqlens, cu_seqlens_cpu, layout, rank_tokens, all_rows, exchange, common)


def _ranks(group: Any, enable_inter: Optional[bool]) -> Any:
    """The ranks of several cards; None for one."""
    if enable_inter is False or (group is None and not enable_inter):
        return None
    from .....distributed import exchange

    group = exchange.default_group() if group is None else group
    if exchange.size_of(group) < 2:
        return None
    return exchange.ranks_of(group)


def _of_batch_rows(
    operation: str, ranks: Any, layout: str, rank_tokens: Optional[Sequence[Any]], all_rows: bool, common: dict
) -> FlashQLACPContext:
    from .....distributed import cut

    if layout != "contiguous" or all_rows:
        what = "all_rows (True)" if all_rows else f"layout ({layout!r})"
        raise ValueError(f"{operation}: {what} must come with cu_seqlens")
    lengths = None
    if rank_tokens is not None:
        bounds = cut.stream_bounds(operation, 0, ranks.size, layout, rank_tokens)
        lengths = [end - begin for begin, end in bounds]
    return FlashQLACPContext(
        is_first_rank=ranks.rank == 0,
        is_last_rank=ranks.rank == ranks.size - 1,
        pre_num_ranks=ranks.rank,
        post_num_ranks=ranks.size - 1 - ranks.rank,
        rank_tokens=lengths,
        **common,
    )


def _of_packed(
    operation: str,
    ranks: Any,
    cu_seqlens: Any,
    cu_seqlens_cpu: Any,
    layout: str,
    rank_tokens: Optional[Sequence[Any]],
    all_rows: bool,
    exchange: str,
    common: dict,
) -> FlashQLACPContext:
    import torch

    from .....distributed import cut

    given = torch.as_tensor(cu_seqlens)
    if given.dim() != 1 or given.shape[0] < 1:
        raise ValueError(f"{operation}: cu_seqlens.shape ({tuple(given.shape)}) must be [N + 1]")
    offsets = None
    if not all_rows or rank_tokens is None:  # what is known on the device alone has to be waited for
        on_host = given if cu_seqlens_cpu is None else torch.as_tensor(cu_seqlens_cpu)
        offsets = [int(x) for x in on_host.tolist()]
        _check_offsets(operation, offsets, given.shape[0])
    bounds = cut.stream_bounds(operation, offsets[-1] if offsets else 0, ranks.size, layout, rank_tokens)
    found = cut.cut_stream(given, offsets, ranks, layout, bounds, all_rows, exchange)
    context = FlashQLACPContext(
        cu_seqlens=found.local_cu_seqlens,
        rank_tokens=None if rank_tokens is None else list(rank_tokens),
        cut=found,
        **common,
    )
    if not all_rows:
        _describe_for_others(context, offsets or [], found)
    return context


def _check_offsets(operation: str, offsets: List[int], count: int) -> None:
    if len(offsets) != count:
        raise ValueError(f"{operation}: cu_seqlens_cpu.shape[0] ({len(offsets)}) must be that of cu_seqlens ({count})")
    if offsets[0] != 0:
        raise ValueError(f"{operation}: cu_seqlens[0] ({offsets[0]}) must be 0")
    for n, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        if end < begin:
            raise ValueError(f"{operation}: cu_seqlens[{n + 1}] ({end}) must not be below cu_seqlens[{n}] ({begin})")


def _describe_for_others(context: FlashQLACPContext, offsets: List[int], cut: Any) -> None:
    """The fields of FLA and FlashQLA, as far as the host knows the cut."""
    import torch

    context.cu_seqlens_cpu = torch.tensor(cut.local_offsets, dtype=cut.local_cu_seqlens.dtype)
    described = [_neighbours(offsets, cut, place) for place in cut.places]
    before, after, halo = zip(*described)
    if len(described) == 1:
        context.pre_num_ranks, context.post_num_ranks, context.pre_num_conv_tokens = described[0]
        context.is_first_rank, context.is_last_rank = before[0] == 0, after[0] == 0
        return
    context.pre_num_ranks_by_part, context.post_num_ranks_by_part = before, after
    context.is_first_by_part = (before[0] == 0, before[1] == 0)
    context.is_last_by_part = (after[0] == 0, after[1] == 0)
    context.pre_num_conv_tokens_by_part = halo
    context.part_len = cut.part_tokens[0]
    context.front_num_seqs = cut.part_rows[0]


def _neighbours(offsets: List[int], cut: Any, place: int) -> Tuple[int, int, int]:
    """Parts before `place` that hold its first sequence, parts after it that hold its last, and tokens of the first
    before it."""
    import bisect

    begin, end = cut.bounds[place]
    end = min(end, offsets[-1])
    if begin >= end:
        return 0, 0, 0

    def place_of(token: int) -> int:
        return next(i for i, (first, behind) in enumerate(cut.bounds) if first <= token < behind)

    first = offsets[bisect.bisect_right(offsets, begin) - 1]
    behind = offsets[bisect.bisect_right(offsets, end - 1)]
    return place - place_of(first), place_of(behind - 1) - place, begin - first


def apply_context(operation: str, context: Any, cu_seqlens: Any, force_intra_cp: bool) -> Tuple[Any, bool, Any]:
    """cu_seqlens and force_intra_cp of a call with `cp_context`: any object with the fields above; and its ranks, None
    for one card.

    Raises:
        ValueError: the context has neighbours and no group.
    """
    if context is None:
        return cu_seqlens, force_intra_cp, None
    ranks = getattr(context, "ranks", None)
    group = getattr(context, "group", None)
    if ranks is None and group is not None:
        from .....distributed import exchange

        ranks = exchange.ranks_of(group) if exchange.size_of(group) > 1 else None
    if ranks is None:
        neighbours = [getattr(context, name, None) or 0 for name in ("pre_num_ranks", "post_num_ranks")]
        if sum(neighbours) > 0:
            others = f"the context has {sum(neighbours)} other rank(s)"
            raise ValueError(f"{operation}: cp_context.group ({group}) must be given: {others}")
    own = getattr(context, "cu_seqlens", None)
    forced = force_intra_cp or bool(getattr(context, "force_intra_cp", False))
    return (cu_seqlens if own is None else own), forced, ranks


def refuse_several_cards(operation: str, ranks: Any) -> None:
    """Raises NotImplementedError for a call that only one card can make."""
    if ranks is not None:
        raise NotImplementedError(
            f"{operation}: cp_context must be of one card ({ranks.size} ranks): several cards are for "
            "chunk_gated_delta_rule, on torch tensors"
        )
