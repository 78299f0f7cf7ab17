"""Which calls the fast kernels take: what an integration asks before it takes a call from a framework's own kernels."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ._options import use_path
from ._tools import explain

# Paths that frameworks' own kernels do not beat. What goes to another one is left to the framework.
FAST_PATHS = ("sm90",)

# Tokens of the question: more than any path's least number of tokens.
_TOKENS = 512

# Answers by (device_index, dtype, K, V, needs_grad).
_answers: Dict[Tuple[int, Any, int, int, bool], Optional[str]] = {}


def slow_reason(device_index: int, dtype: Any, K: int, V: int, needs_grad: bool) -> Optional[str]:
    """Why a chunked call would not be computed by the fast kernels; None: it would be.

    Asks explain() once for each set of arguments: there is no table of what is fast.

    Args:
        device_index: number of a CUDA device.
        dtype: torch dtype of q, k, v.
        K, V: head dimensions.
        needs_grad: gradients are recorded: the backward pass has to be fast as well.
    """
    from . import _torch

    key = (device_index, dtype, K, V, bool(needs_grad))
    if key in _answers:
        return _answers[key]
    if _torch.is_traced():  # tensors made now have no memory, so explain() would refuse them
        return "is being traced"
    reason = _ask(*key)
    _answers[key] = reason
    return reason


def _device(index: int) -> Any:
    import torch

    return torch.device("cuda", index)


def _ask(device_index: int, dtype: Any, K: int, V: int, needs_grad: bool) -> Optional[str]:
    import torch

    try:
        device = _device(device_index)
        with torch.inference_mode(False), torch.set_grad_enabled(needs_grad), use_path(None):
            q, v = (torch.empty(1, _TOKENS, 1, size, dtype=dtype, device=device) for size in (K, V))
            gate = torch.empty(1, _TOKENS, 1, device=device)
            reason = _slow_path(explain(q.requires_grad_(needs_grad), q, v, gate, gate))
            if reason is None and needs_grad:
                reason = _slow_path(explain(q, q, v, gate, gate, None, v, op="chunk_gated_delta_rule_bwd"))
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error)  # a refusal of ours, or torch has no such device (AssertionError: was built without CUDA)
    return reason


def _slow_path(explanation: str) -> Optional[str]:
    """Why none of FAST_PATHS takes an explained call: "path cuda_generic: sm90 needs K = V = 128"."""
    lines = (line.partition(": ") for line in explanation.splitlines())
    facts = {name: text for name, _, text in lines}
    if facts["path"] in FAST_PATHS:
        return None
    reasons = [f"{name} {facts[name]}" for name in FAST_PATHS if name in facts]
    return f"path {facts['path']}: {'; '.join(reasons) or 'this build has no faster one'}"
