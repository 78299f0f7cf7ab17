"""PyTorch front end of gated_delta_net(): convolution, delta rule and gated norm as one autograd node, three native
calls each way.

The convolution leaves q, k and v side by side in one buffer, q and k normalised, and what their rows were multiplied
by. The delta rule reads the buffer as it lies, and its backward writes the buffer's gradient, with the norm's
derivative in it: so nothing is split, concatenated or brought into place.
"""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import _ffi
from ._options import Options
from ._shapes import CHUNK_SIZE
from ._torch import _NO_OUTPUTS, _accumulator, _allocator, _threads, _wants_gradient
from ._torch_layer import (
    CHANNELS_LAST,
    INTERLEAVED,
    SEPARATE,
    compute,
    define,
    refuse_second_derivative,
)

LAYOUTS: Dict[str, int] = {"joined": CHANNELS_LAST, "interleaved": INTERLEAVED, "separate": SEPARATE}


class NodeConfig(NamedTuple):
    """What is not a tensor: the leading arguments of the operators, in this order."""

    operation: str
    path: Optional[str]
    activation: int
    gate_activation: int
    layout: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    norm_eps: float
    allow_neg_eigval: bool
    scale: Optional[float]
    state_v_first: bool
    cp_mode: int

    @property
    def channels(self) -> int:
        return 2 * self.num_k_heads * self.head_k_dim + self.num_v_heads * self.head_v_dim

    def delta_options(self, raw_gates: bool) -> Options:
        """Of the delta rule's calls: the forward gets finished gates, the backward raw ones."""
        negative = raw_gates and self.allow_neg_eigval
        options = (self.operation, self.path, self.scale, self.state_v_first, False, raw_gates, raw_gates, negative)
        return Options(*options, self.cp_mode, False, None)

    def conv_leading(self, x: Tensor, normalised: bool) -> tuple:
        """The first arguments of the native convolution, up to V. Without norms joined channels are one part."""
        heads = (self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim)
        normed = 2 * self.num_k_heads if normalised else 0
        return (self.operation, self.path, _threads(x), self.activation, self.layout, normed, *heads)


_CONFIG = (
    "str operation, str? path, int activation, int gate_activation, int layout, SymInt num_k_heads, "
    "SymInt num_v_heads, SymInt head_k_dim, SymInt head_v_dim, float norm_eps, bool allow_neg_eigval, float? scale, "
    "bool state_v_first, int cp_mode"
)
_COUNT = len(NodeConfig._fields)

NODE_NAMES = (
    ("qkv", "k", "v", "z", "a", "b", "conv_weight", "conv_bias", "A_log", "dt_bias", "norm_weight")
    + ("cu_seqlens", "seq_idx")
)
_INPUTS = (
    "Tensor qkv, Tensor? k, Tensor? v, Tensor? z, Tensor a, Tensor? b, Tensor conv_weight, Tensor? conv_bias, "
    "Tensor A_log, Tensor? dt_bias, Tensor? norm_weight, Tensor? cu_seqlens, Tensor? seq_idx"
)
_DIFFERENTIABLE = 11  # of the inputs


