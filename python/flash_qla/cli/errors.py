"""The error metric of all checks: relative L2 against the oracle, of a whole tensor and of each head."""

from __future__ import annotations

import math
from typing import Dict, List, Optional, Tuple

import torch

# Bounds on the relative L2 error against fp64, by tensor. For bfloat16 and float16 inputs they are a few roundings of
# the inputs' 8-bit mantissa, with the sums of dbeta and dg over the head dimension on top.
_HALF_BOUNDS: Dict[str, float] = {
    **dict.fromkeys(("o", "final_state"), 5e-3),
    **dict.fromkeys(("dq", "dk", "dv", "dh0"), 8e-3),
    **dict.fromkeys(("dbeta", "dg", "dA_log", "ddt_bias"), 1.5e-2),
}
_FLOAT_BOUND = 1e-5

# A tensor whose norm is below this times sqrt(elements) is compared absolutely, at this: it is zero but for rounding.
_TINY = 1e-6

# Which dimension counts heads.
_HEAD_DIM: Dict[str, int] = {
    **dict.fromkeys(("o", "dq", "dk", "dv", "dg", "dbeta"), 2),
    **dict.fromkeys(("final_state", "dh0"), 1),
    **dict.fromkeys(("dA_log", "ddt_bias"), 0),
}


def bound(name: str, dtype: torch.dtype) -> float:
    """Largest relative L2 error of tensor `name` for inputs of `dtype`."""
    return _HALF_BOUNDS[name] if dtype in (torch.bfloat16, torch.float16) else _FLOAT_BOUND


def _relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    size = math.sqrt(max(reference.numel(), 1))
    norm = reference.norm().item()
    return difference.norm().item() / (norm if not norm < _TINY * size else size)


def _parts(name: str, found: torch.Tensor, reference: torch.Tensor) -> List[Tuple[torch.Tensor, torch.Tensor]]:
    """Difference and reference of the whole tensor, then of each head; empty where NaN or infinity stand in other places,
    or the shapes differ."""
    if found.shape != reference.shape:
        return []
    a, b = found.detach().double(), reference.detach().double()
    if not torch.equal(a.isnan(), b.isnan()) or not torch.equal(a.isinf(), b.isinf()):
        return []
    finite = b.isfinite()
    b = b.where(finite, 0.0)
    difference = a.where(finite, 0.0) - b
    dim = _HEAD_DIM[name]
    if dim == 0:  # one number a head: no norm to be relative to
        return [(difference, b)] * 2
    return [(difference, b), *zip(difference.unbind(dim), b.unbind(dim))]


def relative_l2(name: str, found: torch.Tensor, reference: torch.Tensor) -> Tuple[float, float]:
    """Errors of the whole tensor and of its worst head. Infinite where NaN or infinity stand in other places, or the
    shapes differ."""
    errors = [_relative(*part) for part in _parts(name, found, reference)]
    return (errors[0], max(errors[1:], default=0.0)) if errors else (math.inf, math.inf)


def head_errors(name: str, found: torch.Tensor, reference: torch.Tensor) -> List[float]:
    """Error of each head, at least one number; infinite as relative_l2()."""
    return [_relative(*part) for part in _parts(name, found, reference)][1:] or [math.inf]


def first_failure(
    found: Dict[str, torch.Tensor], reference: Dict[str, torch.Tensor], dtype: torch.dtype
) -> Tuple[Dict[str, float], Optional[str]]:
    """Relative L2 error of each tensor, and a sentence on the first one out of bounds (None: all are within)."""
    errors: Dict[str, float] = {}
    failure: Optional[str] = None
    for name in reference:
        whole, head = relative_l2(name, found[name], reference[name])
        errors[name] = whole
        limit = bound(name, dtype)
        if failure is None and not max(whole, head) <= limit:
            failure = f"{name}: relative L2 {whole:.1e}, worst head {head:.1e}, bound {limit:.1e}"
    return errors, failure
