"""The L2 norm of q and k outside of the operations, with its gradient."""

from __future__ import annotations

from typing import Any, Tuple

import torch
from torch import Tensor

__all__ = ["l2norm", "l2norm_bwd", "l2norm_fwd"]


def _computed(x: Tensor) -> Tensor:
    """x in the dtype that sums are kept in: float32, or float64 for float64."""
    return x if x.dtype == torch.float64 else x.float()


def _require_last_dimension(operation: str, dim: int, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if dim not in (-1, x.ndim - 1):
            raise ValueError(f"{operation}: dim ({dim}) must be the last dimension of {name}: -1 or {x.ndim - 1}")
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"{operation}: {name}.stride(-1) ({x.stride(-1)}) must be 1")


def l2norm_fwd(x: Tensor, eps: float = 1e-6, dim: int = -1) -> Tuple[Tensor, Tensor]:
    """x divided by sqrt(sum x^2 + eps) over its last dimension.

    Args:
        x: [.., D] float, contiguous in the last dimension.
        eps: added to the sum of squares.
        dim: the last dimension, as -1 or by its number.

    Returns:
        y: shape and dtype of x; computed in float32 (float64 for float64) and rounded once.
        rstd: x.shape[:-1], float32 (float64): 1 / sqrt(sum x^2 + eps).

    Raises:
        ValueError: another dimension, or other strides.
    """
    _require_last_dimension("l2norm_fwd", dim, x=x)
    wide = _computed(x)
    rstd = wide.square().sum(-1).add(eps).rsqrt()
    y = wide * rstd.unsqueeze(-1)
    # Not y.to() of its own dtype: PyTorch 2.11 compiles an autograd.Function whose result has a second name wrongly.
    return y if y.dtype == x.dtype else y.to(x.dtype), rstd


def l2norm_bwd(y: Tensor, rstd: Tensor, dy: Tensor, eps: float = 1e-6, dim: int = -1) -> Tensor:
    """The gradient of l2norm_fwd() for x: (dy - (dy . y) y) rstd.

    Args:
        y, rstd: as l2norm_fwd() returned them.
        dy: [.., D] float, gradient of y, contiguous in the last dimension.
        eps: accepted, no effect: it is part of rstd.
        dim: the last dimension, as -1 or by its number.

    Returns:
        dx: shape of y, float32 (float64 for float64): the caller rounds it.

    Raises:
        ValueError: another dimension, or other strides.
    """
    _require_last_dimension("l2norm_bwd", dim, y=y, dy=dy)
    y, dy = _computed(y), _computed(dy)
    along = (dy * y).sum(-1, keepdim=True)
    return (dy - along * y) * rstd.unsqueeze(-1)


class _L2Norm(torch.autograd.Function):
    """Saved: y and rstd, no copy of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        y, rstd = l2norm_fwd(x.contiguous(), eps)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Tuple[Tensor, None]:
        y, rstd = ctx.saved_tensors
        return l2norm_bwd(y, rstd, dy.contiguous()).to(y.dtype), None


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x [.., D] divided by sqrt(sum x^2 + eps) over its last dimension, in x's dtype; any strides; differentiable
    once."""
    return _L2Norm.apply(x, eps)
