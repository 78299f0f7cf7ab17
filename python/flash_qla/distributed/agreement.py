"""FLASH_QLA_CHECK=1: before a call exchanges anything, its ranks compare what they were called with."""

from __future__ import annotations

import collections
import os
import zlib
from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch import Tensor

from .._options import INPUT_NAMES, Options
from .exchange import Ranks, gather
from .plan import Plan

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# A fact: its name, and a number that all ranks must have.
Fact = Tuple[str, int]


def is_wanted() -> bool:
    return os.environ.get("FLASH_QLA_CHECK") == "1"


def _text(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


def facts_of(options: Options, plan: Plan, inputs: Sequence[Optional[Tensor]], output_final_state: bool) -> List[Fact]:
    """What must be the same on all ranks. Tensors are compared by presence and dtype; the cut by a check sum."""
    q, k, v = inputs[:3]
    assert q is not None and k is not None and v is not None
    facts: List[Fact] = [
        ("q.shape[2]", q.shape[2]),
        ("v.shape[2]", v.shape[2]),
        ("q.shape[3]", q.shape[3]),
        ("v.shape[3]", v.shape[3]),
    ]
    if plan.cu_seqlens is None:
        facts.append(("q.shape[0]", q.shape[0]))
    for name, x in zip(INPUT_NAMES, inputs):
        given = -1 if x is None else _DTYPES.index(x.dtype) if x.dtype in _DTYPES else 0
        facts.append((f"the dtype of {name} (-1: None)", given))
    for name, value in options._asdict().items():
        facts.append((f"{name}, by its check sum", _text(value)))
    facts.append(("output_final_state", int(output_final_state)))
    cut = plan.cut
    if cut is not None:
        facts.append(("the parts of cp_context, by their check sum", _text(cut.bounds)))
        facts.append(("cu_seqlens of cp_context, by their check sum", _text(cut.cu_seqlens.tolist())))
        facts.append(("all_rows", int(cut.all_rows)))
    facts.append(("whether anything is exchanged", int(plan.exchanges)))
    facts.append(('whether exchange is "serial"', int(plan.serial)))
    return facts


def compare(operation: str, ranks: Ranks, device: torch.device, facts: Optional[List[Fact]]) -> None:
    """Gathers the facts of all ranks; None: this rank refuses the call. All ranks must come.

    Raises:
        ValueError: a rank has refused the call, or differs from the others.
    """
    # The first number says whether the rank computes the call, the second how many facts it has.
    size = 64
    numbers = [0, 0] if facts is None else [1, len(facts), *(value for _, value in facts)]
    own = torch.tensor([*numbers, *[0] * (size - len(numbers))], dtype=torch.int64, device=device)
    everybody = gather(operation, "what ranks were called with", ranks, own).tolist()
    if facts is None:
        return  # the refusal itself is raised by who has it
    refused = [rank for rank, found in enumerate(everybody) if found[0] == 0]
    if refused:
        raise ValueError(f"{operation}: rank {refused[0]} must not refuse the call (it did: see its own error)")
    for i, (name, _) in enumerate([("the number of facts", 0), *facts]):
        values = [found[1 + i] for found in everybody]
        common = collections.Counter(values).most_common(1)[0][0]
        for rank, value in enumerate(values):
            if value != common:
                raise ValueError(
                    f"{operation}: {name} ({value} on rank {rank}) must be that of the other ranks ({common})"
                )