def _parts(config: NodeConfig, y: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they lie in [B, T, C]."""
    batch, tokens, channels = y.shape
    keys = config.num_k_heads * config.head_k_dim
    shape = (batch, tokens, config.num_k_heads, config.head_k_dim)
    strides = (tokens * channels, channels, config.head_k_dim, 1)
    start = y.storage_offset()
    v_shape = (batch, tokens, config.num_v_heads, config.head_v_dim)
    return (
        y.as_strided(shape, strides, start),
        y.as_strided(shape, strides, start + keys),
        y.as_strided(v_shape, (tokens * channels, channels, config.head_v_dim, 1), start + 2 * keys),
    )


def _rows_of(config: NodeConfig, o: Tensor) -> Tensor:
    """[B, T, Hv, V] as the rows of an interleaved z: [B * T, Hq, Hv / Hq, V]."""
    if config.layout != INTERLEAVED:
        return o
    return o.view(-1, config.num_k_heads, config.num_v_heads // config.num_k_heads, config.head_v_dim)


def _gate_rows(config: NodeConfig, qkv: Tensor, z: Optional[Tensor]) -> Tensor:
    """z as rows of V: beside v in an interleaved qkv, else [B, T, Hv, V]."""
    if config.layout != INTERLEAVED:
        shape = (qkv.shape[0], qkv.shape[1], config.num_v_heads, config.head_v_dim)
        assert z is not None  # _check() has seen to it
        return z if z.dim() == 4 else z.view(shape)
    group = config.num_v_heads // config.num_k_heads
    pitch = 2 * config.head_k_dim + 2 * group * config.head_v_dim
    shape = (qkv.shape[0] * qkv.shape[1], config.num_k_heads, group, config.head_v_dim)
    start = qkv.storage_offset() + 2 * config.head_k_dim + group * config.head_v_dim
    return qkv.as_strided(shape, (qkv.stride(1), pitch, config.head_v_dim, 1), start)


def _norm(config: NodeConfig, o: Tensor, z: Tensor, weight: Optional[Tensor], out: Tensor) -> None:
    leading = (config.operation, config.path, _threads(o), config.norm_eps, config.gate_activation, False)
    _ffi.call("norm_gated", _allocator(o), (*leading, o, z, weight, None, out, None))


def _prologue(config: NodeConfig, inputs: tuple, states: tuple, y: Tensor, made: tuple, update: bool = False) -> None:
    """The convolution into y, and (inverse_norms, g, beta), each if it is there."""
    x, k, v, _, a, b, weight, bias, A_log, dt_bias, _, cu_seqlens, seq_idx = inputs
    norms, g, beta = made
    gates = (None,) * 4 if g is None else (a, a if config.layout == INTERLEAVED else b, A_log, dt_bias)
    absent = (None,) * 3
    arguments = (
        (update, *config.conv_leading(x, True), config.allow_neg_eigval, x, k, v, weight, bias, None, *states)
        + (cu_seqlens, seq_idx, *absent, -1, *absent, *absent, *gates, y, norms, g, beta)
    )
    _ffi.call("conv", _allocator(x), arguments)


def _made_like(config: NodeConfig, x: Tensor, saves: bool) -> Tuple[Tensor, Optional[Tensor], Tensor, Tensor]:
    """y, inverse norms where they are saved, g and beta."""
    batch, tokens = x.shape[0], x.shape[1]
    wide = _accumulator(x)
    gates = (batch, tokens, config.num_v_heads)
    norms = x.new_empty((2, batch, tokens, config.num_k_heads), dtype=wide) if saves else None
    y = x.new_empty((batch, tokens, config.channels))
    return y, norms, x.new_empty(gates, dtype=wide), x.new_empty(gates, dtype=wide)


# state_pool .. num_accepted_tokens, null_index, checkpoint_every, checkpoints .. checkpoint_indices of a call without.
_NO_POOL = (None,) * 5 + (-1, 0) + (None,) * 4


# layer_forward: the output, and what the backward keeps: y, o, A, inverse norms.


def _layer_forward(*arguments: Any) -> Tuple[Tensor, ...]:
    config, inputs = NodeConfig(*arguments[:_COUNT]), arguments[_COUNT:]
    x, z, cu_seqlens = inputs[0], inputs[3], inputs[11]
    batch, tokens = x.shape[0], x.shape[1]
    y, norms, g, beta = _made_like(config, x, True)
    _prologue(config, inputs, (None, None), y, (norms, g, beta))
    o = x.new_empty((batch, tokens, config.num_v_heads, config.head_v_dim))
    A = x.new_empty((batch, tokens, config.num_v_heads, CHUNK_SIZE))
    delta = (*_parts(config, y), g, beta, None, None, cu_seqlens, None, *_NO_POOL, o, None, None, A, None)
    _ffi.forward(_allocator(x), (False, *config.delta_options(False), _threads(x), *delta))
    out = torch.empty_like(o)
    rows = _rows_of(config, o)
    _norm(config, rows, _gate_rows(config, x, z), inputs[10], out.view(rows.shape))
    assert norms is not None  # made with y
    return out, y, o, A, norms


def _layer_forward_fake(*arguments: Any) -> Tuple[Tensor, ...]:
    config, x = NodeConfig(*arguments[:_COUNT]), arguments[_COUNT]
    y, norms, _, _ = _made_like(config, x, True)
    o = x.new_empty((x.shape[0], x.shape[1], config.num_v_heads, config.head_v_dim))
    A = x.new_empty((x.shape[0], x.shape[1], config.num_v_heads, CHUNK_SIZE))
    return torch.empty_like(o), y, o, A, norms  # type: ignore[return-value]


define(
    f"layer_forward({_CONFIG}, {_INPUTS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _layer_forward,
    _layer_forward_fake,
    NODE_NAMES,
)


# layer_backward: the gradients of the differentiable inputs that are there, in their order.


def _input_gradients(config: NodeConfig, inputs: Sequence[Optional[Tensor]]) -> List[Optional[Tensor]]:
    return [
        None if t is None else torch.empty_like(t, memory_format=torch.contiguous_format)
        for t in inputs[:_DIFFERENTIABLE]
    ]


def _raw_gates(config: NodeConfig, a: Tensor, b: Optional[Tensor]) -> Tuple[Tensor, Optional[Tensor]]:
    """a and b as the delta rule takes them; of interleaved ones copies, a megabyte at 8192 tokens."""
    if config.layout != INTERLEAVED:
        return a, b
    group = config.num_v_heads // config.num_k_heads
    shape = (a.shape[0], a.shape[1], config.num_k_heads, 2 * group)
    both = a.reshape(shape)
    gates = (*shape[:2], config.num_v_heads)
    return both[..., group:].reshape(gates), both[..., :group].reshape(gates)


def _layer_backward(*arguments: Any) -> List[Tensor]:
    config, inputs = NodeConfig(*arguments[:_COUNT]), arguments[_COUNT : _COUNT + len(NODE_NAMES)]
    y, o, A, norms, dout = arguments[_COUNT + len(NODE_NAMES) :]
    x, k, v, z, a, b, weight, bias, A_log, dt_bias, norm_weight, cu_seqlens, seq_idx = inputs
    threads, allocate = _threads(x), _allocator(x)
    if y is None:  # dropped: made again
        y = x.new_empty((x.shape[0], x.shape[1], config.channels))
        _prologue(config, inputs, (None, None), y, (None, None, None))
    gradients = _input_gradients(config, inputs)
    dx, dk, dv, dz, da, db, dweight, dbias, dA_log, ddt_bias, dnorm_weight = gradients

    rows = _rows_of(config, o)
    do = torch.empty_like(o)
    leading = (config.operation, config.path, threads, config.norm_eps, config.gate_activation, False)
    norm_gradients = (do.view(rows.shape), _gate_rows(config, dx, dz), dnorm_weight, None)  # type: ignore[arg-type]
    norm_inputs = (rows, _gate_rows(config, x, z), norm_weight, None, dout.view(rows.shape))
    _ffi.call("norm_gated_backward", allocate, (*leading, *norm_inputs, *norm_gradients))

    raw = _raw_gates(config, a, b)
    gate_gradients: Tuple[Any, ...] = (da, db)
    if config.layout == INTERLEAVED:
        gate_gradients = tuple(torch.empty_like(t) for t in raw if t is not None)
    dy = torch.empty_like(y)
    delta = (*_parts(config, y), *raw, A_log, dt_bias, cu_seqlens, None, False, A, None, do, None)
    delta_gradients = (*_parts(config, dy), *gate_gradients, None, dA_log, ddt_bias, norms)
    _ffi.backward(allocate, (*config.delta_options(True), threads, *delta, *delta_gradients))
    if config.layout == INTERLEAVED:
        group = config.num_v_heads // config.num_k_heads
        both = da.view(x.shape[0], x.shape[1], config.num_k_heads, 2 * group)  # type: ignore[union-attr]
        shape = (*both.shape[:3], group)
        both[..., group:].copy_(gate_gradients[0].view(shape))
        both[..., :group].copy_(gate_gradients[1].view(shape))

    conv = (x, k, v, weight, bias, None, cu_seqlens, seq_idx, dy, None, dx, dk, dv, dweight, dbias, None, None)
    _ffi.call("conv_backward", allocate, (*config.conv_leading(x, False), *conv))
    return [t for t in gradients if t is not None]


def _layer_backward_fake(*arguments: Any) -> List[Tensor]:
    config = NodeConfig(*arguments[:_COUNT])
    return [t for t in _input_gradients(config, arguments[_COUNT:]) if t is not None]


define(
    f"layer_backward({_CONFIG}, {_INPUTS}, Tensor? y, Tensor o, Tensor A, Tensor norms, Tensor dout) -> Tensor[]",
    _layer_backward,
    _layer_backward_fake,
    (*NODE_NAMES, "y", "o", "A", "norms", "dout"),
)


# layer_step: the output of a call with states, which are read and written in place.

# Rows 0 .. N - 1 of states that are taken for a pool, by device and N.
_rows: Dict[Tuple[torch.device, int], Tensor] = {}


def _row_numbers(like: Tensor, count: int) -> Tensor:
    key = (like.device, count)
    if key not in _rows:
        with torch.inference_mode(False):
            _rows[key] = torch.arange(count, dtype=torch.int32, device=like.device)
    return _rows[key]


def _layer_step(*arguments: Any) -> Tensor:
    config, inputs = NodeConfig(*arguments[:_COUNT]), arguments[_COUNT : _COUNT + len(NODE_NAMES)]
    conv_state, recurrent_state = arguments[_COUNT + len(NODE_NAMES) :]
    x, z, cu_seqlens = inputs[0], inputs[3], inputs[11]
    tokens = x.shape[1]
    single = tokens == 1 and cu_seqlens is None
    y, _, g, beta = _made_like(config, x, False)
    _prologue(config, inputs, (conv_state, conv_state), y, (None, g, beta), single)
    o = x.new_empty((x.shape[0], tokens, config.num_v_heads, config.head_v_dim))
    pool = (recurrent_state, _row_numbers(x, recurrent_state.shape[0]), None, None, None, -1, 0, None, None, None, None)
    delta = (*_parts(config, y), g, beta, None, None, cu_seqlens, None, *pool, o, *_NO_OUTPUTS)
    _ffi.forward(_allocator(x), (single, *config.delta_options(False), _threads(x), *delta))
    increment_version((conv_state, recurrent_state))
    out = torch.empty_like(o)
    rows = _rows_of(config, o)
    _norm(config, rows, _gate_rows(config, x, z), inputs[10], out.view(rows.shape))
    return out


def _layer_step_fake(*arguments: Any) -> Tensor:
    config, x = NodeConfig(*arguments[:_COUNT]), arguments[_COUNT]
    return x.new_empty((x.shape[0], x.shape[1], config.num_v_heads, config.head_v_dim))


define(
    f"layer_step({_CONFIG}, {_INPUTS}, Tensor(a!) conv_state, Tensor(b!) recurrent_state) -> Tensor",
    _layer_step,
    _layer_step_fake,
    (*NODE_NAMES, "conv_state", "recurrent_state"),
)


class _GatedDeltaNet(torch.autograd.Function):
    """The output of a layer's core, differentiable in all floating-point inputs."""

    @staticmethod
    def forward(ctx: Any, config: NodeConfig, recompute: bool, *inputs: Optional[Tensor]) -> Tensor:
        out, y, o, A, norms = compute("layer_forward", config.operation, inputs, (*config, *inputs))
        ctx.save_for_backward(*inputs, None if recompute else y, o, A, norms)
        ctx.config = config
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tuple[Optional[Tensor], ...]:
        config, saved = ctx.config, ctx.saved_tensors
        tensors = (*saved, dout if dout.is_contiguous() else dout.contiguous())
        found = compute("layer_backward", config.operation, tensors, (*config, *tensors))
        found = refuse_second_derivative(config.operation, found, tensors)
        rest = iter(found)
        gradients = [None if t is None else next(rest) for t in saved[:_DIFFERENTIABLE]]
        return (None, None, *gradients, None, None)


def check_shapes(config: NodeConfig, inputs: Tuple[Optional[Tensor], ...], states: tuple) -> None:
    """ValueError for what views are made of without looking: the native calls see to the rest."""
    x, k, v, z, a, b = inputs[:6]
    operation, keys = config.operation, config.num_k_heads * config.head_k_dim
    values = config.num_v_heads * config.head_v_dim
    if config.num_v_heads % config.num_k_heads != 0:
        given = f"{config.num_v_heads} and {config.num_k_heads}"
        raise ValueError(f"{operation}: num_v_heads must be a multiple of num_k_heads ({given})")
    if x is None or x.dim() != 3:
        raise ValueError(f"{operation}: qkv.ndim ({None if x is None else x.dim()}) must be 3")
    rows = tuple(x.shape[:2])
    widths = {CHANNELS_LAST: 2 * keys + values, INTERLEAVED: 2 * keys + 2 * values, SEPARATE: keys}
    gates = config.num_v_heads * (2 if config.layout == INTERLEAVED else 1)
    wanted: List[Tuple[str, Optional[Tensor], Tuple[int, ...]]]
    wanted = [("qkv", x, (widths[config.layout],)), ("a", a, (gates,))]
    if config.layout == SEPARATE:
        wanted += [("k", k, (keys,)), ("v", v, (values,))]
    if config.layout != INTERLEAVED:
        z_shape = (values,) if z.dim() == 3 else (config.num_v_heads, config.head_v_dim)  # type: ignore[union-attr]
        wanted += [("z", z, z_shape), ("b", b, (gates,))]
    for name, t, last in wanted:
        if tuple(t.shape) != (*rows, *last):  # type: ignore[union-attr]
            shape = tuple(t.shape)  # type: ignore[union-attr]
            raise ValueError(f"{operation}: {name}.shape {shape} must be {(*rows, *last)}")
    if inputs[6].dim() != 2:  # type: ignore[union-attr]
        raise ValueError(f"{operation}: conv_weight.ndim ({inputs[6].dim()}) must be 2")  # type: ignore[union-attr]


def _dense_rows(x: Tensor) -> Tensor:
    """x, or a copy whose tokens are one stride apart over the batch and whose channels lie side by side."""
    if x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1)):
        return x
    return x.contiguous()


