"""Which bits depend on what: the one table that integrations, declarations to frameworks and the documentation read."""

from __future__ import annotations

from typing import Any, Dict, Literal, Union

__all__ = ["determinism"]

# By auto_cp. docs/determinism.md says which test holds each line.
_PROMISES: Dict[Any, Dict[str, bool]] = {
    True: {"repeatable": True, "batch_invariant": False, "head_invariant": False, "prefix_invariant": False},
    "invariant": {"repeatable": True, "batch_invariant": True, "head_invariant": True, "prefix_invariant": False},
    False: {"repeatable": True, "batch_invariant": True, "head_invariant": True, "prefix_invariant": True},
}


def determinism(auto_cp: Union[bool, Literal["invariant"]] = True) -> Dict[str, bool]:
    """What is promised of the bits of results, for one build, one GPU model and one path (`explain()` names it).

    Args:
        auto_cp: as chunk_gated_delta_rule() is given it. The serving calls of a few tokens, gated_delta_rule_decode()
            and gated_delta_rule_verify(), cut nothing: False holds for them.

    Returns:
        "repeatable": the same call gives the same bits in every run, forward and backward, on any stream and in
        captured graphs. "batch_invariant": a sequence's bits do not depend on its neighbours or on their number.
        "head_invariant": a head's bits do not depend on how many heads a call has. "prefix_invariant": prefill(a), then
        prefill(b), is prefill(a + b), where a is a multiple of 64. (Gradients of A_log and dt_bias are sums over the
        batch: of them the first alone is promised.)

    Raises:
        ValueError: another value of auto_cp.
    """
    if not isinstance(auto_cp, (bool, str)) or auto_cp not in _PROMISES:
        raise ValueError(f'determinism: auto_cp ({auto_cp!r}) must be True, False or "invariant"')
    return dict(_PROMISES[auto_cp])
