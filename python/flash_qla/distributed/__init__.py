"""Streams of tokens that are cut over several cards: docs/several_cards.md.

chunk_gated_delta_rule(.., cp_context=build_cp_context(..)) does it all with torch.distributed. Here are its parts, for
engines that communicate by their own means, and the tokens that a short convolution needs of a part's neighbours.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ..ops.gated_delta_rule.chunk.cp import build_cp_context
from .operations import (
    Links,
    SequenceCut,
    chunk_summary,
    chunk_summary_backward,
    compose_links,
    sequence_cut,
    summary_combine,
    unpack_links,
)

__all__ = [
    "Links",
    "SequenceCut",
    "build_cp_context",
    "chunk_summary",
    "chunk_summary_backward",
    "compose_links",
    "conv_halo",
    "sequence_cut",
    "summary_combine",
    "unpack_links",
    "with_halo",
    "without_halo",
]


def conv_halo(x: Any, context: Any, width: Optional[int] = None) -> Any:
    """The tokens before each of this rank's parts, for a causal convolution: those of the same sequence, zeros before
    its start. Differentiable; all ranks call it.

    Args:
        x: [1, T, D] (or [B, T, D] with a context without cu_seqlens), this rank's tokens, any dtype.
        context: of build_cp_context(), FLA or FlashQLA, of several cards or of one.
        width: taps of the convolution; None: the context's conv1d_kernel_size.

    Returns:
        [P, width - 1, D], the last of them the token just before the part. They may come from several ranks. P is 1, 2
        with layout "zigzag", or B without cu_seqlens.

    One gather of P (width - 1) D numbers a rank each way. Gradients go back to the tokens' ranks and are added there in
    a fixed order.

    Raises:
        ValueError: no width, or x has not the tokens that the context gives this rank.
        RuntimeError: as chunk_gated_delta_rule().
    """
    from . import halo

    return halo.conv_halo(x, context, width)


def with_halo(x: Any, context: Any, width: Optional[int] = None) -> Tuple[Any, Any]:
    """x with each part's halo in front of the part, and the offsets for any causal convolution of packed sequences.

    Args:
        x, context, width: as conv_halo().

    Returns:
        [1, T + P (width - 1), D] (or [B, T + width - 1, D], and None), and offsets [R + 1] in it: a sequence that
        enters a part is longer by its halo there. without_halo() takes the convolution's result back to this rank's
        tokens.
    """
    from . import halo

    return halo.with_halo(x, context, width)


def without_halo(y: Any, context: Any, width: Optional[int] = None) -> Any:
    """The rows of this rank's own tokens of what a convolution has made of with_halo()'s tensor.

    Args:
        y: [1, T + P (width - 1), D], or [B, T + width - 1, D].

    Returns:
        [1, T, D], or [B, T, D].
    """
    from . import halo

    return halo.without_halo(y, context, width)
