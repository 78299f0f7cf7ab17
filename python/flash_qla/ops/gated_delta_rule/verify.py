"""Serving: draft tokens in chains and trees, from states in a pool that is read and not written."""

from __future__ import annotations

from typing import Any, Optional

from ... import _dlpack, _front
from ..._front import is_torch
from ..._options import VERIFY_NAMES, integer, make_options

__all__ = ["gated_delta_rule_verify"]


def gated_delta_rule_verify(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    state_pool: Any,
    initial_state_indices: Any,
    *,
    parents: Optional[Any] = None,
    states_out: Optional[Any] = None,
    states_out_indices: Optional[Any] = None,
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
    """Draft tokens of N sequences, whose states in a pool are read and not written: what verification of speculative
    decoding needs before it knows which tokens are accepted. Forward only.

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream. The recurrence and the in-kernel options are those of
    chunk_gated_delta_rule(); so is the source, arXiv 2412.06464. What is written (states_out, out) shares no memory
    with anything else; autograd takes it for modified in place.

    Each token continues from the state after its parent, so that a row may hold a chain of guesses or a tree of them.
    Between tokens a state keeps float32 (float64), whatever the pool's dtype.

    Args:
        q, k: [N, T, Hq, K], T from 1 to 16; v: [N, T, Hv, V]; g, beta: [N, T, Hv] or None.
        state_pool: [slots, Hv, V, K] (or [slots, Hv, K, V] with state_v_first=False) float32, bfloat16 or float16; any
            slot stride, each slot contiguous. Only read.
        initial_state_indices: [N] int32 or int64, the slot that each sequence starts from. With an index at or below
            `null_index`, or past the pool, the sequence is skipped: its o is zero and none of its states is written.
        parents: [N, T] int32 or int64: the token of the same row that token t continues, from 0 to t - 1, or -1 for the
            pool's state; any other value counts as -1. None: a chain, t - 1.
        states_out: [rows, T, Hv, V, K], dtype and layout of state_pool: receives the state after each token; any row
            and token stride, each state contiguous. None: they are not wanted.
        states_out_indices: [N] int32 or int64, the row of states_out that each sequence has; one below 0 or past the
            last row leaves that sequence's states out. None: sequence n has row n.
        null_index: the largest index that means "no slot".
        out: [N, T, Hv, V], dtype of q, any strides: receives o.

    Returns:
        o: [N, T, Hv, V], dtype of q; `out` if it was given.

    Raises:
        ValueError, TypeError, NotImplementedError: as gated_delta_rule_decode(). With FLASH_QLA_CHECK=1 in the
            environment, ValueError too for a slot or row past the end, a row of states_out that is written twice, and a
            parent that is not -1 or an earlier token.
        NotImplementedError: a gradient is asked for, in backward.
    """
    operation = "gated_delta_rule_verify"
    options = make_options(
        operation,
        scale,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias)
    states = (state_pool, initial_state_indices, parents, states_out, states_out_indices)
    null_index = integer(operation, "null_index", null_index)
    if is_torch(operation, VERIFY_NAMES, (*inputs, *states, out)):
        return _front.torch_front.verify(options, inputs, (*states, null_index), out)
    return _dlpack.verify(options, inputs, (*states, null_index), out)
