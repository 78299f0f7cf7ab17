"""The one collective of a stream that is cut over ranks: every rank hands in a tensor of the same shape and gets all of
them. Any object with rank(), size() and all_gather(tensor) will do in place of a process group of torch.distributed."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
from torch import Tensor


class Ranks(NamedTuple):
    """Who takes part. Under a compiler `group` is None, and torch.distributed finds the group by its name."""

    rank: int
    size: int
    group: Any
    name: Optional[str]  # of a process group of torch.distributed


def ranks_of(group: Any) -> Ranks:
    """This process among the ranks of a group."""
    if _is_process_group(group):
        return Ranks(int(group.rank()), int(group.size()), group, group.group_name)
    return Ranks(_ask(group, "rank"), _ask(group, "size"), group, None)


def size_of(group: Any) -> int:
    """Ranks of a group; None is a single rank."""
    return 1 if group is None else _ask(group, "size")


def _ask(group: Any, name: str) -> int:
    value = getattr(group, name)
    return int(value() if callable(value) else value)


def _is_process_group(group: Any) -> bool:
    distributed = torch.distributed
    return distributed.is_available() and isinstance(group, distributed.ProcessGroup)


def default_group() -> Any:
    """The default process group, or None where there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.group.WORLD
    return None


def start_gather(operation: str, what: str, ranks: Ranks, x: Tensor) -> Callable[[], Tensor]:
    """Begins to gather x, which must be contiguous. What comes back waits for it, in the stream of a GPU, and returns
    [size, *x.shape].

    Raises (there or here):
        RuntimeError: a rank failed or did not come within the group's own time-out; the message names operation, rank
            and what was gathered.
    """
    if torch.compiler.is_compiling():
        if ranks.name is None:
            raise ValueError(f"{operation}: cp_context.group must be one of torch.distributed under torch.compile")
        functional = torch.ops._c10d_functional
        flat = functional.all_gather_into_tensor(x, ranks.size, ranks.name)
        return lambda: functional.wait_tensor(flat).view(ranks.size, *x.shape)
    if ranks.name is None:
        found = _guarded(operation, what, ranks, lambda: ranks.group.all_gather(x))
        return lambda: _stacked(operation, ranks, x, found)
    out = x.new_empty((ranks.size * x.shape[0], *x.shape[1:]))
    work = _guarded(operation, what, ranks, lambda: _all_gather()(out, x, ranks.group, async_op=True))

    def wait() -> Tensor:
        _guarded(operation, what, ranks, work.wait)
        return out.view(ranks.size, *x.shape)

    return wait


def _all_gather() -> Callable[..., Any]:
    """torch.distributed's gather into one tensor, which newer releases have under another name."""
    distributed = torch.distributed
    newer: Optional[Callable[..., Any]] = getattr(distributed, "all_gather_single", None)
    return distributed.all_gather_into_tensor if newer is None else newer


def gather(operation: str, what: str, ranks: Ranks, x: Tensor) -> Tensor:
    """start_gather(), waited for."""
    return start_gather(operation, what, ranks, x)()


def _guarded(operation: str, what: str, ranks: Ranks, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except RuntimeError as error:
        where = f"rank {ranks.rank} of {ranks.size}, all-gather of {what}"
        raise RuntimeError(f"{operation}: {where}: a rank failed or did not come ({error})") from error


def _stacked(operation: str, ranks: Ranks, x: Tensor, found: Any) -> Tensor:
    shape: Tuple[int, ...] = (ranks.size, *x.shape)
    result = found if isinstance(found, Tensor) else torch.stack(tuple(found))
    if tuple(result.shape) != shape:
        given = f"cp_context.group.all_gather() of shape {tuple(result.shape)}"
        raise ValueError(f"{operation}: {given} must have that of all ranks' tensors, {shape}")
    return result
