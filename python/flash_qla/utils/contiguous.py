"""A decorator that hands contiguous tensors to a function."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, Callable

import torch

__all__ = ["input_guard"]


def input_guard(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` with every tensor argument made contiguous, called with the first tensor's CUDA device as the current one.

    Tensors inside lists and other containers are passed on as they are.
    """

    def contiguous(x: Any) -> Any:
        return x.contiguous() if isinstance(x, torch.Tensor) else x

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        device = first.device if first is not None and first.is_cuda else None
        with contextlib.nullcontext() if device is None else torch.cuda.device(device):
            return fn(*map(contiguous, args), **{name: contiguous(x) for name, x in kwargs.items()})

    return guarded
