"""Context parallelism: one long stream of tokens, cut over several cards (inter) or over one card's SMs (intra).

This version computes on one card: contexts are accepted, with the field names of FLA and FlashQLA, as long as one card
holds the whole stream.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Optional, Tuple, TypeVar

_Context = TypeVar("_Context", bound="FLACPContext")


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
        pre_num_conv_tokens: tokens that the convolution needs from the rank before.
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

    def copy_for_backward(self: _Context) -> _Context:
        """A copy that the backward pass may keep: same tensors, own fields."""
        return copy.copy(self)

    @property
    def num_seqs(self) -> int:
        """Sequences of this rank; 0 without cu_seqlens."""
        return 0 if self.cu_seqlens is None else int(self.cu_seqlens.shape[0]) - 1


@dataclasses.dataclass
class FlashQLACPContext(FLACPContext):
    """FLACPContext with FlashQLA's fields.

    Fields, beside those of FLACPContext:
        is_inter: the stream is cut over cards.
        is_intra: the stream may be cut over one card's SMs.
        force_intra_cp: cut it wherever that is possible.
        intra_cp_cu_seqlens, seq_map_r2c, seq_map_c2r, ht_mask, ht_mask_bwd: a plan of segments made in advance. This
            library plans on its own when it is called: it leaves them None, and has no use for a given one.
    """

    is_inter: bool = False
    is_intra: bool = False
    force_intra_cp: bool = False
    intra_cp_cu_seqlens: Any = None
    seq_map_r2c: Any = None
    seq_map_c2r: Any = None
    ht_mask: Any = None
    ht_mask_bwd: Any = None


def _world_size(group: Any) -> int:
    """Ranks of a process group; None is a single rank."""
    if group is None:
        return 1
    size = group.size
    return int(size() if callable(size) else size)


def _refuse_several_cards(operation: str, argument: str, ranks: int) -> None:
    if ranks > 1:
        raise NotImplementedError(
            f"{operation}: {argument} must be of one card ({ranks} ranks): context parallelism over several cards is "
            "not supported yet; shard by heads or by sequences"
        )


def build_cp_context(
    cu_seqlens: Any = None,
    group: Any = None,
    conv1d_kernel_size: Optional[int] = None,
    cu_seqlens_cpu: Any = None,
    *,
    enable_inter: bool = False,
    enable_intra: bool = False,
    num_v_heads: Optional[int] = None,
    chunk_size: Optional[int] = None,
    g: Any = None,
    is_train: bool = False,
    force_intra_cp: bool = False,
    use_tf32x3_affine_chain: bool = True,
    layout: str = "contiguous",
) -> FlashQLACPContext:
    """Builds a context for `cp_context=`, with the arguments of FLA's and of FlashQLA's function of this name.

    Args:
        cu_seqlens: [N + 1] int32 or int64, packed token offsets of the whole stream.
        group: torch.distributed process group; with `enable_inter` and None, the default group if there is one.
        conv1d_kernel_size: taps of a short convolution in front of the operation; kept for its caller.
        cu_seqlens_cpu: the offsets on the host; kept for its caller.
        enable_inter: cut the stream over the group's cards.
        enable_intra: let the library cut it over the card's SMs (as auto_cp=True does).
        num_v_heads, chunk_size, g, is_train: accepted, no effect: plans are made when a call is made, on the device.
        force_intra_cp: cut it over the SMs wherever that is possible.
        use_tf32x3_affine_chain: must be True, no effect: states are handed on in float32.
        layout: how a stream is dealt to the cards: "contiguous", a part to each, is the only one.

    Raises:
        ValueError: another layout, or use_tf32x3_affine_chain is False.
        NotImplementedError: the group has more than one rank.
    """
    if not use_tf32x3_affine_chain:
        raise ValueError(f"build_cp_context: use_tf32x3_affine_chain ({use_tf32x3_affine_chain}) must be True")
    if layout != "contiguous":
        raise ValueError(f'build_cp_context: layout ({layout!r}) must be "contiguous"')
    if enable_inter and group is None:
        import torch.distributed as distributed

        if distributed.is_available() and distributed.is_initialized():
            group = distributed.group.WORLD
    _refuse_several_cards("build_cp_context", "group", _world_size(group))
    return FlashQLACPContext(
        group=group,
        cu_seqlens=cu_seqlens,
        cu_seqlens_cpu=cu_seqlens_cpu,
        is_last_rank=True,
        pre_num_ranks=0,
        is_first_rank=True,
        post_num_ranks=0,
        conv1d_kernel_size=conv1d_kernel_size,
        pre_num_conv_tokens=0,
        is_inter=enable_inter,
        is_intra=enable_intra or force_intra_cp,
        force_intra_cp=force_intra_cp,
    )


def apply_context(operation: str, context: Any, cu_seqlens: Any, force_intra_cp: bool) -> Tuple[Any, bool]:
    """cu_seqlens and force_intra_cp of a call with `cp_context`: any object with the fields above.

    Raises:
        NotImplementedError: the context spans several cards.
    """
    if context is None:
        return cu_seqlens, force_intra_cp
    ranks = _world_size(getattr(context, "group", None))
    neighbours = (getattr(context, "pre_num_ranks", None) or 0) + (getattr(context, "post_num_ranks", None) or 0)
    _refuse_several_cards(operation, "cp_context", max(ranks, neighbours + 1))
    own = getattr(context, "cu_seqlens", None)
    forced = force_intra_cp or bool(getattr(context, "force_intra_cp", False))
    return (cu_seqlens if own is None else own), forced
