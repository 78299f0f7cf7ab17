"""Questions about calls and the build: explain(), workspace_size(), build_info()."""

from __future__ import annotations

import inspect
from typing import Any, Callable, Dict, Literal, Tuple, Union

from . import _ffi, _front
from ._options import integer, make_options
from .ops import convolution, norm
from .ops import gated_delta_rule as operations

# workspace_size: what each operation's call looks like to the native function (bindings/ffi/module.cpp).
_CALLS: Dict[str, str] = {
    "chunk_gated_delta_rule": "forward",
    "chunk_gated_delta_rule_fwd": "forward",
    "chunk_gated_delta_rule_bwd": "backward",
    "fused_recurrent_gated_delta_rule": "decode",
    "gated_delta_rule_prefill": "prefill",
    "gated_delta_rule_decode": "decode",
    "gated_delta_rule_verify": "verify",
}

# What explain() answers for, by name.
_EXPLAINED: Dict[str, Callable[..., Any]] = {
    **{name: getattr(operations, name) for name in _CALLS},
    **{name: getattr(convolution, name) for name in convolution.__all__},
    **{name: getattr(norm, name) for name in norm.__all__},
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
    if name not in _EXPLAINED:
        raise ValueError(f"explain: op ({name}) must be one of: {', '.join(_EXPLAINED)}")
    with _ffi.explaining() as texts:
        _EXPLAINED[name](*args, **kwargs)
    if not texts:
        raise ValueError(f"explain: op ({name}) must be given tensors with memory (a FakeTensor has none)")
    text = texts[0].rstrip("\n")
    if name == "chunk_gated_delta_rule" and _front.torch_front is not None:
        given = inspect.signature(operations.chunk_gated_delta_rule).bind(*args, **kwargs).arguments
        saved, tokens = _front.torch_front.saved_for_backward(given)
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
    gate_dtype: Any = "float32",
    state_dtype: Any = "float32",
    contiguous: bool = False,
    device: Any = "cuda",
    checkpoint_every: int = 0,
    checkpoint_offsets: int = 0,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    auto_cp: Union[bool, Literal["invariant"]] = True,
    force_intra_cp: bool = False,
) -> int:
    """Bytes of scratch that the largest call of an operation allocates, before any tensor exists.

    Enough for every call of at most `max_tokens` tokens in at most `max_seqs` sequences, packed or not, whatever
    optional tensors it has. Scratch is per call and stream: it comes from the framework's allocator and goes back to it
    when the call has been queued. On the CPU it is for PyTorch's present number of threads.

    Args:
        op: an operation of this package or its name; chunk_gated_delta_rule_bwd stands for the backward pass of
            chunk_gated_delta_rule, too.
        max_tokens: tokens of a call, all sequences together.
        max_seqs: sequences of a call.
        Hq, Hv: key heads, value heads. K, V: their dimensions.
        dtype: of q, k, v: a name, numpy or torch dtype.
        gate_dtype: of g and beta.
        state_dtype: of initial states, pools and checkpoints.
        contiguous: True promises that all tensors are contiguous and begin on 16-byte boundaries, and that gradients
            of o have q's dtype. False: they may have any strides, and there is room for copies of those that a kernel
            cannot read in place.
        device: "cpu", "cuda", "cuda:1" or a torch.device.
        checkpoint_every: as gated_delta_rule_prefill().
        checkpoint_offsets: listed tokens of a gated_delta_rule_prefill() call.
        state_v_first, use_*, allow_neg_eigval, auto_cp, force_intra_cp: as chunk_gated_delta_rule().

    Returns:
        Bytes; 0 where none is needed.

    Raises:
        ValueError, TypeError, NotImplementedError: as the call itself would.
    """
    name = op if isinstance(op, str) else op.__name__
    if name not in _CALLS:
        raise ValueError(f"workspace_size: op ({name}) must be one of: {', '.join(_CALLS)}")
    cuda, index = _device("workspace_size", device)
    sizes = {"max_tokens": max_tokens, "max_seqs": max_seqs, "Hq": Hq, "Hv": Hv, "K": K, "V": V}
    sizes.update(checkpoint_every=checkpoint_every, checkpoint_offsets=checkpoint_offsets)
    sizes = {key: integer("workspace_size", key, value, 0, 2**62) for key, value in sizes.items()}
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
    dtypes = (
        _float_name("workspace_size", key, value)
        for key, value in (("dtype", dtype), ("gate_dtype", gate_dtype), ("state_dtype", state_dtype))
    )
    checkpoints = (sizes.pop("checkpoint_every"), sizes.pop("checkpoint_offsets"))
    arguments: Tuple[Any, ...] = (cuda, index, *dtypes)
    if name == "gated_delta_rule_verify":
        ask, arguments = _ffi.verify_workspace_size, (*arguments, *sizes.values())
    else:
        ask = _ffi.workspace_size
        arguments = (_CALLS[name], *arguments, bool(contiguous), *checkpoints, *sizes.values())
    # Calls on torch tensors take torch's number of threads, others (0) as many as the process may use.
    _front.find_torch()
    threads = (0,) if cuda or _front.torch_front is None else (0, _front.torch_front.cpu_threads())
    return max(ask(*options, number, *arguments) for number in threads)


def _device(operation: str, device: Any) -> Tuple[bool, int]:
    """Whether a device is a CUDA device, and its ordinal."""
    kind, colon, index = str(device).partition(":")
    if kind not in ("cpu", "cuda") or (colon and not (index.isascii() and index.isdecimal())):
        raise ValueError(f'{operation}: device ({device}) must be "cpu", "cuda" or "cuda:" and a number')
    return kind == "cuda", integer(operation, "device", int(index or 0), 0, 2**31 - 1)


def _float_name(operation: str, name: str, dtype: Any) -> str:
    """The name of a floating-point dtype: bfloat16 for "bfloat16", torch.bfloat16 or numpy.dtype("bfloat16")."""
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype).rpartition(".")[2]
    if text not in ("float32", "bfloat16", "float16", "float64"):
        raise TypeError(f"{operation}: {name} ({dtype}) must be float32, bfloat16, float16 or float64")
    return text


def build_info() -> Dict[str, str]:
    """What this build contains and found: version, paths of each operation, instruction sets, GPUs.

    Returns:
        A fact per key; the values are text.
    """
    lines = _ffi.build_info().splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
