"""The core of a Gated Delta Network layer: everything between its input projections and its output projection."""

from __future__ import annotations

from typing import Any, Literal, Optional, Tuple, Union

from .. import _front
from .._front import require_torch
from .._options import chosen_path, integer, make_options, number

__all__ = ["gated_delta_net"]

_GATES = {"silu": 1, "swish": 1, "sigmoid": 2}
_ACTIVATIONS = {None: 0, "silu": 1, "swish": 1}


def gated_delta_net(
    qkv: Union[Any, Tuple[Any, Any, Any]],
    z: Optional[Any],
    a: Any,
    b: Optional[Any],
    *,
    conv_weight: Any,
    conv_bias: Optional[Any] = None,
    A_log: Any,
    dt_bias: Optional[Any],
    norm_weight: Optional[Any],
    norm_eps: float,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    layout: str = "joined",
    activation: Optional[str] = "silu",
    gate_activation: str = "silu",
    allow_neg_eigval: bool = False,
    scale: Optional[float] = None,
    cu_seqlens: Optional[Any] = None,
    seq_idx: Optional[Any] = None,
    conv_state: Optional[Any] = None,
    recurrent_state: Optional[Any] = None,
    state_v_first: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    recompute: bool = False,
) -> Any:
    """Convolution with SiLU, l2norm of q and k, gates, gated delta rule and gated norm of a layer, as one operation:
    three native calls, and as many in its backward pass.

    Without states differentiable in qkv, z, a, b, conv_weight, conv_bias, A_log, dt_bias and norm_weight. With states
    forward only, and both are read and written in place: one token of each sequence is a decode step. The formulas are
    those of causal_conv1d(), chunk_gated_delta_rule() and rms_norm_gated(). Source: "Gated Delta Networks",
    arXiv 2412.06464.

    Args:
        qkv: [B, T, 2 Hq K + Hv V] with layout "joined": all heads of q, then k, then v. "separate": a tuple of three,
            [B, T, Hq K], [B, T, Hq K] and [B, T, Hv V]. "interleaved": [B, T, Hq (2 K + 2 V Hv / Hq)], by key head q,
            k, the values of its heads and their z. bfloat16, float16, float32, or float64 on the CPU.
        z: [B, T, Hv V] or [B, T, Hv, V], gate of the norm; None with "interleaved".
        a: [B, T, Hv], raw gate: the log decay is -exp(A_log) softplus(a + dt_bias). With "interleaved"
            [B, T, Hq (2 Hv / Hq)], by key head b, then a.
        b: [B, T, Hv], the step size before its sigmoid; None with "interleaved".
        conv_weight: [2 Hq K + Hv V, W] float, W from 1 to 8; conv_bias: [2 Hq K + Hv V] float or None.
        A_log, dt_bias: [Hv] float; dt_bias may be None.
        norm_weight: [V] float or None; norm_eps: added to the mean of squares.
        num_k_heads, num_v_heads, head_k_dim, head_v_dim: Hq, Hv, K, V.
        activation: of the convolution, None or "silu". gate_activation: of z, "silu" or "sigmoid".
        allow_neg_eigval: the step size is doubled.
        scale: factor on q; None: K ** -0.5.
        cu_seqlens: [N + 1] int32 or int64, offsets of sequences packed in B = 1: bounds convolution and delta rule.
        seq_idx: [B, T] int32 or int64: bounds the convolution alone.
        conv_state: [N, 2 Hq K + Hv V, L] float, L >= W - 1, newest input last. Written.
        recurrent_state: [N, Hv, K, V] float32, bfloat16 or float16 ([N, Hv, V, K] with state_v_first), contiguous.
            Written. Both states or neither.
        auto_cp: as chunk_gated_delta_rule().
        recompute: keep less for the backward pass, which runs the convolution again.

    Under autocast, z, a and b get qkv's dtype.

    Returns:
        [B, T, Hv V], dtype of qkv.

    Raises:
        ValueError, TypeError, NotImplementedError: as those operations; or a gradient is asked for through a call with
            states.
    """
    operation = "gated_delta_net"
    if activation not in _ACTIVATIONS:
        raise ValueError(f'{operation}: activation ({activation!r}) must be None, "silu" or "swish"')
    if gate_activation not in _GATES:
        raise ValueError(f'{operation}: gate_activation ({gate_activation!r}) must be "silu", "swish" or "sigmoid"')
    if layout not in ("joined", "interleaved", "separate"):
        raise ValueError(f'{operation}: layout ({layout!r}) must be "joined", "interleaved" or "separate"')
    if layout == "separate":
        if not isinstance(qkv, (tuple, list)) or len(qkv) != 3:
            raise ValueError(f'{operation}: qkv ({type(qkv).__name__}) must be a tuple of three with layout "separate"')
        x, k, v = qkv
    else:
        x, k, v = qkv, None, None
    inputs = (x, k, v, z, a, b, conv_weight, conv_bias, A_log, dt_bias, norm_weight, cu_seqlens, seq_idx)
    names = ("qkv", "k", "v", "z", "a", "b", "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
    states = (conv_state, recurrent_state)
    all_names = (*names, "cu_seqlens", "seq_idx", "conv_state", "recurrent_state")
    require_torch(operation, all_names, (*inputs, *states))
    needed = [("a", a), ("conv_weight", conv_weight), ("A_log", A_log)]
    if layout != "interleaved":
        needed += [("z", z), ("b", b)]
    for name, value in needed:
        if value is None:
            raise TypeError(f"{operation}: {name} (None) must be a torch.Tensor")
    if layout == "interleaved" and (z is not None or b is not None):
        raise ValueError(f'{operation}: z and b (given) must be None with layout "interleaved"')
    if (conv_state is None) != (recurrent_state is None):
        raise ValueError(f"{operation}: conv_state and recurrent_state must both be given, or neither")
    options = make_options(operation, scale, state_v_first, allow_neg_eigval=allow_neg_eigval, auto_cp=auto_cp)
    node = _front.torch_node
    sizes = [
        value if type(value) is int else integer(operation, name, value, 1, 2**31 - 1)
        for name, value in (
            ("num_k_heads", num_k_heads),
            ("num_v_heads", num_v_heads),
            ("head_k_dim", head_k_dim),
            ("head_v_dim", head_v_dim),
        )
    ]
    config = node.NodeConfig(
        operation,
        chosen_path(),
        _ACTIVATIONS[activation],
        _GATES[gate_activation],
        node.LAYOUTS[layout],
        *sizes,
        norm_eps if type(norm_eps) is float else number(operation, "norm_eps", norm_eps),
        bool(allow_neg_eigval),
        options.scale,
        options.state_v_first,
        options.cp_mode,
    )
    node.check_shapes(config, inputs, states)
    return node.gated_delta_net(config, inputs, None if conv_state is None else states, bool(recompute))
