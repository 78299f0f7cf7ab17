"""Which front end a call goes to, and the checks that both share."""

from __future__ import annotations

import os
import warnings
from typing import Any, Sequence

from ._shapes import host_offsets

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


def check_host_offsets(operation: str, q: Any, cu_seqlens: Any, cu_seqlens_cpu: Any) -> None:
    """With FLASH_QLA_CHECK=1, refuses a cu_seqlens_cpu that differs from cu_seqlens. Reads the device and waits: not
    under torch.compile, and not while a graph is captured, where the native check refuses the call."""
    if cu_seqlens is None or cu_seqlens_cpu is None or os.environ.get("FLASH_QLA_CHECK") != "1":
        return
    if torch_front is not None and torch_front.is_traced():
        return
    if getattr(cu_seqlens, "is_cuda", False) and torch.cuda.is_current_stream_capturing():
        return
    offsets = host_offsets(operation, q.shape, cu_seqlens, cu_seqlens_cpu)
    for i, (host, device) in enumerate(zip(offsets, cu_seqlens.tolist())):
        if host != device:
            raise ValueError(f"{operation}: cu_seqlens_cpu[{i}] ({host}) must be cu_seqlens[{i}] ({device})")


def state_layout(operation: str, state_v_first: bool, transpose_state_layout: bool) -> bool:
    """state_v_first of a call that names transpose_state_layout, its older name in FLA."""
    if state_v_first:
        raise ValueError(
            f"{operation}: transpose_state_layout ({transpose_state_layout}) must be left out where state_v_first is True"
        )
    if torch is None or not torch.compiler.is_compiling():  # which cannot trace a warning
        warnings.warn(f"{operation}: transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return bool(transpose_state_layout)
