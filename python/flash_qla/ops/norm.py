"""The gated RMS norm behind the delta rule."""

from __future__ import annotations

from typing import Any, Optional

from .. import _front
from .._front import require_torch
from .._options import chosen_path, number

__all__ = ["rms_norm_gated"]

_ACTIVATIONS = {"silu": 1, "swish": 1, "sigmoid": 2}


def rms_norm_gated(
    x: Any,
    g: Optional[Any],
    weight: Optional[Any],
    bias: Optional[Any] = None,
    activation: str = "swish",
    residual: Optional[Any] = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
    *,
    norm_before_gate: bool = True,
) -> Any:
    """RMS norm over the last dimension with a gate, with parameters in FLA's order; differentiable in x, g, weight and
    bias.

    y = (x r weight + bias) act(g) with r = (mean x^2 + eps)^-1/2; with norm_before_gate=False y = v r weight + bias
    with v = x act(g) and r of v. Computed in float32 (float64 for float64), rounded once. Source: the output norm of
    "Gated Delta Networks", arXiv 2412.06464.

    Args:
        x: [.., V] of up to 4 dimensions, bfloat16, float16, float32, or float64 on the CPU; any strides.
        g: as x, the gate before its activation; None: no gate.
        weight, bias: [V] float; None: ones, zeros.
        activation: "silu", "swish" (the same) or "sigmoid".
        residual, prenorm: must be None and False. residual_in_fp32: no effect.
        eps: added to the mean of squares.
        norm_before_gate: whether the gate comes after the norm, as in all models of this family.

    Returns:
        y: as x, contiguous.

    Raises:
        ValueError, TypeError: a rule above is broken; the message names operation, argument, rule and what was given.
        NotImplementedError: residual or prenorm is given; no path of this build or machine computes the call; or a
            second derivative is asked for, in backward.
    """
    operation = "rms_norm_gated"
    if residual is not None or prenorm:
        given = "residual (given)" if residual is not None else "prenorm (True)"
        raise NotImplementedError(f"{operation}: {given} must be left out: the sum with a residual is not offered")
    if activation not in _ACTIVATIONS:
        raise ValueError(f'{operation}: activation ({activation!r}) must be "silu", "swish" or "sigmoid"')
    inputs = (x, g, weight, bias)
    require_torch(operation, ("x", "g", "weight", "bias"), inputs)
    layer = _front.torch_layer
    config = layer.NormConfig(
        operation,
        chosen_path(),
        number(operation, "eps", eps),
        _ACTIVATIONS[activation],
        not norm_before_gate,
    )
    return layer.rms_norm_gated(config, *inputs)
