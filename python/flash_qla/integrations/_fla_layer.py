"""What fla 0.6 dispatches around the delta rule: its short convolution and its gated norm, computed by this library.

fla makes the autograd functions around these itself, so each entry is one pass, forward or backward, without recording
anything. A verifier says why a call stays with fla; it looks at metadata alone."""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch

from .. import _ffi
from .. import _torch_layer as layer
from .._options import chosen_path
from .._torch import _allocator

__all__ = ["ENTRIES"]

_CONVOLUTION = "fla.modules.causal_conv1d"
_NORM = "fla.modules.norm.fused_norm_gate"

# Filled by _entry: (module of fla, name of its function) -> (implementation, why a call stays with fla).
ENTRIES: Dict[Tuple[str, str], Tuple[Callable[..., Any], Callable[..., Optional[str]]]] = {}


def _entry(module: str, decline: Callable[..., Optional[str]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        ENTRIES[module, function.__name__] = function, decline
        return function

    return add


def _decline_any_convolution(
    x: Any, weight: Any, residual: Any, initial_state: Any, activation: Optional[str]
) -> Optional[str]:
    if weight is None:
        return "needs a weight"
    if weight.dim() != 2 or not 1 <= weight.shape[1] <= 8:
        return f"needs weights [C, W] with W from 1 to 8 ({list(weight.shape)})"
    if activation not in (None, "silu", "swish"):
        return f"does not know the activation {activation!r}"
    if initial_state is not None and initial_state.shape[-1] != weight.shape[1]:
        return f"needs states of W = {weight.shape[1]} inputs ({list(initial_state.shape)})"
    if residual is not None and residual.dtype != x.dtype:
        return f"needs a residual of x's dtype ({residual.dtype}, {x.dtype})"
    return None


def _decline_convolution(x: Any, weight: Any, bias: Any, residual: Any, initial_state: Any = None,
                         output_final_state: bool = False, activation: Optional[str] = None,
                         **rest: Any) -> Optional[str]:  # fmt: skip
    return _decline_any_convolution(x, weight, residual, initial_state, activation)


def _decline_backward(x: Any, dy: Any, dht: Any, weight: Any = None, bias: Any = None, residual: Any = None,
                      initial_state: Any = None, activation: Optional[str] = None,
                      **rest: Any) -> Optional[str]:  # fmt: skip
    return _decline_any_convolution(x, weight, residual, initial_state, activation)


def _decline_update(x: Any, cache: Any, residual: Any = None, weight: Any = None, bias: Any = None,
                    activation: Optional[str] = None) -> Optional[str]:  # fmt: skip
    if residual is not None:
        return "does not take a residual"
    if x.dim() not in (2, 3):
        return f"needs x of 2 or 3 dimensions ({list(x.shape)})"
    return _decline_any_convolution(x, weight, None, cache, activation)


def _decline_norm(x: Any, g: Any, weight: Any, bias: Any, activation: str = "swish", eps: float = 1e-5,
                  residual: Any = None, out_dtype: Any = None, residual_dtype: Any = None,
                  is_rms_norm: bool = False) -> Optional[str]:  # fmt: skip
    if out_dtype not in (None, x.dtype) or residual is not None or residual_dtype not in (None, x.dtype):
        return "computes neither a residual nor another dtype than x's"
    return _decline_any_norm(x, g, activation, is_rms_norm)


def _decline_norm_backward(dy: Any, x: Any, g: Any, weight: Any, bias: Any, activation: str = "swish",
                           eps: float = 1e-5, mean: Any = None, rstd: Any = None, dresidual: Any = None,
                           has_residual: bool = False, is_rms_norm: bool = False, x_dtype: Any = None,
                           recompute_output: bool = False) -> Optional[str]:  # fmt: skip
    if dresidual is not None or has_residual or x_dtype not in (None, x.dtype):
        return "computes neither a residual nor another dtype than x's"
    if recompute_output:
        return "does not return the output again"
    if dy.dtype != x.dtype:
        return f"needs a gradient of x's dtype ({dy.dtype}, {x.dtype})"
    return _decline_any_norm(x, g, activation, is_rms_norm)


def _decline_any_norm(x: Any, g: Any, activation: str, is_rms_norm: bool) -> Optional[str]:
    if not is_rms_norm:
        return "computes the norm without a mean alone"
    if activation not in ("swish", "silu", "sigmoid"):
        return f"does not know the activation {activation!r}"
    return None if g.dtype == x.dtype else f"needs a gate of x's dtype ({g.dtype}, {x.dtype})"


def _config(operation: str, activation: Optional[str]) -> Any:
    return layer.ConvConfig(operation, chosen_path(), layer.ACTIVATIONS[activation], layer.CHANNELS_LAST, 0, 0)


def _tokens(x: Any, weight: Any) -> Any:
    """x as [B, T, C]: fla's callers may hold heads and their channels apart."""
    return x if x.shape[-1] == weight.shape[0] else x.flatten(2)


@_entry(_CONVOLUTION, _decline_convolution)
def causal_conv1d_fwd(
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    initial_state: Any = None,
    output_final_state: bool = False,
    activation: Optional[str] = None,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> Tuple[Any, Any]:
    """y in x's shape, and the last W inputs of each sequence in x's dtype, or None."""
    config = _config("causal_conv1d", activation)
    if residual is not None:
        residual = _tokens(residual, weight)
    inputs = (_tokens(x, weight), weight, bias, residual, initial_state, cu_seqlens, None)
    entries = weight.shape[1] if output_final_state else -1
    found = layer.compute("conv_forward", config.operation, inputs, (*config, *inputs, entries))
    return found[0].reshape(x.shape), found[1].to(x.dtype) if output_final_state else None


@_entry(_CONVOLUTION, _decline_backward)
def causal_conv1d_bwd(
    x: Any,
    dy: Any,
    dht: Any,
    weight: Any = None,
    bias: Any = None,
    residual: Any = None,
    initial_state: Any = None,
    activation: Optional[str] = None,
    cu_seqlens: Any = None,
    cu_seqlens_cpu: Any = None,
    chunk_indices: Any = None,
    chunk_size: int = 64,
    layout_fallback: bool = False,
) -> Tuple[Any, ...]:
    """(dx, dweight, dbias, dresidual, dinitial_state), a None for each input that is None."""
    config = _config("causal_conv1d", activation)
    # The residual's gradient is dy itself: nothing to compute.
    inputs = (_tokens(x, weight), weight, bias, None, initial_state, cu_seqlens, None)
    tensors = (*inputs, None if dy is None else _tokens(dy, weight), dht)
    wanted = [t is not None for t in inputs[:5]]
    found = iter(layer.compute("conv_backward", config.operation, tensors, (*config, *tensors, wanted)))
    dx, dweight, dbias, _, dinitial_state = (next(found) if want else None for want in wanted)
    assert dx is not None
    return dx.reshape(x.shape), dweight, dbias, None if residual is None else dy, dinitial_state


@_entry(_CONVOLUTION, _decline_update)
def causal_conv1d_update(
    x: Any,
    cache: Any,
    residual: Any = None,
    weight: Any = None,
    bias: Any = None,
    activation: Optional[str] = None,
) -> Tuple[Any, Any]:
    """One token of each sequence: x [N, C], [1, N, C] or [N, 1, C]; the cache [N, C, W] is written."""
    tokens = x.reshape(-1, weight.shape[0]).unsqueeze(1)
    tensors = (tokens, weight, bias, cache, *(None,) * 10)
    y = layer.conv_with_states(_config("causal_conv1d_update", activation), True, -1, tensors, None)
    return y.reshape(x.shape), cache


def _norm_leading(x: Any, activation: str, eps: float) -> tuple:
    config = layer.NormConfig("rms_norm_gated", chosen_path(), eps, layer.ACTIVATIONS[activation], False)
    return layer.norm_leading(config, x)


@_entry(_NORM, _decline_norm)
def layer_norm_gated_fwd(
    x: Any,
    g: Any,
    weight: Any,
    bias: Any,
    activation: str = "swish",
    eps: float = 1e-5,
    residual: Any = None,
    out_dtype: Any = None,
    residual_dtype: Any = None,
    is_rms_norm: bool = False,
) -> Tuple[Any, Any, Any, Any]:
    """(y, None, 1 / rms of each row, x): fla saves x as what was normalised."""
    y, rstd = layer.contiguous_like(x), x.new_empty(x.shape[0], dtype=torch.float32)
    _ffi.call("norm_gated", _allocator(x), (*_norm_leading(x, activation, eps), x, g, weight, bias, y, rstd))
    return y, None, rstd, x


@_entry(_NORM, _decline_norm_backward)
def layer_norm_gated_bwd(
    dy: Any,
    x: Any,
    g: Any,
    weight: Any,
    bias: Any,
    activation: str = "swish",
    eps: float = 1e-5,
    mean: Any = None,
    rstd: Any = None,
    dresidual: Any = None,
    has_residual: bool = False,
    is_rms_norm: bool = False,
    x_dtype: Any = None,
    recompute_output: bool = False,
) -> Tuple[Any, ...]:
    """(dx, dg, dweight, dbias, None)."""
    gradients = [None if t is None else layer.contiguous_like(t) for t in (x, g, weight, bias)]
    leading = _norm_leading(x, activation, eps)
    _ffi.call("norm_gated_backward", _allocator(x), (*leading, x, g, weight, bias, dy, *gradients))
    return (*gradients, None)
