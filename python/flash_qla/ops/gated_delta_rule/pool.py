"""Serving: prefill and decode with the states in a pool, read and written in place."""

from __future__ import annotations

from typing import Any, Literal, Optional, Union

from ... import _dlpack, _front
from ..._front import is_torch
from ..._options import POOL_NAMES, integer, make_options

__all__ = ["gated_delta_rule_decode", "gated_delta_rule_prefill"]


# Where two numbers stand among the states of a call.
_NUMBERS_AT = 5  # null_index, checkpoint_every


def _run(operation: str, recurrent: bool, options: Any, inputs: tuple, states: tuple, out: Any) -> Any:
    tensors = (*inputs, *states[:_NUMBERS_AT], *states[_NUMBERS_AT + 2 :], out)
    if is_torch(operation, POOL_NAMES, tensors):
        return _front.torch_front.pool(recurrent, options, inputs, states, out)
    return _dlpack.pool(options, recurrent, inputs, states, out)


def gated_delta_rule_prefill(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    state_pool: Any,
    initial_state_indices: Any,
    final_state_indices: Optional[Any] = None,
    *,
    cu_seqlens: Optional[Any],
    has_initial_state: Optional[Any] = None,
    null_index: int = -1,
    out: Optional[Any] = None,
    checkpoint_every: int = 0,
    checkpoint_offsets: Optional[Any] = None,
    checkpoint_indices: Optional[Any] = None,
    checkpoints: Optional[Any] = None,
    checkpoint_cu_starts: Optional[Any] = None,
    state_v_first: bool = True,
    scale: Optional[float] = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
) -> Any:
    """Prefill of packed sequences whose states live in a pool: slots are read and written in place. Forward only.

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream. The recurrence and the in-kernel options are those of
    chunk_gated_delta_rule(); so is the source, arXiv 2412.06464. What is written (state_pool, out, checkpoints) shares
    no memory with anything else; autograd takes it for modified in place.

    Args:
        q, k: [1, T, Hq, K]; v: [1, T, Hv, V]; g, beta: [1, T, Hv] or None: as chunk_gated_delta_rule().
        state_pool: [slots, Hv, V, K] (or [slots, Hv, K, V] with state_v_first=False) float32, bfloat16 or float16; any
            slot stride, each slot contiguous. Written in place.
        initial_state_indices: [N] int32 or int64, the slot that each sequence starts from. With an index at or below
            `null_index`, or past the pool, the sequence is skipped: its o is zero and nothing is read or written.
        final_state_indices: [N], the slot that receives each final state; such an index skips the write alone. None:
            the initial ones.
        cu_seqlens: [N + 1] int32 or int64, packed token offsets; None: N = B sequences of T tokens.
        has_initial_state: [N] bool; False starts from zeros, whatever the initial index is. None: all True.
        null_index: the largest index that means "no slot".
        out: [1, T, Hv, V], dtype of q, any strides: receives o.
        checkpoint_every: n, a multiple of 64: the state after every n-th token of a sequence goes to `checkpoints`; 0:
            none.
        checkpoints: [rows, Hv, V, K] float, floor(length / n) rows a sequence; written.
        checkpoint_cu_starts: [N + 1], the first row of each sequence.
        checkpoint_offsets: [M] int32 or int64, packed token positions: the state after the tokens before each ...
        checkpoint_indices: [M] ... goes into these pool slots, none of which another sequence of the call starts from.
        auto_cp: as chunk_gated_delta_rule().

    Returns:
        o: [1, T, Hv, V], dtype of q; `out` if it was given.

    Raises:
        ValueError, TypeError, NotImplementedError: as chunk_gated_delta_rule(). With FLASH_QLA_CHECK=1 in the
            environment, ValueError too for a slot that a sequence which is not skipped would read or write past the
            pool, that is written twice, or written by one sequence and read by another; the check reads the indices and
            waits, so it refuses a stream that is captured into a graph.
        NotImplementedError: a gradient is asked for, in backward.
    """
    operation = "gated_delta_rule_prefill"
    options = make_options(
        operation,
        scale,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        auto_cp,
    )
    states = (
        state_pool,
        initial_state_indices,
        final_state_indices,
        has_initial_state,
        None,
        integer(operation, "null_index", null_index),
        integer(operation, "checkpoint_every", checkpoint_every),
        checkpoints,
        checkpoint_cu_starts,
        checkpoint_offsets,
        checkpoint_indices,
    )
    return _run(operation, False, options, (q, k, v, g, beta, A_log, dt_bias, cu_seqlens), states, out)


def gated_delta_rule_decode(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    state_pool: Any,
    initial_state_indices: Any,
    final_state_indices: Optional[Any] = None,
    *,
    num_accepted_tokens: Optional[Any] = None,
    null_index: int = -1,
    out: Optional[Any] = None,
    state_v_first: bool = True,
    scale: Optional[float] = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
) -> Any:
    """One decode step of N sequences, of one token or of up to 16 draft tokens, on states in a pool. Forward only.

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream. The recurrence and the in-kernel options are those of
    chunk_gated_delta_rule(); so is the source, arXiv 2412.06464. What is written (state_pool, out, checkpoints) shares
    no memory with anything else; autograd takes it for modified in place.

    Args:
        q, k: [N, T, Hq, K], T from 1 to 16; v: [N, T, Hv, V]; g, beta: [N, T, Hv] or None.
        state_pool: [slots, Hv, V, K], as gated_delta_rule_prefill(). Written in place.
        initial_state_indices: [N] int32 or int64, the slot to start from; or [N, S] with `num_accepted_tokens`.
        final_state_indices: [N], the slot that receives the state after the last token; or [N, T], a slot per token,
            which receives the state after that token. None: the initial ones.
        num_accepted_tokens: [N] int32 or int64 in 1..S: sequence n starts from slot
            initial_state_indices[n, num_accepted_tokens[n] - 1].
        null_index: an initial index at or below it, or past the pool, skips the sequence; a final one that write alone.
        out: [N, T, Hv, V], dtype of q, any strides: receives o.

    Returns:
        o: [N, T, Hv, V], dtype of q; `out` if it was given. The row of a sequence without a slot is zero.

    Raises:
        ValueError, TypeError, NotImplementedError: as gated_delta_rule_prefill().
    """
    operation = "gated_delta_rule_decode"
    options = make_options(
        operation,
        scale,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    states = (
        state_pool,
        initial_state_indices,
        final_state_indices,
        None,
        num_accepted_tokens,
        integer(operation, "null_index", null_index),
        0,
        None,
        None,
        None,
        None,
    )
    return _run(operation, True, options, (q, k, v, g, beta, A_log, dt_bias, None), states, out)
