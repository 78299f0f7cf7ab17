"""PyTorch front end of the layer's operations, convolution and gated norm: the operators `torch.ops.flash_qla.*`, their
fake kernels, and autograd around them. As in _torch, one operator call is one native call."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _ffi
from ._torch import (
    _allocator,
    _library,
    _nobody_watches,
    _NotDifferentiable,
    _present,
    _refuse_without_memory,
    _threads,
    _wants_gradient,
    is_traced,
)

# How channels lie in x; of bindings/ffi/layer.cpp.
CHANNELS_LAST, CHANNELS_FIRST, INTERLEAVED, SEPARATE = range(4)

# flash_qla_activation of convolution.h.
ACTIVATIONS: Dict[Optional[str], int] = {None: 0, "silu": 1, "swish": 1, "sigmoid": 2}

# What computes an operator, and the names of its tensors as callers know them.
_implementations: Dict[str, Callable[..., Any]] = {}
_names: Dict[str, Tuple[str, ...]] = {}


def define(
    schema: str, implementation: Callable[..., Any], fake: Callable[..., Any], names: Tuple[str, ...]
) -> None:
    """An operator. `names`: its tensors."""
    name = schema.split("(")[0]
    _implementations[name] = implementation
    _names[name] = names
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flash_qla::{name}", fake, lib=_library)


# What callers of an operation call the members of the C structures.
_STATE_POOL = {"initial_state": "state_pool", "final_state": "state_pool", "y": "out"}
_RENAMED: Dict[str, Dict[str, str]] = {
    "causal_conv1d_fn": {"initial_state": "initial_states"},
    "causal_conv1d_update": {
        "initial_state": "conv_state",
        "final_state": "conv_state",
        "initial_state_indices": "conv_state_indices",
    },
    "causal_conv1d_prefill": _STATE_POOL,
    "causal_conv1d_decode": _STATE_POOL,
    "rms_norm_gated": {"z": "g", "dz": "dg"},
}


def _in_their_words(operation: str, message: str) -> str:
    names = _RENAMED.get(operation, {})
    return re.sub(r"(?<![\w=])[a-z_]+\b(?=[ .\[:])", lambda word: names.get(word[0], word[0]), message)


def compute(name: str, operation: str, tensors: Sequence[Optional[Tensor]], arguments: tuple) -> Any:
    """Calls the operator `name`, without its dispatcher where nobody would notice. `tensors`: all among `arguments`. No
    gradient is recorded."""
    if _nobody_watches(tensors):
        try:
            return _implementations[name](*arguments)
        except (ValueError, TypeError) as error:
            raise type(error)(_in_their_words(operation, str(error))) from None
        except (RuntimeError, BufferError):  # it may be the tensor's fault that it has no view: say so in our form
            _refuse_without_memory(operation, _names[name], tensors)
            raise
    if not is_traced():
        _refuse_without_memory(operation, _names[name], tensors)
    with torch.no_grad():
        return getattr(torch.ops.flash_qla, name)(*arguments)


class ConvConfig(NamedTuple):
    """What is not a tensor of a convolution: the leading arguments of its operators, in this order."""

    operation: str
    path: Optional[str]
    activation: int
    layout: int
    l2norm_heads: int
    head_dim: int


_CONV_CONFIG = "str operation, str? path, int activation, int layout, SymInt l2norm_heads, SymInt head_dim"
CONV_NAMES = ("x", "weight", "bias", "residual", "initial_state", "cu_seqlens", "seq_idx")
_CONV_INPUTS = (
    "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? initial_state, Tensor? cu_seqlens, "
    "Tensor? seq_idx"
)


def _leading(config: ConvConfig, x: Tensor) -> tuple:
    """The first arguments of the native convolution, up to V."""
    operation, path, activation, layout, heads, dim = config
    return (operation, path, _threads(x), activation, layout, heads, 0, 0, dim, 0)


def _sequences(x: Tensor, cu_seqlens: Optional[Tensor]) -> int:
    return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1


def _dense_like(x: Tensor) -> Tensor:
    """A tensor of x's shape whose dimensions follow each other as x's do, without gaps."""
    return torch.empty_like(x)


def _final_state_like(
    x: Tensor, weight: Tensor, initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor], entries: int
) -> Tensor:
    if initial_state is not None:
        return torch.empty_like(initial_state, memory_format=torch.contiguous_format)
    return x.new_empty(_sequences(x, cu_seqlens), weight.shape[0], entries)


# conv_forward: y, and the final state if entries >= 0: as many inputs it holds, where there is no initial state.


def _conv_outputs(
    x: Tensor, weight: Tensor, initial_state: Optional[Tensor], cu_seqlens: Optional[Tensor], entries: int
) -> Tuple[Tensor, Optional[Tensor]]:
    state = None if entries < 0 else _final_state_like(x, weight, initial_state, cu_seqlens, entries)
    return _dense_like(x), state


def _conv_forward(
    operation: str,
    path: Optional[str],
    activation: int,
    layout: int,
    l2norm_heads: int,
    head_dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    seq_idx: Optional[Tensor],
    entries: int,
) -> List[Tensor]:
    config = ConvConfig(operation, path, activation, layout, l2norm_heads, head_dim)
    y, final_state = _conv_outputs(x, weight, initial_state, cu_seqlens, entries)
    states = (initial_state, final_state, cu_seqlens, seq_idx, None, None, None, -1)
    absent = (None,) * 10  # num_accepted_tokens .. dt_bias
    tensors = (False, x, None, None, weight, bias, residual, *states, *absent, y, None, None, None)
    _ffi.call("conv", _allocator(x), (False, *_leading(config, x), *tensors))
    return _present((y, final_state))


def _conv_forward_fake(*arguments: Any) -> List[Tensor]:
    x, weight, _, _, initial_state, cu_seqlens, _, entries = arguments[6:]
    return _present(_conv_outputs(x, weight, initial_state, cu_seqlens, entries))


define(
    f"conv_forward({_CONV_CONFIG}, {_CONV_INPUTS}, SymInt entries) -> Tensor[]",
    _conv_forward,
    _conv_forward_fake,
    CONV_NAMES,
)


# conv_backward: those of dx, dweight, dbias, dresidual, dinitial_state whose flag in `wanted` is set.


def _conv_gradients(
    inputs: Sequence[Optional[Tensor]], dy: Optional[Tensor], wanted: Sequence[bool]
) -> Tuple[Optional[Tensor], ...]:
    return tuple(
        torch.empty_like(t) if want and t is not None else None for t, want in zip(inputs[:5], wanted)
    )


def _conv_backward(
    operation: str,
    path: Optional[str],
    activation: int,
    layout: int,
    l2norm_heads: int,
    head_dim: int,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    initial_state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    seq_idx: Optional[Tensor],
    dy: Optional[Tensor],
    dfinal_state: Optional[Tensor],
    wanted: Sequence[bool],
) -> List[Tensor]:
    config = ConvConfig(operation, path, activation, layout, l2norm_heads, head_dim)
    gradients = _conv_gradients((x, weight, bias, residual, initial_state), dy, wanted)
    dx, dweight, dbias, dresidual, dinitial_state = gradients
    tensors = (x, None, None, weight, bias, initial_state, cu_seqlens, seq_idx, dy, dfinal_state)
    results = (dx, None, None, dweight, dbias, dresidual, dinitial_state)
    _ffi.call("conv_backward", _allocator(x), (*_leading(config, x), *tensors, *results))
    return _present(gradients)


def _conv_backward_fake(*arguments: Any) -> List[Tensor]:
    return _present(_conv_gradients(arguments[6:11], arguments[13], arguments[15]))


define(
    f"conv_backward({_CONV_CONFIG}, {_CONV_INPUTS}, Tensor? dy, Tensor? dfinal_state, bool[] wanted) -> Tensor[]",
    _conv_backward,
    _conv_backward_fake,
    (*CONV_NAMES, "dy", "dfinal_state"),
)


# conv_states: whole sequences (prefill) or the next tokens of each (`update`), with the states written in place.

POOL_NAMES = (
    "x",
    "weight",
    "bias",
    "state_pool",
    "cu_seqlens",
    "initial_state_indices",
    "final_state_indices",
    "has_initial_state",
    "num_accepted_tokens",
    "cache_seqlens",
    "draft_states",
    "draft_state_indices",
    "checkpoint_offsets",
    "checkpoint_indices",
    "out",
)


def _conv_states(
    operation: str,
    path: Optional[str],
    activation: int,
    layout: int,
    l2norm_heads: int,
    head_dim: int,
    update: bool,
    null_index: int,
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    state_pool: Tensor,
    cu_seqlens: Optional[Tensor],
    initial_state_indices: Optional[Tensor],
    final_state_indices: Optional[Tensor],
    has_initial_state: Optional[Tensor],
    num_accepted_tokens: Optional[Tensor],
    cache_seqlens: Optional[Tensor],
    draft_states: Optional[Tensor],
    draft_state_indices: Optional[Tensor],
    checkpoint_offsets: Optional[Tensor],
    checkpoint_indices: Optional[Tensor],
    out: Tensor,
) -> None:
    config = ConvConfig(operation, path, activation, layout, l2norm_heads, head_dim)
    tensors = (
        (False, x, None, None, weight, bias, None, state_pool, state_pool, cu_seqlens, None)
        + (initial_state_indices, final_state_indices, has_initial_state, null_index, num_accepted_tokens)
        + (cache_seqlens, draft_states, draft_state_indices, checkpoint_offsets, checkpoint_indices)
        + (None, None, None, None, out, None, None, None)
    )
    if _ffi.call("conv", _allocator(x), (update, *_leading(config, x), *tensors)):
        written = [state_pool, out]
        if draft_states is not None:
            written.append(draft_states)
        increment_version(written)  # autograd has to know that what was written is not what it was


def _conv_states_fake(*arguments: Any) -> None:
    return None


define(
    f"conv_states({_CONV_CONFIG}, bool update, int null_index, Tensor x, Tensor weight, Tensor? bias, "
    "Tensor(a!) state_pool, Tensor? cu_seqlens, Tensor? initial_state_indices, Tensor? final_state_indices, "
    "Tensor? has_initial_state, Tensor? num_accepted_tokens, Tensor? cache_seqlens, Tensor(b!)? draft_states, "
    "Tensor? draft_state_indices, Tensor? checkpoint_offsets, Tensor? checkpoint_indices, Tensor(c!) out) -> ()",
    _conv_states,
    _conv_states_fake,
    POOL_NAMES,
)

# conv_replace: conv_states of which the outputs take the place of the inputs.


def _conv_replace(*arguments: Any) -> None:
    _conv_states(*arguments, arguments[8])  # type: ignore[call-arg]


define(
    f"conv_replace({_CONV_CONFIG}, bool update, int null_index, Tensor(c!) x, Tensor weight, Tensor? bias, "
    "Tensor(a!) state_pool, Tensor? cu_seqlens, Tensor? initial_state_indices, Tensor? final_state_indices, "
    "Tensor? has_initial_state, Tensor? num_accepted_tokens, Tensor? cache_seqlens, Tensor(b!)? draft_states, "
    "Tensor? draft_state_indices, Tensor? checkpoint_offsets, Tensor? checkpoint_indices) -> ()",
    _conv_replace,
    _conv_states_fake,
    POOL_NAMES[:-1],
)


def refuse_second_derivative(operation: str, gradients: Sequence[Tensor], sources: Sequence[Any]) -> List[Tensor]:
    """What a backward pass returns: under create_graph=True a derivative of it is refused."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return list(gradients)
    message = f"{operation}: second derivatives are not supported"
    return [_NotDifferentiable.apply(message, False, gradient, *sources) for gradient in gradients]


