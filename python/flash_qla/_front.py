"""Which front end a call goes to, and the checks that both share."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Any, Sequence

from . import _ffi
from ._shapes import host_offsets

# The modules _torch, _torch_layer and _torch_node, once there is a torch to be used, and what most arguments then are.
# Tensor subclasses are told from other things one by one.
torch_front: Any = None
torch_layer: Any = None
torch_node: Any = None
parts_front: Any = None  # the same for streams that are cut over ranks
_USUAL: frozenset = frozenset()


def find_torch() -> None:
    """Loads what handles torch tensors, and the operators torch.ops.flash_qla.*, if torch is imported: importing it is
    left to who has tensors of it."""
    global torch_front, torch_layer, torch_node, parts_front, _USUAL
    if torch_front is None and sys.modules.get("torch") is not None:
        from . import _context_parallel, _torch, _torch_layer, _torch_node

        _ffi.load()
        _USUAL = _torch.PLAIN_TYPES
        parts_front = _context_parallel
        torch_layer, torch_node = _torch_layer, _torch_node
        torch_front = _torch


# What torch.compiler.assume_constant_result() sets: a compiler that traces the first of all calls runs this function
# instead of tracing it, and then sees the values that every later call sees, so that it need not compile again. So no
# call may read torch_front or _USUAL before find_torch(): a guard on the earlier value would fail at once.
find_torch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_torch(operation: str, names: Sequence[str], values: Sequence[Any]) -> bool:
    """True for a call on torch tensors, False for one on DLPack arrays; TypeError for a mixture or anything else.

    `values` begins with q, k and v. None (an argument left out) is passed over.
    """
    find_torch()
    q = values[0]
    if _USUAL.issuperset(map(type, values)) and q is not None and values[1] is not None and values[2] is not None:
        return True
    on_torch = torch_front is not None and isinstance(q, torch_front.Tensor)
    for name, value in zip(names, values):
        if value is None:
            continue
        if on_torch and not isinstance(value, torch_front.Tensor):
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) must be a torch.Tensor, as q is")
        if not hasattr(value, "__dlpack__"):
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) must be a tensor or an array")
    for name, value in zip(names[:3], values[:3]):
        if value is None:
            raise TypeError(f"{operation}: {name} (None) must be a tensor or an array")
    return on_torch


def require_torch(operation: str, names: Sequence[str], values: Sequence[Any]) -> None:
    """TypeError for an argument that is neither None nor a torch tensor, or for a first one that is None."""
    find_torch()
    if values[0] is not None and _USUAL.issuperset(map(type, values)):
        return
    for i, (name, value) in enumerate(zip(names, values)):
        if value is None and i > 0:
            continue
        if torch_front is None or not isinstance(value, torch_front.Tensor):
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) must be a torch.Tensor")


def check_host_offsets(operation: str, q: Any, cu_seqlens: Any, cu_seqlens_cpu: Any) -> None:
    """With FLASH_QLA_CHECK=1, refuses a cu_seqlens_cpu that differs from cu_seqlens. Reads the device and waits: not
    under torch.compile, and not while a graph is captured, where the native check refuses the call."""
    if cu_seqlens is None or cu_seqlens_cpu is None or os.environ.get("FLASH_QLA_CHECK") != "1":
        return
    if torch_front is not None and (torch_front.is_traced() or torch_front.is_captured(cu_seqlens)):
        return
    offsets = host_offsets(operation, q.shape, cu_seqlens, cu_seqlens_cpu)
    for i, (host, device) in enumerate(zip(offsets, cu_seqlens.tolist())):
        if host != device:
            raise ValueError(f"{operation}: cu_seqlens_cpu[{i}] ({host}) must be cu_seqlens[{i}] ({device})")


def state_layout(operation: str, state_v_first: bool, transpose_state_layout: bool) -> bool:
    """state_v_first of a call that names transpose_state_layout, its older name in FLA."""
    if state_v_first:
        given = f"transpose_state_layout ({transpose_state_layout})"
        raise ValueError(f"{operation}: {given} must be left out where state_v_first is True")
    find_torch()
    if torch_front is None or not torch_front.is_traced():  # a compiler cannot trace a warning
        warnings.warn(f"{operation}: transpose_state_layout is now state_v_first", DeprecationWarning, stacklevel=3)
    return bool(transpose_state_layout)


find_torch()  # last: what it loads imports from this module