def _brought_into_form(config: NodeConfig, inputs: Tuple[Optional[Tensor], ...]) -> Tuple[Optional[Tensor], ...]:
    """z, a and b in qkv's dtype, and what views are made of without gaps between batch rows."""
    x, k, v, z, a, b, *rest = inputs
    dtype = x.dtype  # type: ignore[union-attr]
    z, a, b, k, v = (t if t is None or t.dtype == dtype else t.to(dtype) for t in (z, a, b, k, v))
    if config.layout == INTERLEAVED:
        x, a = _dense_rows(x), _dense_rows(a)  # type: ignore[arg-type]
    elif not z.is_contiguous() and z.dim() == 3:  # type: ignore[union-attr]
        z = z.contiguous()  # type: ignore[union-attr]
    return (x, k, v, z, a, b, *rest)


def gated_delta_net(
    config: NodeConfig,
    inputs: Tuple[Optional[Tensor], ...],
    states: Optional[Tuple[Tensor, Tensor]],
    recompute: bool,
) -> Tensor:
    """The output [B, T, Hv * V] of inputs in the order of NODE_NAMES."""
    inputs = _brought_into_form(config, inputs)
    if states is not None:
        if _wants_gradient(inputs):
            raise NotImplementedError(
                f"{config.operation}: a call with states must be made without gradients (torch.no_grad()): leave the "
                "states out where gradients are needed"
            )
        out = compute("layer_step", config.operation, (*inputs, *states), (*config, *inputs, *states))
    elif _wants_gradient(inputs):
        out = _GatedDeltaNet.apply(config, recompute, *inputs)
    else:
        out = compute("layer_forward", config.operation, inputs, (*config, *inputs))[0]
    return out.flatten(2)
