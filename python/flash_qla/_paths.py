"""Which calls the fast kernels take: what an integration asks before it takes a call from a framework's own kernels."""

from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

from ._options import use_path
from ._tools import explain

# Paths that frameworks' own kernels do not beat. What goes to another one is left to the framework.
FAST_PATHS = ("sm90", "sm80")

# Where path sm80 takes calls: the compute capability that it was timed on beside fla's Triton kernels, and the fewest
# and most dimensions of the rows of benchmarks/results/*_portable_forward.json and *_portable_backward.json, in all of
# which it has to be the faster (a test looks). No other card was timed, and fewer dimensions would be padded to 64.
SM80_CAPABILITY = (9, 0)
SM80_DIMENSIONS = (64, 256)

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


def _capability(index: int) -> Tuple[int, int]:
    import torch

    return torch.cuda.get_device_capability(index)


def _ask(device_index: int, dtype: Any, K: int, V: int, needs_grad: bool) -> Optional[str]:
    import torch

    try:
        device = _device(device_index)
        with torch.inference_mode(False), torch.set_grad_enabled(needs_grad), use_path(None):
            q, v = (torch.empty(1, _TOKENS, 1, size, dtype=dtype, device=device) for size in (K, V))
            gate = torch.empty(1, _TOKENS, 1, device=device)
            text = explain(q.requires_grad_(needs_grad), q, v, gate, gate)
            reason = _slow_path(text, device_index, K, V)
            if reason is None and needs_grad:
                text = explain(q, q, v, gate, gate, None, v, op="chunk_gated_delta_rule_bwd")
                reason = _slow_path(text, device_index, K, V)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        return str(error)  # a refusal of ours, or torch has no such device (AssertionError: was built without CUDA)
    return reason


def _slow_path(explanation: str, device_index: int, K: int, V: int) -> Optional[str]:
    """Why an explained call is not on a fast path: "path cuda_generic: sm90 needs K = V = 128"."""
    lines = (line.partition(": ") for line in explanation.splitlines())
    facts = {name: text for name, _, text in lines}
    if facts["path"] == "sm80":
        return _slow_on_sm80(device_index, K, V)
    if facts["path"] in FAST_PATHS:
        return None
    reasons = [f"{name} {facts[name]}" for name in FAST_PATHS if name in facts]
    return f"path {facts['path']}: {'; '.join(reasons) or 'this build has no faster one'}"


def _slow_on_sm80(device_index: int, K: int, V: int) -> Optional[str]:
    """Why it is not known that path sm80 beats other kernels; None: it is."""
    fewest, most = SM80_DIMENSIONS
    if not fewest <= min(K, V) <= max(K, V) <= most:
        return f"path sm80: was timed with {fewest} to {most} dimensions ({K}, {V})"
    capability = _capability(device_index)
    if capability != SM80_CAPABILITY:
        return "path sm80: was timed on compute capability {}.{} ({}.{})".format(*SM80_CAPABILITY, *capability)
    return None
