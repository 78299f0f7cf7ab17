"""The exchange of true states: one rank after another computes its tokens and hands the final state on. For comparisons
bit by bit; it takes the time of all ranks together."""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

from torch import Tensor

from ._options import Options
from .distributed.plan import Plan


def chunk(
    options: Options, plan: Plan, inputs: Sequence[Optional[Tensor]], output_final_state: bool
) -> Tuple[Tensor, Optional[Tensor]]:
    """As _context_parallel.chunk()."""
    raise NotImplementedError
