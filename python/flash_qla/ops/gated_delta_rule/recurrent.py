"""The token-by-token forward pass: decode and short steps."""

from __future__ import annotations

from typing import Any, Optional, Tuple

from ... import _dlpack, _front
from ..._front import is_torch, state_layout
from ..._options import INPUT_NAMES, make_options

__all__ = ["fused_recurrent_gated_delta_rule"]


def fused_recurrent_gated_delta_rule(
    q: Any,
    k: Any,
    v: Any,
    g: Optional[Any] = None,
    gk: Optional[Any] = None,
    gv: Optional[Any] = None,
    beta: Optional[Any] = None,
    scale: Optional[float] = None,
    initial_state: Optional[Any] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Optional[Any] = None,
    dt_bias: Optional[Any] = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Optional[Any] = None,
    *,
    transpose_state_layout: Optional[bool] = None,
) -> Tuple[Any, Optional[Any]]:
    """The gated delta rule token by token, for decode and short steps: forward only. Parameters in FLA's order.

    Takes torch tensors, numpy arrays or other DLPack arrays, and returns the same kind; on CUDA, work on other arrays
    than torch's is queued on the default stream. The recurrence, shapes, dtypes and options are those of
    chunk_gated_delta_rule(); so is the source, arXiv 2412.06464.

    Args:
        q, k: [B, T, Hq, K]. v: [B, T, Hv, V]. g, beta: [B, T, Hv]; g None: no decay; beta None: ones. q, k, v may be of
            several of the dtypes float32, bfloat16 and float16: they are then converted to float32, exactly, at the
            cost of a float32 copy of each and of o, and of the float32 path's time.
        gk, gv: decay per key or value channel; must be None.
        initial_state: [N, Hv, K, V] float, or [N, Hv, V, K] with state_v_first; None: zeros.
        transpose_state_layout: FLA's older name of state_v_first; gives a DeprecationWarning.

    Returns:
        o: [B, T, Hv, V], dtype of v.
        final_state: [N, Hv, K, V] float32, or None without output_final_state.

    Raises:
        NotImplementedError: gk or gv is given; or a gradient of o or final_state is asked for, in backward.
        ValueError, TypeError: as chunk_gated_delta_rule().
    """
    operation = "fused_recurrent_gated_delta_rule"
    for name, decay in (("gk", gk), ("gv", gv)):
        if decay is not None:
            raise NotImplementedError(
                f"{operation}: {name} must be None (it was given): decay per channel is not supported; use g"
            )
    if transpose_state_layout is not None:
        state_v_first = state_layout(operation, state_v_first, transpose_state_layout)
    options = make_options(
        operation,
        scale,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    if is_torch(operation, INPUT_NAMES, inputs):
        return _front.torch_front.recurrent(options, *inputs, bool(output_final_state))
    return _dlpack.forward(options, True, inputs, bool(output_final_state))