def _in_places(found: Sequence[Tensor], wanted: Sequence[bool]) -> List[Optional[Tensor]]:
    """Puts a None where an operator's list of results leaves out what was not wanted."""
    rest = iter(found)
    return [next(rest) if want else None for want in wanted]


class _CausalConv1d(torch.autograd.Function):
    """y and the final state, differentiable in x, weight, bias, residual and initial_state. Saved: the inputs."""

    @staticmethod
    def forward(ctx: Any, config: ConvConfig, entries: int, *inputs: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        found = compute("conv_forward", config.operation, inputs, (*config, *inputs, entries))
        ctx.save_for_backward(*inputs)
        ctx.config = config
        ctx.set_materialize_grads(False)
        return found[0], found[1] if entries >= 0 else None

    @staticmethod
    def backward(ctx: Any, dy: Optional[Tensor], dfinal_state: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        inputs, config = ctx.saved_tensors, ctx.config
        wanted = [need and t is not None for need, t in zip(ctx.needs_input_grad[2:7], inputs)]
        tensors = (*inputs, dy, dfinal_state)
        found = compute("conv_backward", config.operation, tensors, (*config, *tensors, wanted))
        found = refuse_second_derivative(config.operation, found, tensors)
        return (None, None, *_in_places(found, wanted), None, None)


def causal_conv1d(config: ConvConfig, entries: int, *inputs: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    """(y, final state or None) of inputs in the order of CONV_NAMES. `entries`: inputs that a final state without an
    initial one holds; -1: it is not wanted."""
    if _wants_gradient(inputs):
        return _CausalConv1d.apply(config, entries, *inputs)
    found = compute("conv_forward", config.operation, inputs, (*config, *inputs, entries))
    return found[0], found[1] if entries >= 0 else None


def conv_with_states(
    config: ConvConfig, update: bool, null_index: int, tensors: tuple, out: Optional[Tensor]
) -> Tensor:
    """The output of tensors in the order of POOL_NAMES, without `out`. Forward only."""
    x = tensors[0]
    operation = config.operation
    sources = (*tensors[:4], tensors[10])
    if _wants_gradient(sources) and not _ffi.is_explaining() and not is_traced():
        for name, t in zip(("out", "state_pool"), (out, tensors[3])):
            if t is not None and t.requires_grad and t.is_leaf:
                raise ValueError(f"{operation}: {name} (a leaf that requires a gradient) must not be written in place")
    if out is x:
        compute("conv_replace", operation, tensors, (*config, update, null_index, *tensors))
        return out
    y: Tensor = _dense_like(x) if out is None else out
    compute("conv_states", operation, (*tensors, y), (*config, update, null_index, *tensors, y))
    if out is not None or not _wants_gradient(sources):
        return y
    message = f"{operation}: backward (called) is not offered: use causal_conv1d where gradients are needed"
    return _NotDifferentiable.apply(message, False, y, *sources)


# norm_gated.

NORM_NAMES = ("x", "g", "weight", "bias")
_NORM_INPUTS = "Tensor x, Tensor? g, Tensor? weight, Tensor? bias"
_NORM_CONFIG = "str operation, str? path, float eps, int activation, bool gate_first"


class NormConfig(NamedTuple):
    """What is not a tensor of a gated norm: the leading arguments of its operators, in this order."""

    operation: str
    path: Optional[str]
    eps: float
    activation: int
    gate_first: bool


def norm_leading(config: NormConfig, x: Tensor) -> tuple:
    operation, path, eps, activation, gate_first = config
    return (operation, path, _threads(x), eps, activation, gate_first)


def contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _norm_gated(
    operation: str,
    path: Optional[str],
    eps: float,
    activation: int,
    gate_first: bool,
    x: Tensor,
    g: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
) -> Tensor:
    config = NormConfig(operation, path, eps, activation, gate_first)
    y = contiguous_like(x)
    _ffi.call("norm_gated", _allocator(x), (*norm_leading(config, x), x, g, weight, bias, y, None))
    return y


def _norm_gated_fake(*arguments: Any) -> Tensor:
    return contiguous_like(arguments[5])


define(f"norm_gated({_NORM_CONFIG}, {_NORM_INPUTS}) -> Tensor", _norm_gated, _norm_gated_fake, NORM_NAMES)


# norm_gated_backward: those of dx, dg, dweight, dbias whose flag in `wanted` is set.


def _norm_gradients(inputs: Sequence[Optional[Tensor]], wanted: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    return tuple(contiguous_like(t) if want and t is not None else None for t, want in zip(inputs, wanted))


def _norm_gated_backward(
    operation: str,
    path: Optional[str],
    eps: float,
    activation: int,
    gate_first: bool,
    x: Tensor,
    g: Optional[Tensor],
    weight: Optional[Tensor],
    bias: Optional[Tensor],
    dy: Tensor,
    wanted: Sequence[bool],
) -> List[Tensor]:
    config = NormConfig(operation, path, eps, activation, gate_first)
    gradients = _norm_gradients((x, g, weight, bias), wanted)
    _ffi.call(
        "norm_gated_backward", _allocator(x), (*norm_leading(config, x), x, g, weight, bias, dy, *gradients)
    )
    return _present(gradients)


def _norm_gated_backward_fake(*arguments: Any) -> List[Tensor]:
    return _present(_norm_gradients(arguments[5:9], arguments[10]))


define(
    f"norm_gated_backward({_NORM_CONFIG}, {_NORM_INPUTS}, Tensor dy, bool[] wanted) -> Tensor[]",
    _norm_gated_backward,
    _norm_gated_backward_fake,
    (*NORM_NAMES, "dy"),
)


class _RMSNormGated(torch.autograd.Function):
    """y, differentiable in x, g, weight and bias. Saved: the inputs."""

    @staticmethod
    def forward(ctx: Any, config: NormConfig, *inputs: Optional[Tensor]) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.config = config
        return compute("norm_gated", config.operation, inputs, (*config, *inputs))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tuple[Optional[Tensor], ...]:
        inputs, config = ctx.saved_tensors, ctx.config
        wanted = [need and t is not None for need, t in zip(ctx.needs_input_grad[1:], inputs)]
        tensors = (*inputs, dy)
        found = compute("norm_gated_backward", config.operation, tensors, (*config, *tensors, wanted))
        found = refuse_second_derivative(config.operation, found, tensors)
        return (None, *_in_places(found, wanted))


def rms_norm_gated(config: NormConfig, *inputs: Optional[Tensor]) -> Tensor:
    """y of inputs in the order of NORM_NAMES."""
    if _wants_gradient(inputs):
        return _RMSNormGated.apply(config, *inputs)
    return compute("norm_gated", config.operation, inputs, (*config, *inputs))
