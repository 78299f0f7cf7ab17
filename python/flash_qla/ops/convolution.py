"""The causal depthwise convolution in front of the delta rule: FLA's function, the two of the package causal_conv1d,
and serving with a pool of states."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from .. import _front
from .._front import check_host_offsets, require_torch
from .._options import chosen_path, integer
from .gated_delta_rule.chunk.cp.context import apply_context, refuse_several_cards

__all__ = [
    "causal_conv1d",
    "causal_conv1d_decode",
    "causal_conv1d_fn",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
]

_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}
_CHANNELS_LAST, _CHANNELS_FIRST = 0, 1  # layouts of _torch_layer


def _config(
    operation: str, activation: Optional[str], layout: int, l2norm_heads: int, head_dim: Optional[int]
) -> Any:
    if activation not in _ACTIVATIONS:
        raise ValueError(f'{operation}: activation ({activation!r}) must be None, "silu" or "swish"')
    heads = integer(operation, "l2norm_heads", l2norm_heads, 0, 2**31)
    if heads > 0 and head_dim is None:
        raise ValueError(f"{operation}: head_dim (None) must be given with l2norm_heads ({heads})")
    dim = 0 if head_dim is None else integer(operation, "head_dim", head_dim, 1, 2**31)
    config = _front.torch_layer.ConvConfig
    return config(operation, chosen_path(), _ACTIVATIONS[activation], layout, heads, dim)


def _require(operation: str, names: Tuple[str, ...], tensors: Tuple[Any, ...]) -> None:
    """x and weight are tensors, and so is whatever else is given."""
    require_torch(operation, names, tensors)
    if tensors[1] is None:
        raise TypeError(f"{operation}: weight (None) must be a torch.Tensor")


def causal_conv1d(
    x: Any,
    weight: Optional[Any] = None,
    bias: Optional[Any] = None,
    residual: Optional[Any] = None,
    initial_state: Optional[Any] = None,
    output_final_state: bool = False,
    activation: Optional[str] = None,
    backend: Optional[str] = None,
    cu_seqlens: Optional[Any] = None,
    cu_seqlens_cpu: Optional[Any] = None,
    chunk_indices: Optional[Any] = None,
    cp_context: Optional[Any] = None,
    *,
    seq_idx: Optional[Any] = None,
    l2norm_heads: int = 0,
    head_dim: Optional[int] = None,
) -> Tuple[Any, Optional[Any]]:
    """Causal depthwise convolution, with parameters in FLA's order; differentiable in x, weight, bias, residual and
    initial_state.

    Per channel of a sequence, with W weights: u_t = bias + sum_j weight_j x_{t - (W - 1) + j}, y_t = act(u_t) +
    residual_t. Sums are in float32 (float64 for float64), results are rounded once. Source: the short convolution of
    "Gated Delta Networks", arXiv 2412.06464.

    Args:
        x: [B, T, C] bfloat16, float16, float32, or float64 on the CPU; any strides.
        weight: [C, W] float, W from 1 to 8. bias: [C] float. None: zero.
        residual: as x, added after the activation; not with `l2norm_heads`.
        initial_state: [N, C, L] float with L >= W - 1: the inputs before each sequence, newest last; None: zeros. N is
            B, or the number of sequences in cu_seqlens.
        output_final_state: also return the state after the last tokens.
        activation: None, "silu" or "swish" (the same).
        backend, chunk_indices: accepted, no effect. cu_seqlens_cpu: likewise; with FLASH_QLA_CHECK=1 one that differs
            from cu_seqlens is refused.
        cu_seqlens: [N + 1] int32 or int64 on x's device: offsets of N sequences packed in B = 1. Lengths of zero are
            allowed; tokens outside all sequences give zeros.
        cp_context: a context of one card; its cu_seqlens replace the call's.
        seq_idx: [B, T] int32 or int64: a term counts where its index is the token's own, and a token with a negative
            index gives zero. Excludes cu_seqlens and states.
        l2norm_heads, head_dim: the first `l2norm_heads` heads of `head_dim` (at most 256) channels are divided by
            sqrt(sum y^2 + 1e-6) over the head.

    Returns:
        y: [B, T, C], dtype of x, strides like x's.
        final_state: [N, C, L], the last L inputs of each sequence in initial_state's dtype; without an initial state
            L is W and the dtype x's. Or None.

    Raises:
        ValueError, TypeError: a rule above is broken; the message names operation, argument, rule and what was given.
        NotImplementedError: no path of this build or machine computes the call, or cp_context spans several cards; or
            a second derivative is asked for, in backward.
    """
    operation = "causal_conv1d"
    cu_seqlens, _, ranks = apply_context(operation, cp_context, cu_seqlens, False)
    refuse_several_cards(operation, ranks)
    inputs = (x, weight, bias, residual, initial_state, cu_seqlens, seq_idx)
    _require(operation, _front.torch_layer.CONV_NAMES if _front.torch_layer else ("x", "weight"), inputs)
    check_host_offsets(operation, x, cu_seqlens, cu_seqlens_cpu)
    config = _config(operation, activation, _CHANNELS_LAST, l2norm_heads, head_dim)
    entries = weight.shape[-1] if output_final_state else -1  # type: ignore[union-attr]
    return _front.torch_layer.causal_conv1d(config, entries, *inputs)


def causal_conv1d_fn(
    x: Any,
    weight: Any,
    bias: Optional[Any] = None,
    seq_idx: Optional[Any] = None,
    initial_states: Optional[Any] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Any] = None,
    activation: Optional[str] = None,
) -> Any:
    """Causal depthwise convolution with the parameters of the package causal_conv1d: channels before tokens;
    differentiable in x, weight, bias and initial_states.

    Args:
        x: [B, C, T], any strides; other arguments, dtypes and formula as causal_conv1d().
        weight: [C, W]. bias: [C].
        seq_idx: [B, T], as causal_conv1d(); excludes states.
        initial_states: [B, C, W - 1] float (or more inputs, of which the last W - 1 count).
        return_final_states: also return the last W - 1 inputs of each row, [B, C, W - 1].
        final_states_out: a tensor that receives them.
        activation: None, "silu" or "swish".

    Returns:
        y, as x; or (y, final states).

    Raises:
        ValueError, TypeError, NotImplementedError: as causal_conv1d().
    """
    operation = "causal_conv1d_fn"
    inputs = (x, weight, bias, None, initial_states, None, seq_idx)
    names = ("x", "weight", "bias", "residual", "initial_states", "cu_seqlens", "seq_idx")
    _require(operation, (*names, "final_states_out"), (*inputs, final_states_out))
    config = _config(operation, activation, _CHANNELS_FIRST, 0, None)
    y, final_states = _front.torch_layer.causal_conv1d(
        config, max(weight.shape[-1] - 1, 1) if return_final_states else -1, *inputs
    )
    if not return_final_states:
        return y
    return y, final_states if final_states_out is None else final_states_out.copy_(final_states)


def causal_conv1d_update(
    x: Any,
    conv_state: Any,
    weight: Any,
    bias: Optional[Any] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Any] = None,
    conv_state_indices: Optional[Any] = None,
) -> Any:
    """The convolution of the next tokens of each sequence, with the parameters of the package causal_conv1d: conv_state
    is read and written in place. Forward only.

    Args:
        x: [N, C] or [N, C, T], any strides; formula and dtypes as causal_conv1d().
        conv_state: [N or slots, C, L] float with L >= W - 1, any strides, newest input last. Written.
        weight: [C, W]. bias: [C]. activation: None, "silu" or "swish".
        cache_seqlens: [N] int32 or int64: the state is a ring, whose next entry is cache_seqlens mod L.
        conv_state_indices: [N] int32 or int64, the slot of each sequence; one below 0 skips the sequence, whose y is
            zero.

    Returns:
        y, as x.

    Raises:
        ValueError, TypeError: as causal_conv1d(). NotImplementedError: likewise; or a gradient is asked for, in
            backward.
    """
    operation = "causal_conv1d_update"
    tensors: tuple = (x, weight, bias, conv_state, None, conv_state_indices, None, None, None, cache_seqlens)
    tensors += (None, None, None, None)
    names = ("x", "weight", "bias", "conv_state", "", "conv_state_indices", "", "", "", "cache_seqlens")
    _require(operation, (*names, "", "", "", ""), tensors)
    if conv_state is None:
        raise TypeError(f"{operation}: conv_state (None) must be a torch.Tensor")
    config = _config(operation, activation, _CHANNELS_FIRST, 0, None)
    single = x.dim() == 2
    if single:
        tensors = (x.unsqueeze(-1), *tensors[1:])
    y = _front.torch_layer.conv_with_states(config, True, -1, tensors, None)
    return y.squeeze(-1) if single else y


def causal_conv1d_prefill(
    x: Any,
    weight: Any,
    bias: Optional[Any],
    state_pool: Any,
    initial_state_indices: Any,
    final_state_indices: Optional[Any] = None,
    *,
    cu_seqlens: Optional[Any],
    has_initial_state: Optional[Any] = None,
    null_index: int = -1,
    out: Optional[Any] = None,
    checkpoint_offsets: Optional[Any] = None,
    checkpoint_indices: Optional[Any] = None,
    activation: Optional[str] = "silu",
    l2norm_heads: int = 0,
    head_dim: Optional[int] = None,
) -> Any:
    """The convolution of packed sequences whose states live in a pool: slots are read and written in place. Forward
    only. Words and rules are those of gated_delta_rule_prefill().

    Args:
        x: [1, T, C]; weight, bias, activation, l2norm_heads, head_dim: as causal_conv1d().
        state_pool: [slots, C, L] float with L >= W - 1, any strides, newest input last. Written in place.
        initial_state_indices: [N] int32 or int64, the slot that each sequence starts from. With an index at or below
            `null_index`, or past the pool, the sequence is skipped: its y is zero and nothing is read or written.
        final_state_indices: [N], the slot that receives each final state; such an index skips the write alone. None:
            the initial ones.
        cu_seqlens: [N + 1] int32 or int64, packed token offsets; None: N = B sequences of T tokens.
        has_initial_state: [N] bool; False starts from zeros, whatever the initial index is. None: all True.
        null_index: the largest index that means "no slot".
        out: [1, T, C], dtype of x, any strides, apart from x: receives y.
        checkpoint_offsets: [M] int32 or int64, packed token positions: the state before each ...
        checkpoint_indices: [M] ... goes into these slots, none of which another sequence of the call starts from.

    Returns:
        y: [1, T, C], dtype of x; `out` if it was given.

    Raises:
        ValueError, TypeError, NotImplementedError: as causal_conv1d_update(); with FLASH_QLA_CHECK=1 also for slots
            past the pool, written twice, or written by one sequence and read by another.
    """
    operation = "causal_conv1d_prefill"
    tensors: tuple = (x, weight, bias, state_pool, cu_seqlens, initial_state_indices, final_state_indices)
    tensors += (has_initial_state,)
    tensors += (None, None, None, None, checkpoint_offsets, checkpoint_indices)
    return _pool(operation, False, tensors, null_index, out, activation, l2norm_heads, head_dim)


def causal_conv1d_decode(
    x: Any,
    weight: Any,
    bias: Optional[Any],
    state_pool: Any,
    initial_state_indices: Any,
    final_state_indices: Optional[Any] = None,
    *,
    num_accepted_tokens: Optional[Any] = None,
    cache_seqlens: Optional[Any] = None,
    cu_seqlens: Optional[Any] = None,
    max_tokens: Optional[int] = None,
    draft_states: Optional[Any] = None,
    draft_state_indices: Optional[Any] = None,
    null_index: int = -1,
    out: Optional[Any] = None,
    activation: Optional[str] = "silu",
    l2norm_heads: int = 0,
    head_dim: Optional[int] = None,
) -> Any:
    """One decode step of N sequences, of one or several tokens, on states in a pool. Forward only.

    Args:
        x: [N, T, C], or [1, T, C] packed with cu_seqlens; weight, bias, activation, l2norm_heads, head_dim: as
            causal_conv1d().
        state_pool, initial_state_indices, final_state_indices, null_index: as causal_conv1d_prefill().
        num_accepted_tokens: [N] int32 or int64, from 1. With o = accepted - 1 a sequence reads entries o .. o + W - 2
            of its state, and leaves entries o + 1 .. o + W - 2 and its new inputs at the front, which needs L >= W - 2
            + tokens; further entries stay.
        cache_seqlens: [N] int32 or int64: states are rings, whose next entry is cache_seqlens mod L.
        cu_seqlens: [N + 1] int32 or int64, packed token offsets. max_tokens: the most tokens of a sequence then;
            accepted, no effect.
        draft_states: [rows, T, C, W - 1] float: receives the last W - 1 inputs after each token.
        draft_state_indices: [N] int32 or int64, rows of draft_states; below 0: not written. None: row n.
        out: as x, any strides: receives y. It may be x itself.

    Returns:
        y, as x; `out` if it was given.

    Raises:
        ValueError, TypeError, NotImplementedError: as causal_conv1d_prefill().
    """
    operation = "causal_conv1d_decode"
    if max_tokens is not None:
        integer(operation, "max_tokens", max_tokens, 0)
    tensors: tuple = (x, weight, bias, state_pool, cu_seqlens, initial_state_indices, final_state_indices, None)
    tensors += (num_accepted_tokens, cache_seqlens, draft_states, draft_state_indices, None, None)
    return _pool(operation, True, tensors, null_index, out, activation, l2norm_heads, head_dim)


def _pool(
    operation: str,
    update: bool,
    tensors: tuple,
    null_index: int,
    out: Optional[Any],
    activation: Optional[str],
    l2norm_heads: int,
    head_dim: Optional[int],
) -> Any:
    names: Tuple[str, ...] = ("x", "weight", "bias", "state_pool", "cu_seqlens", "initial_state_indices")
    names += ("final_state_indices", "has_initial_state", "num_accepted_tokens", "cache_seqlens", "draft_states")
    names += ("draft_state_indices",)
    _require(operation, (*names, "checkpoint_offsets", "checkpoint_indices", "out"), (*tensors, out))
    for name, value in (("state_pool", tensors[3]), ("initial_state_indices", tensors[5])):
        if value is None:
            raise TypeError(f"{operation}: {name} (None) must be a torch.Tensor")
    config = _config(operation, activation, _CHANNELS_LAST, l2norm_heads, head_dim)
    index = integer(operation, "null_index", null_index)
    return _front.torch_layer.conv_with_states(config, update, index, tensors, out)
