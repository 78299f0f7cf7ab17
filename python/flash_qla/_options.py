"""Keyword arguments to the options of the C interface, and the checks that only Python can make."""

from __future__ import annotations

import contextlib
import operator
import threading
from typing import Any, Dict, Iterator, NamedTuple, Optional, Union

# flash_qla_cp_mode of flash_qla.h, by the value of `auto_cp`.
_CP_AUTO = 1
_CP_MODES: Dict[Any, int] = {False: 0, True: _CP_AUTO, "invariant": 2}



class Options(NamedTuple):
    """The leading arguments of every native call and operator, in this order."""

    operation: str
    path: Optional[str]
    scale: Optional[float]
    state_v_first: bool
    use_qk_l2norm_in_kernel: bool
    use_gate_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    cp_mode: int
    force_intra_cp: bool
    cp_tolerance: Optional[float]


# The inputs that all operations share, in the order of the native calls.
INPUT_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "initial_state")

# Those of the low-level backward call.
BACKWARD_NAMES = (*INPUT_NAMES, "A", "do", "dht")

# Dtypes that q, k and v of the recurrent call may have beside each other: float32 holds all values of each.
CONVERTIBLE = frozenset(("float32", "bfloat16", "float16"))

# The tensors of a serving call.
POOL_NAMES = (
    *INPUT_NAMES[:8],
    "state_pool",
    "initial_state_indices",
    "final_state_indices",
    "has_initial_state",
    "num_accepted_tokens",
    "checkpoints",
    "checkpoint_cu_starts",
    "checkpoint_offsets",
    "checkpoint_indices",
    "out",
)

# The tensors of a verify call.
VERIFY_NAMES = (
    *INPUT_NAMES[:7],
    "state_pool",
    "initial_state_indices",
    "parents",
    "states_out",
    "states_out_indices",
    "out",
)

# What use_path() has set: `path` of the thread's own attributes, and how many contexts are open on all threads. While
# there is none, no call has to look for its thread's, which takes longer than all the rest of an options tuple.
_chosen = threading.local()
_open_contexts = 0
_lock = threading.Lock()


def chosen_path() -> Optional[str]:
    """The path that use_path() has set for this thread, if any."""
    # An attribute of a subclass of local would leave torch.compile without a guard.
    return getattr(_chosen, "path", None) if _open_contexts else None


@contextlib.contextmanager
def use_path(name: Optional[str]) -> Iterator[None]:
    """Within it, every call of this thread takes the path `name` (as `explain()` prints it) instead of the library's
    choice; None gives the choice back. For oracles and comparisons: `with flash_qla.use_path("reference"): ...`.

    Other threads keep their choice. A backward pass takes the path of its forward pass, on whichever thread it runs.
    A call that the path does not compute raises NotImplementedError; an unknown name raises ValueError.
    """
    global _open_contexts
    previous = getattr(_chosen, "path", None)
    with _lock:
        _open_contexts += 1
    _chosen.path = name
    try:
        yield
    finally:
        _chosen.path = previous
        with _lock:
            _open_contexts -= 1


def make_options(
    operation: str,
    scale: Optional[float] = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, str] = True,
    force_intra_cp: bool = False,
    cp_tolerance: Optional[float] = None,
) -> Options:
    """The options of one call."""
    if scale is not None:
        if isinstance(scale, bool) or not isinstance(scale, (int, float)):
            scale = number(operation, "scale", scale)
        if scale != scale:
            raise ValueError(f"{operation}: scale must not be NaN ({scale})")
    if cp_tolerance is not None:
        cp_tolerance = number(operation, "cp_tolerance", cp_tolerance)
        if not cp_tolerance > 0.0:
            raise ValueError(f"{operation}: cp_tolerance must be greater than 0 ({cp_tolerance})")
    if auto_cp is True:
        cp_mode = _CP_AUTO
    elif isinstance(auto_cp, (bool, str)) and auto_cp in _CP_MODES:
        cp_mode = _CP_MODES[auto_cp]
    else:
        raise ValueError(f'{operation}: auto_cp must be True, False or "invariant" ({auto_cp!r})')
    # `not not` takes a quarter of the time of bool().
    return Options(
        operation,
        chosen_path(),
        scale,
        not not state_v_first,
        not not use_qk_l2norm_in_kernel,
        not not use_gate_in_kernel,
        not not use_beta_sigmoid_in_kernel,
        not not allow_neg_eigval,
        cp_mode,
        not not force_intra_cp,
        cp_tolerance,
    )


def number(operation: str, name: str, value: Any) -> float:
    """A real number, given as Python's or as a numpy scalar. A tensor would have to be read from its device."""
    if not isinstance(value, bool) and not hasattr(value, "__dlpack__") and hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"{operation}: {name} must be a number ({type(value).__name__})")


def integer(operation: str, name: str, value: Any, least: int = -(2**63), most: int = 2**63 - 1) -> int:
    """An integer of 64 bits, given as Python's or as a numpy scalar. A tensor would have to be read from its device."""
    if type(value) is not int:  # a symbolic one of torch.compile is
        if isinstance(value, bool) or hasattr(value, "__dlpack__") or not hasattr(value, "__index__"):
            raise TypeError(f"{operation}: {name} must be an integer ({type(value).__name__})")
        value = operator.index(value)
    if not least <= value <= most:
        raise ValueError(f"{operation}: {name} must be from {least} to {most} ({value})")
    return value


def refuse_head_first(operation: str, head_first: bool) -> None:
    """The head-first layout [B, H, T, D] was removed from this family of functions."""
    if head_first:
        raise ValueError(
            f"{operation}: head_first must be False (True); lay q, k, v out as [B, T, H, D], g and beta as [B, T, H], "
            "with tensor.transpose(1, 2)"
        )
