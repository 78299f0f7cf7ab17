"""Keyword arguments to the options of the C interface, and the checks that only Python can make."""

from __future__ import annotations

import contextlib
from typing import Any, Dict, Iterator, Optional, Tuple, Union

# flash_qla_cp_mode of c_api.h, by the value of `auto_cp`.
_CP_MODES: Dict[Any, int] = {False: 0, True: 1, "invariant": 2}

# (operation, path, scale, state_v_first, use_qk_l2norm_in_kernel, use_gate_in_kernel, use_beta_sigmoid_in_kernel,
#  allow_neg_eigval, cp_mode, force_intra_cp, cp_tolerance): the leading arguments of every native call and torch op.
Options = Tuple[str, Optional[str], Optional[float], bool, bool, bool, bool, bool, int, bool, Optional[float]]

_path: Optional[str] = None


@contextlib.contextmanager
def use_path(name: Optional[str]) -> Iterator[None]:
    """Within it, every call of this process takes the path `name` (as `explain()` prints it) instead of the library's
    choice; None gives the choice back. For oracles and comparisons: `with flash_qla.use_path("reference"): ...`.

    A call that the path does not compute raises NotImplementedError; an unknown name raises ValueError.
    """
    global _path
    previous, _path = _path, name
    try:
        yield
    finally:
        _path = previous


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
    """The options tuple of one call."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        scale = number(operation, "scale", scale)
    if cp_tolerance is not None:
        cp_tolerance = number(operation, "cp_tolerance", cp_tolerance)
        if not cp_tolerance > 0.0:
            raise ValueError(f"{operation}: cp_tolerance must be greater than 0 ({cp_tolerance})")
    if not isinstance(auto_cp, (bool, str)) or auto_cp not in _CP_MODES:
        raise ValueError(f'{operation}: auto_cp must be True, False or "invariant" ({auto_cp!r})')
    return (
        operation,
        _path,
        scale,
        bool(state_v_first),
        bool(use_qk_l2norm_in_kernel),
        bool(use_gate_in_kernel),
        bool(use_beta_sigmoid_in_kernel),
        bool(allow_neg_eigval),
        _CP_MODES[auto_cp],
        bool(force_intra_cp),
        cp_tolerance,
    )


def number(operation: str, name: str, value: Any) -> float:
    """A real number, given as Python's or as a numpy scalar. A tensor would have to be read from its device."""
    if not isinstance(value, bool) and not hasattr(value, "__dlpack__") and hasattr(value, "__float__"):
        return float(value)
    raise TypeError(f"{operation}: {name} must be a number ({type(value).__name__})")


def refuse_head_first(operation: str, head_first: bool) -> None:
    """The head-first layout [B, H, T, D] was removed from this family of functions."""
    if head_first:
        raise ValueError(
            f"{operation}: head_first must be False (True); lay q, k, v out as [B, T, H, D], g and beta as [B, T, H], "
            "with tensor.transpose(1, 2)"
        )
