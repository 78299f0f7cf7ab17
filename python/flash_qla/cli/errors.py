"""The error metric of all checks, that of docs/numerics.md: relative L2 against the oracle, of a whole tensor and of
each head."""

from __future__ import annotations

import math
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch

# Bounds on the relative L2 error against fp64, by tensor. For bfloat16 and float16 inputs they are a few roundings of
# the inputs' 8-bit mantissa, with the sums of dbeta and dg over the head dimension on top.
_HALF_BOUNDS: Dict[str, float] = {
    **dict.fromkeys(("o", "final_state", "h", "checkpoints"), 5e-3),
    **dict.fromkeys(("dq", "dk", "dv", "dh0"), 8e-3),
    **dict.fromkeys(("dbeta", "dg", "dA_log", "ddt_bias"), 1.5e-2),
}
_FLOAT_BOUND = 1e-5

# A reference whose norm is below this times sqrt(elements) is compared absolutely, at that: it is zero but for
# rounding.
TINY = 1e-6

# Which dimension counts heads.
_HEAD_DIM: Dict[str, int] = {
    **dict.fromkeys(("o", "dq", "dk", "dv", "dg", "dbeta"), 2),
    **dict.fromkeys(("final_state", "dh0", "h", "checkpoints"), 1),
    **dict.fromkeys(("dA_log", "ddt_bias"), 0),
}


def bound(name: str, dtype: torch.dtype) -> float:
    """Largest relative L2 error of tensor `name` for inputs of `dtype`."""
    return _HALF_BOUNDS[name] if dtype in (torch.bfloat16, torch.float16) else _FLOAT_BOUND


class Error(NamedTuple):
    """Of a tensor or a head: relative L2, or where the reference is next to nothing `absolute`, in units of the norm
    below which it is that."""

    value: float
    absolute: bool

    def within(self, limit: float) -> bool:
        """`limit` is for relative errors; absolute ones may be 1."""
        return self.value <= (1.0 if self.absolute else limit)


def _errors(difference: torch.Tensor, reference: torch.Tensor, kept: Sequence[int]) -> List[Error]:
    """Of everything that has the same place in the dimensions `kept`; a few operations for all of them."""
    others = [dim for dim in range(reference.ndim) if dim not in kept]
    off, norms = (torch.linalg.vector_norm(t, dim=others).flatten().tolist() for t in (difference, reference))
    floor = TINY * math.sqrt(reference.numel() / max(len(norms), 1))
    return [
        Error(d / floor, True) if norm < floor else Error(d / norm if norm else 0.0, False)
        for d, norm in zip(off, norms)
    ]


def errors_of(name: str, found: torch.Tensor, reference: torch.Tensor) -> List[Error]:
    """Errors of the whole tensor, then of each head: at least two. Infinite where NaN or infinities stand in other
    places, or the shapes differ."""
    nowhere = [Error(math.inf, False)] * 2
    if found.shape != reference.shape:
        return nowhere
    a, b = found.detach().double(), reference.detach().double()
    if not all(torch.equal(test(a), test(b)) for test in (torch.isnan, torch.isposinf, torch.isneginf)):
        return nowhere
    finite = b.isfinite()
    b = b.where(finite, 0.0)
    difference = a.where(finite, 0.0) - b
    whole, dim = _errors(difference, b, []), _HEAD_DIM[name]
    if dim == 0:  # one number a head: no norm to be relative to
        return whole * 2
    return whole + _errors(difference, b, [dim])


def head_errors(name: str, found: torch.Tensor, reference: torch.Tensor) -> List[float]:
    """The relative error of each head that has one; infinite as errors_of()."""
    return [error.value for error in errors_of(name, found, reference)[1:] if not error.absolute]


def first_failure(
    found: Dict[str, torch.Tensor], reference: Dict[str, torch.Tensor], dtype: torch.dtype
) -> Tuple[Dict[str, Optional[float]], Optional[str]]:
    """Relative L2 error of each tensor (None: it has none), and a sentence on the first one out of bounds (None: all
    are within)."""
    errors: Dict[str, Optional[float]] = {}
    failure: Optional[str] = None
    for name in reference:
        whole, *heads = errors_of(name, found[name], reference[name])
        errors[name] = None if whole.absolute else whole.value
        limit = bound(name, dtype)
        for part, error in (("", whole), *((f" head {i}", head) for i, head in enumerate(heads))):
            if failure is None and not error.within(limit):
                failure = f"{name}{part}: {_describe(error, limit)}"
    return errors, failure


def _describe(error: Error, limit: float) -> str:
    if error.absolute:
        return f"error {error.value * TINY:.1e} (root mean square) of a reference that is zero, bound {TINY:.1e}"
    return f"relative L2 {error.value:.1e}, bound {limit:.1e}"
