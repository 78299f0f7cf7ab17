"""Questions about calls and the build: explain(), workspace_size(), build_info()."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Union

from . import _ffi
from ._front import torch_front
from ._options import make_options
from .ops import gated_delta_rule as operations

# workspace_size: what each operation's call looks like to the native function (bindings/ffi/module.cpp).
_CALLS: Dict[str, str] = {
    "chunk_gated_delta_rule": "forward",
    "chunk_gated_delta_rule_fwd": "forward",
    "chunk_gated_delta_rule_bwd": "backward",
    "fused_recurrent_gated_delta_rule": "decode",
    "gated_delta_rule_prefill": "prefill",
    "gated_delta_rule_decode": "decode",
}


def explain(*args: Any, op: Union[str, Callable[..., Any]] = "chunk_gated_delta_rule", **kwargs: Any) -> str:
    """Says which path a call would take, its scratch, and why the other paths do not take it. Computes nothing.

    Args:
        op: an operation of this package or its name.
        args, kwargs: the arguments of that call, as it would get them. No element is read.

    Returns:
        Lines of text: "path: <name>", "workspace: <bytes> bytes", then "<name>: <taken, or the reason>" for each path.
        Last, where autograd records the call, what it keeps for the backward pass.

    Raises:
        What the call itself would raise.

    Example:
        print(flash_qla.explain(q, k, v, g, beta, op="chunk_gated_delta_rule_fwd"))
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in _CALLS:
        raise ValueError(f"explain: op ({name}) must be one of: {', '.join(_CALLS)}")
    with _ffi.explaining() as texts:
        getattr(operations, name)(*args, **kwargs)
    text = texts[0].rstrip("\n")
    if name == "chunk_gated_delta_rule" and torch_front is not None:
        given = inspect.signature(operations.chunk_gated_delta_rule).bind(*args, **kwargs).arguments
        saved, tokens = torch_front.saved_for_backward(given)
        if saved > 0:
            text += f"\nsaved for the backward pass beside the inputs: {saved} bytes (A: {saved // tokens} a token)"
    return text


def workspace_size(
    op: Union[str, Callable[..., Any]],
    max_tokens: int,
    max_seqs: int,
    Hq: int,
    Hv: int,
    K: int,
    V: int,
    *,
    dtype: Any = "bfloat16",
    state_dtype: Any = "float32",
    device: Any = "cuda",
    checkpoint_every: int = 0,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, str] = True,
    force_intra_cp: bool = False,
) -> int:
    """Bytes of scratch that the largest call of an operation allocates, before any tensor exists.

    Enough for every call of at most `max_tokens` tokens in at most `max_seqs` sequences. Scratch is per call and
    stream: it comes from the framework's allocator and goes back to it when the call has been queued.

    Args:
        op: an operation of this package or its name.
        max_tokens: tokens of a call, all sequences together.
        max_seqs: sequences of a call.
        Hq, Hv: key heads, value heads. K, V: their dimensions.
        dtype: of q, k, v: a name, numpy or torch dtype.
        state_dtype: of initial states, pools and checkpoints.
        device: "cpu", "cuda", "cuda:1" or a torch.device.
        checkpoint_every: as gated_delta_rule_prefill().
        state_v_first, use_*, allow_neg_eigval, auto_cp, force_intra_cp: as chunk_gated_delta_rule().

    Returns:
        Bytes; 0 where none is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in _CALLS:
        raise ValueError(f"workspace_size: op ({name}) must be one of: {', '.join(_CALLS)}")
    kind, _, index = str(device).partition(":")
    if kind not in ("cpu", "cuda"):
        raise ValueError(f'workspace_size: device ({device}) must be "cpu" or "cuda"')
    options = make_options(
        name,
        None,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        auto_cp,
        force_intra_cp,
    )
    # fmt: off
    return _ffi.workspace_size(*options, 0, _CALLS[name], kind == "cuda", int(index or 0), _dtype_name(dtype),
                               _dtype_name(state_dtype), checkpoint_every, max_tokens, max_seqs, Hq, Hv, K, V)
    # fmt: on


def _dtype_name(dtype: Any) -> str:
    """The name of a dtype: bfloat16 for "bfloat16", torch.bfloat16 or numpy.dtype("bfloat16")."""
    return dtype.__name__ if isinstance(dtype, type) else str(dtype).rpartition(".")[2]


def build_info() -> Dict[str, str]:
    """What this build contains and found: version, paths of each operation, instruction sets, GPUs.

    Returns:
        A fact per key; the values are text.
    """
    lines = _ffi.build_info().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
