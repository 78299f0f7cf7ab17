"""Which front end a call goes to, and the type checks that both share."""

from __future__ import annotations

from typing import Any, Sequence

try:
    import torch
except ImportError:  # numpy and other DLPack arrays work without it
    torch = None  # type: ignore[assignment]

torch_front: Any = None
# What most arguments are. Tensor subclasses are told from other things one by one.
_USUAL: frozenset = frozenset()
if torch is not None:
    from . import _torch

    torch_front = _torch
    _USUAL = _torch.PLAIN_TYPES


# The inputs that all operations share, in the order of the native calls.
INPUT_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")

def is_torch(operation: str, names: Sequence[str], values: Sequence[Any]) -> bool:
    """True for a call on torch tensors, False for one on DLPack arrays; TypeError for a mixture or anything else.

    `values` begins with q, k and v. None (an argument left out) is passed over.
    """
    q, k, v, *_ = values
    if _USUAL.issuperset(map(type, values)) and q is not None and k is not None and v is not None:
        return True
    on_torch = torch is not None and isinstance(values[0], torch.Tensor)
    for name, value in zip(names, values):
        if value is None:
            continue
        if on_torch and not isinstance(value, torch.Tensor):
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) must be a torch.Tensor, as q is")
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) must be a tensor or an array")
    for name, value in zip(names[:3], values[:3]):
        if value is None:
            raise TypeError(f"{operation}: {name} (None) must be a tensor or an array")
    return on_torch
