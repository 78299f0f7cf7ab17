"""The chunked gated delta rule: prefill, training, and the low-level pair of forward and backward."""

from __future__ import annotations

from typing import Any, Literal, Optional, Tuple, Union

from .... import _dlpack, _front
from ...._front import check_host_offsets, is_torch, state_layout
from ...._options import BACKWARD_NAMES, INPUT_NAMES, integer, make_options, refuse_head_first
from ...._shapes import CHUNK_SIZE, chunk_count
from .cp import FLACPContext, FlashQLACPContext, build_cp_context
from .cp.context import apply_context, refuse_several_cards

__all__ = [
    "CHUNK_SIZE",
    "FLACPContext",
    "FlashQLACPContext",
    "build_cp_context",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
]


def chunk_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    scale: Optional[float] = None,
    initial_state: Optional[Any] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    state_v_first: bool = False,
    cu_seqlens: Optional[Any] = None,
    cu_seqlens_cpu: Optional[Any] = None,
    chunk_indices: Optional[Any] = None,
    cp_context: Optional[Any] = None,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    cp_tolerance: Optional[float] = None,
    force_intra_cp: bool = False,
    head_first: bool = False,
    enable_fwd_cp_cache: bool = True,
    chunk_size: int = 64,
    transpose_state_layout: Optional[bool] = None,
) -> Tuple[Any, Optional[Any]]:
    """Gated delta rule attention over whole sequences, differentiable in q, k, v, g, beta, initial_state, A_log,
    dt_bias.

    Per sequence and value head, with key head `i // (Hv / Hq)` for value head i (token recurrence, docs/math.md):

        S~ = exp(g_t) S;  u = beta_t (v_t - S~^T k_t);  S = S~ + k_t u^T;  o_t = scale S^T q_t

    Source: "Gated Delta Networks: Improving Mamba2 with Delta Rule", arXiv 2412.06464.

    Args:
        q, k: [B, T, Hq, K], K from 1 to 256; bfloat16, float16, float32, or float64 on the CPU; equal dtypes; any
            strides.
        v: [B, T, Hv, V], V from 1 to 256, Hv a multiple of Hq; dtype as q.
        g: [B, T, Hv] float, natural logarithm of the decay per token (0: none, and None is 0 everywhere). Values below
            -80 count as -80. With `use_gate_in_kernel` the raw gate.
        beta: [B, T, Hv] float, writing strength; None is 1 everywhere. With `use_beta_sigmoid_in_kernel` raw.
        scale: factor on q; None: K ** -0.5. 0.0 is 0.0.
        initial_state: [N, Hv, K, V] float (N = B, or sequences in cu_seqlens); None: zeros.
        output_final_state: also return the states after the last tokens.
        use_qk_l2norm_in_kernel: q and k are divided by sqrt(sum x^2 + 1e-6) over their last dimension.
        use_beta_sigmoid_in_kernel: beta is sigmoid(beta); with `allow_neg_eigval`, 2 sigmoid(beta).
        use_gate_in_kernel: g is -exp(A_log) softplus(g + dt_bias).
        A_log, dt_bias: [Hv] float, with `use_gate_in_kernel`; dt_bias is optional.
        state_v_first: states are laid out [N, Hv, V, K].
        cu_seqlens: [N + 1] int32 or int64 on q's device: offsets of N sequences packed in B = 1. Lengths of zero are
            allowed; tokens after the last offset give zeros.
        cu_seqlens_cpu, chunk_indices: accepted, no effect: plans are made on the device. With FLASH_QLA_CHECK=1 a
            cu_seqlens_cpu that differs from cu_seqlens is refused.
        cp_context: a context of build_cp_context(), FLA or FlashQLA; its cu_seqlens replace the call's. Of several
            cards: all ranks of its group make the call, each on its own tokens, and sequences go on from rank to rank.
            A row of initial_state counts, and has a gradient, where its sequence begins; a row of final_state where it
            ends; all other rows are ignored, zero, and have zero gradients. Gradients of A_log and dt_bias are those of
            this rank's tokens. With FLASH_QLA_CHECK=1 the ranks first compare what they were called with.
        auto_cp: whether a sequence may be cut into segments computed side by side. True: planned from the whole batch.
            False: a sequence's bits depend on nothing but the sequence. "invariant": planned from its length alone.
        cp_tolerance: largest part of a state, relative to the largest norm it has had, that a cut may drop (None:
            1.2e-7).
        force_intra_cp: cut wherever that is possible (tests).
        head_first: must be False.
        enable_fwd_cp_cache: accepted, no effect: the backward pass needs no cache of a cut.
        chunk_size: accepted, no effect: any positive integer; chunks have 64 tokens.
        transpose_state_layout: FLA's older name of state_v_first; gives a DeprecationWarning.

    Returns:
        o: [B, T, Hv, V], dtype and device of q.
        final_state: [N, Hv, K, V] float32 (float64 for float64 inputs), or None.

    Under autocast, q, k, v of unequal dtypes are cast to autocast's dtype. Gradients have their input's dtype; a second
    derivative is refused.

    Raises:
        ValueError, TypeError: a rule above is broken; the message names operation, argument, rule and what was given.
        NotImplementedError: no path of this build or machine computes the call (`flash_qla.explain` tells why).
        RuntimeError: a rank of cp_context failed, or did not come within the time-out of its group.
    """
    operation = "chunk_gated_delta_rule"
    refuse_head_first(operation, head_first)
    if chunk_size != CHUNK_SIZE:
        integer(operation, "chunk_size", chunk_size, 1)
    if transpose_state_layout is not None:
        state_v_first = state_layout(operation, state_v_first, transpose_state_layout)
    cu_seqlens, force_intra_cp, ranks = apply_context(operation, cp_context, cu_seqlens, force_intra_cp)
    options = make_options(
        operation,
        scale,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        auto_cp,
        force_intra_cp,
        cp_tolerance,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    on_torch = is_torch(operation, INPUT_NAMES, inputs)
    if ranks is not None:
        if not on_torch:
            refuse_several_cards(operation, ranks)
        return _front.parts_front.chunk_of_context(options, cp_context, ranks, inputs, bool(output_final_state))
    check_host_offsets(operation, q, cu_seqlens, cu_seqlens_cpu)
    if on_torch:
        return _front.torch_front.chunk(options, *inputs, bool(output_final_state))
    return _dlpack.forward(options, False, inputs, bool(output_final_state))


def chunk_gated_delta_rule_fwd(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    scale: Optional[float] = None,
    initial_state: Optional[Any] = None,
    cu_seqlens: Optional[Any] = None,
    output_final_state: bool = True,
    output_h: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    state_v_first: bool = False,
    enable_fwd_cp_cache: Optional[bool] = None,
    cp_context: Optional[Any] = None,
    is_train: Optional[bool] = None,
    cu_seqlens_cpu: Optional[Any] = None,
) -> Tuple[Any, ...]:
    """Forward pass with what the backward pass and state caches need. No gradients are recorded.

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream.

    Args:
        q, k, v, g, beta, scale, initial_state, cu_seqlens, auto_cp, state_v_first, cp_context: see
            chunk_gated_delta_rule().
        output_final_state: also return final_state.
        output_h: also return h.
        enable_fwd_cp_cache: None: five values are returned. True or False: six, the last one the cache that some
            callers hand to the backward pass; this library needs none, so it is None.
        is_train: accepted, no effect: forward and backward plan alike.
        cu_seqlens_cpu: [N + 1] offsets on the host (a CPU tensor, array or list), those of cu_seqlens (which
            FLASH_QLA_CHECK=1 verifies): h.shape[1] is then the exact number of chunks.

    Returns:
        g: [B, T, Hv] float32, natural-log decay (clamped at -80 per token) summed from each chunk's start; chunks have
            64 tokens. float64 for float64 inputs.
        A: [B, T, Hv, 64], dtype of k: row t of (I + strict_lower(diag(beta) K K^T))^-1 of its chunk (the UT transform
            of docs/math.md).
        o: [B, T, Hv, V], dtype of q.
        h: [B, chunks, Hv, K, V] ([.., V, K] with state_v_first), dtype of k: the state at each chunk's start. chunks is
            ceil(T / 64); with cu_seqlens it is floor(T / 64) + N, sequence by sequence, zeros after the last chunk. Or
            None.
        final_state: [N, Hv, K, V] float32, or None.
        cp_cache: None; only with enable_fwd_cp_cache given.

    Raises:
        ValueError, TypeError, NotImplementedError: as chunk_gated_delta_rule().
    """
    operation = "chunk_gated_delta_rule_fwd"
    cu_seqlens, force_intra_cp, ranks = apply_context(operation, cp_context, cu_seqlens, False)
    refuse_several_cards(operation, ranks)
    options = make_options(operation, scale, state_v_first, auto_cp=auto_cp, force_intra_cp=force_intra_cp)
    inputs = (q, k, v, g, beta, None, None, cu_seqlens, initial_state)
    on_torch = is_torch(operation, INPUT_NAMES, inputs)
    check_host_offsets(operation, q, cu_seqlens, cu_seqlens_cpu)
    chunks = chunk_count(operation, q.shape, cu_seqlens, cu_seqlens_cpu) if output_h else None
    if on_torch:
        found = _front.torch_front.chunk_fwd(
            options, q, k, v, g, beta, cu_seqlens, initial_state, bool(output_final_state), chunks
        )
    else:
        found = _dlpack.chunk_fwd(options, inputs, bool(output_final_state), chunks)
    return found if enable_fwd_cp_cache is None else (*found, None)


def chunk_gated_delta_rule_bwd(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any],
    beta: Optional[Any],
    A: Optional[Any],
    do: Optional[Any],
    dht: Optional[Any] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Any] = None,
    cu_seqlens: Optional[Any] = None,
    state_v_first: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    cp_cache: Optional[Any] = None,
    cp_context: Optional[Any] = None,
) -> Tuple[Any, ...]:
    """Gradients of chunk_gated_delta_rule_fwd().

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream.

    Args:
        q, k, v, beta, scale, initial_state, cu_seqlens, state_v_first, auto_cp, cp_context: as given to the forward
            call.
        g: [B, T, Hv] the cumsum that the forward call returned, or None if it was given none.
        A: [B, T, Hv, 64] as the forward call returned it; None: computed again.
        do: [B, T, Hv, V] float, gradient of o, any strides; None: zero.
        dht: [N, Hv, K, V] float, gradient of final_state, any strides; None: zero.
        cp_cache: accepted, no effect.

    Returns:
        dq, dk, dv, db, dg, dh0: gradients of q, k, v, beta, the log decay (not of its cumsum) and initial_state, in the
        shapes and dtypes of q, k, v, beta, g; dh0 in float32. dq and dk are summed over the value heads of a key head
        in float32 and rounded once. None for beta, g or initial_state that is None.

    Raises:
        ValueError, TypeError, NotImplementedError: as chunk_gated_delta_rule().
    """
    operation = "chunk_gated_delta_rule_bwd"
    cu_seqlens, force_intra_cp, ranks = apply_context(operation, cp_context, cu_seqlens, False)
    refuse_several_cards(operation, ranks)
    options = make_options(operation, scale, state_v_first, auto_cp=auto_cp, force_intra_cp=force_intra_cp)
    inputs = (q, k, v, g, beta, None, None, cu_seqlens, initial_state)
    if is_torch(operation, BACKWARD_NAMES, (*inputs, A, do, dht)):
        return _front.torch_front.chunk_bwd(options, q, k, v, g, beta, A, do, dht, cu_seqlens, initial_state)
    return _dlpack.chunk_bwd(options, inputs, A, do, dht)
