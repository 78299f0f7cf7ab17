"""PyTorch front end: the operators `torch.ops.flash_qla.*`, their fake kernels, and autograd around them.

One operator call is one native call: one per forward pass and one per backward pass. The operators are functional where
they can be, and mutate only what a caller hands over to be written (pools, checkpoints, out).
"""

from __future__ import annotations

import math
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import _ffi
from ._identity import NAMESPACE
from ._options import BACKWARD_NAMES, CONVERTIBLE, INPUT_NAMES, POOL_NAMES, VERIFY_NAMES, Options
from ._shapes import a_shape, gate_shape, h_shape, sequence_count, state_shape
from .integrations import fla

_OPTIONS = (
    "str operation, str? path, float? scale, bool state_v_first, bool use_qk_l2norm_in_kernel, "
    "bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, bool allow_neg_eigval, int cp_mode, "
    "bool force_intra_cp, float? cp_tolerance"
)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens"

_library = torch.library.Library(NAMESPACE, "DEF")


# What computes an operator: given its options, its inputs (q .. initial_state; of pool_forward q .. cu_seqlens) and the
# rest of its arguments.
_implementations: Dict[str, Callable[[Options, tuple, tuple], Any]] = {}

PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _define(
    schema: str,
    implementation: Callable[[Options, tuple, tuple], Any],
    fake: Callable[[Options, tuple, tuple], Any],
    inputs: int = len(INPUT_NAMES),
) -> None:
    """`schema`: options, `inputs` inputs, and what else the operator has."""
    name = schema.split("(")[0]
    begin, end = len(Options._fields), len(Options._fields) + inputs

    def split(function: Callable[[Options, tuple, tuple], Any]) -> Callable[..., Any]:
        return lambda *arguments: function(Options(*arguments[:begin]), arguments[begin:end], arguments[end:])

    _implementations[name] = implementation
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, split(implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", split(fake), lib=_library)


def _allocator(like: Tensor) -> Callable[[int], Tensor]:
    return lambda size: torch.empty(size, dtype=torch.uint8, device=like.device)


cpu_threads = torch.get_num_threads


def _threads(like: Tensor) -> int:
    """CPU threads for a call: PyTorch's own setting. It has no meaning on a GPU."""
    return cpu_threads() if like.is_cpu else 0


def _accumulator(q: Tensor) -> torch.dtype:
    """Dtype of what is kept in full precision."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _contiguous_like(t: Tensor) -> Tensor:
    """New memory of t's shape and dtype. A third of the call is the keyword, which a contiguous t does without."""
    if t.is_contiguous():
        return torch.empty_like(t)
    return torch.empty_like(t, memory_format=torch.contiguous_format)


def _output_like(q: Tensor, v: Tensor) -> Tensor:
    """o: v's shape and q's dtype, which is v's too in a call that is not refused."""
    if v.dtype == q.dtype:  # half the time of the general call
        return _contiguous_like(v)
    return q.new_empty(v.shape)


def _state_like(q: Tensor, v: Tensor, cu_seqlens: Optional[Tensor], state_v_first: bool) -> Tensor:
    sequences = sequence_count(q.shape, None if cu_seqlens is None else cu_seqlens.shape)
    return q.new_empty(state_shape(q.shape, v.shape, sequences, state_v_first), dtype=_accumulator(q))


def _forward_outputs(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Optional[Tensor],
    output_final_state: bool,
    output_g_cumsum: bool,
    output_A: bool,
    chunks: Optional[int],
) -> Tuple[Optional[Tensor], ...]:
    """(o, final_state, g_cumsum, A, h), None where not wanted. `chunks`: h.shape[1]."""
    state_v_first = options.state_v_first
    return (
        _output_like(q, v),
        _state_like(q, v, cu_seqlens, state_v_first) if output_final_state else None,
        q.new_empty(gate_shape(v.shape), dtype=_accumulator(q)) if output_g_cumsum else None,
        k.new_empty(a_shape(v.shape)) if output_A else None,
        k.new_empty(h_shape(q.shape, v.shape, chunks, state_v_first)) if chunks is not None else None,
    )


def _present(tensors: Sequence[Optional[Tensor]]) -> List[Tensor]:
    return [t for t in tensors if t is not None]


# chunk_forward: o, then those of final_state, g_cumsum, A, h that are asked for.

_OUTPUTS = "bool output_final_state, bool output_g_cumsum, bool output_A, SymInt? chunks"


def _chunk_forward(options: Options, inputs: tuple, wanted: tuple) -> List[Tensor]:
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    if fla.awaited and "fla" in sys.modules:
        fla.register_if_imported(q)
    outputs = _forward_outputs(options, q, k, v, cu_seqlens, *wanted)
    _ffi.forward(_allocator(q), (False, *options, _threads(q), *inputs, *_NO_POOL, *outputs))
    return _present(outputs)


def _chunk_forward_fake(options: Options, inputs: tuple, wanted: tuple) -> List[Tensor]:
    return _present(_forward_outputs(options, inputs[0], inputs[1], inputs[2], inputs[7], *wanted))


# state_pool .. num_accepted_tokens, null_index, checkpoint_every, checkpoints .. checkpoint_indices of a call without.
_NO_POOL = (None,) * 5 + (-1, 0) + (None,) * 4
_NO_OUTPUTS = (None,) * 4  # beside o

_define(
    f"chunk_forward({_OPTIONS}, {_INPUTS}, Tensor? initial_state, {_OUTPUTS}) -> Tensor[]",
    _chunk_forward,
    _chunk_forward_fake,
)


# recurrent: o, then final_state if it is asked for.


def _recurrent(options: Options, inputs: tuple, wanted: Tuple[bool]) -> List[Tensor]:
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    outputs = _forward_outputs(options, q, k, v, cu_seqlens, *wanted, False, False, None)
    _ffi.forward(_allocator(q), (True, *options, _threads(q), *inputs, *_NO_POOL, *outputs))
    return _present(outputs)


def _recurrent_fake(options: Options, inputs: tuple, wanted: Tuple[bool]) -> List[Tensor]:
    q, k, v, cu_seqlens = inputs[0], inputs[1], inputs[2], inputs[7]
    return _present(_forward_outputs(options, q, k, v, cu_seqlens, *wanted, False, False, None))


_define(
    f"recurrent({_OPTIONS}, {_INPUTS}, Tensor? initial_state, bool output_final_state) -> Tensor[]",
    _recurrent,
    _recurrent_fake,
)


# pool_forward: states in a pool, everything written in place. `recurrent` picks the token-by-token operation.


def _pool_forward(options: Options, inputs: tuple, rest: tuple) -> None:
    q = inputs[0]
    # The options are followed by the thread count, the inputs by initial_state, the rest by the outputs that are not
    # wanted.
    made = _ffi.forward(
        _allocator(q), (rest[0], *options, _threads(q), *inputs, None, *rest[1:], *_NO_OUTPUTS)
    )
    if made:  # autograd has to know that what was written is not what it was
        pool, checkpoints, o = rest[1], rest[8], rest[12]
        increment_version((pool, o) if checkpoints is None else (pool, o, checkpoints))


def _pool_forward_fake(options: Options, inputs: tuple, rest: tuple) -> None:
    return None


_define(
    f"pool_forward({_OPTIONS}, {_INPUTS}, bool recurrent, Tensor(a!) state_pool, Tensor initial_state_indices, "
    "Tensor? final_state_indices, Tensor? has_initial_state, Tensor? num_accepted_tokens, int null_index, "
    "SymInt checkpoint_every, Tensor(b!)? checkpoints, Tensor? checkpoint_cu_starts, Tensor? checkpoint_offsets, "
    "Tensor? checkpoint_indices, Tensor(c!) o) -> ()",
    _pool_forward,
    _pool_forward_fake,
    inputs=8,
)


# chunk_backward: those of dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 whose flag in `wanted` is set, in this order,
# which is that of the inputs they belong to. Each has its input's dtype, but dh0 is float32 with `dh0_float32`.


def _backward_outputs(inputs: tuple, dh0_float32: bool, wanted: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    q = inputs[0]
    sources = (*inputs[:7], inputs[8])
    dtypes = [None if t is None else t.dtype for t in sources]
    if dh0_float32:
        dtypes[7] = _accumulator(q)
    return tuple(
        q.new_empty(source.shape, dtype=dtype) if want and source is not None else None
        for source, dtype, want in zip(sources, dtypes, wanted)
    )


def _chunk_backward(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    g_is_cumsum, A, do, dht, dh0_float32, wanted = rest
    q = inputs[0]
    outputs = _backward_outputs(inputs, dh0_float32, wanted)
    dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 = outputs
    gradients = (dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias)
    o = None  # not kept from the forward pass
    _ffi.backward(_allocator(q), (*options, _threads(q), *inputs, g_is_cumsum, A, o, do, dht, *gradients, None))
    return _present(outputs)


def _chunk_backward_fake(options: Options, inputs: tuple, rest: tuple) -> List[Tensor]:
    return _present(_backward_outputs(inputs, *rest[-2:]))


_define(
    f"chunk_backward({_OPTIONS}, {_INPUTS}, Tensor? initial_state, bool g_is_cumsum, Tensor? A, Tensor? do, "
    "Tensor? dht, bool dh0_float32, bool[] wanted) -> Tensor[]",
    _chunk_backward,
    _chunk_backward_fake,
)

_ops = getattr(torch.ops, NAMESPACE)


def is_traced() -> bool:
    """True where a compiler, a dispatch mode (FakeTensorMode) or a function transform wants to see the operator."""
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def is_captured(x: Any) -> bool:
    """True for a tensor on a GPU whose current stream is captured into a graph: the host cannot wait for it."""
    return getattr(x, "is_cuda", False) and torch.cuda.is_current_stream_capturing()


def _nobody_watches(tensors: Sequence[Optional[Tensor]], signs: Optional[Sequence[Optional[Tensor]]] = None) -> bool:
    """True for an ordinary eager call on plain tensors with memory. `signs`: those among them that may have a sign that
    is not in memory (the imaginary part of a conjugate), to which only the dispatcher sees; None: all."""
    if is_traced() or not PLAIN_TYPES.issuperset(map(type, tensors)) or tensors[0].is_meta:  # type: ignore[union-attr]
        return False
    for t in tensors if signs is None else signs:
        if t is not None and t.is_neg():
            return False
    return True


# The tensors of each operator as its callers know them.
_NAMES = {
    "chunk_forward": INPUT_NAMES,
    "recurrent": INPUT_NAMES,
    "pool_forward": POOL_NAMES,
    "chunk_backward": BACKWARD_NAMES,
    "verify": VERIFY_NAMES,
}


def _refuse_without_memory(operation: str, names: Sequence[str], tensors: Sequence[Optional[Tensor]]) -> None:
    """Raises ValueError for the first tensor that lies on no device of ours, or not in strided memory."""
    for name, t in zip(names, tensors):
        if t is None:
            continue
        if t.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{operation}: {name}.device ({t.device}) must be cpu or cuda")
        if t.layout is not torch.strided or t.is_nested:
            layout = "nested" if t.is_nested else str(t.layout).partition(".")[2]
            raise ValueError(f"{operation}: {name}.layout ({layout}) must be strided: a dense tensor")


def _compute(name: str, tensors: Sequence[Optional[Tensor]], options: Options, inputs: tuple, rest: tuple) -> Any:
    """Calls the operator `name`, without its dispatcher where nobody would notice: it costs as much as all the rest of
    a call. `tensors`: all among `inputs` and `rest`, from q on. No gradient is recorded."""
    # In serving calls, whose time on the host counts, signs are looked for from q to beta.
    if _nobody_watches(tensors, tensors[:5] if len(tensors) == len(POOL_NAMES) else None):
        try:
            return _implementations[name](options, inputs, rest)
        except (RuntimeError, BufferError):  # it may be the tensor's fault that it has no view: say so in our form
            _refuse_without_memory(options.operation, _NAMES[name], tensors)
            raise
    if not is_traced():
        _refuse_without_memory(options.operation, _NAMES[name], tensors)
    with torch.no_grad():
        return getattr(_ops, name)(*options, *inputs, *rest)


def _align(found: Sequence[Tensor], wanted: Sequence[bool]) -> Tuple[Optional[Tensor], ...]:
    """Puts a None where an operator's list of results leaves out what was not wanted."""
    rest = iter(found)
    return tuple(next(rest) if want else None for want in wanted)


def _wants_gradient(tensors: Sequence[Optional[Tensor]]) -> bool:
    if torch.is_grad_enabled():
        for t in tensors:  # any() with a generator takes twice the time
            if t is not None and t.requires_grad:
                return True
    return False


class _NotDifferentiable(torch.autograd.Function):
    """Passes a result of `inputs` on; asking for a gradient through it raises NotImplementedError. `in_place`: the
    result is in a tensor of the caller's, and what comes back is that tensor."""

    @staticmethod
    def forward(ctx: Any, message: str, in_place: bool, x: Tensor, *inputs: Optional[Tensor]) -> Tensor:
        ctx.message = message
        if in_place:
            ctx.mark_dirty(x)
            return x
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        raise NotImplementedError(ctx.message)


def _forward_only(operation: str, x: Tensor, inputs: Sequence[Optional[Tensor]], in_place: bool = False) -> Tensor:
    if not _wants_gradient(inputs):
        return x
    message = f"{operation}: backward (called) is not offered: use chunk_gated_delta_rule where gradients are needed"
    return _NotDifferentiable.apply(message, in_place, x, *inputs)


def refuse_second_derivatives(
    operation: str, gradients: Sequence[Optional[Tensor]], sources: Sequence[Optional[Tensor]]
) -> List[Optional[Tensor]]:
    """The gradients, such that asking for one of theirs raises NotImplementedError."""
    message = f"{operation}: second derivatives are not supported"
    return [None if x is None else _NotDifferentiable.apply(message, False, x, *sources) for x in gradients]


def _gradient_like(t: Optional[Tensor], need: bool) -> Optional[Tensor]:
    return _contiguous_like(t) if need and t is not None else None


class _ChunkGatedDeltaRule(torch.autograd.Function):
    """o and final_state, differentiable in every floating-point input. Saved: the inputs and A.

    An eager call of a small model costs the host what its Python costs, so both passes make the native call themselves
    where nobody watches: no lists of results, which have to be aligned again, and one kind of allocation."""

    @staticmethod
    def forward(
        ctx: Any, options: Options, output_final_state: bool, *inputs: Optional[Tensor]
    ) -> Tuple[Optional[Tensor], ...]:
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.plain = _nobody_watches(inputs)
        if ctx.plain:
            q, v = inputs[0], inputs[2]
            if fla.awaited and "fla" in sys.modules:
                fla.register_if_imported(q)
            try:
                out = _output_like(q, v)  # type: ignore[arg-type]
                A = v.new_empty(a_shape(v.shape))  # type: ignore[union-attr]
                state = _state_like(q, v, inputs[7], options.state_v_first) if output_final_state else None  # type: ignore[arg-type]
                arguments = (False, *options, _threads(q), *inputs, *_NO_POOL, out, state, None, A, None)  # type: ignore[arg-type]
                _ffi.forward(_allocator(q), arguments)  # type: ignore[arg-type]
            except (RuntimeError, BufferError):
                _refuse_without_memory(options.operation, INPUT_NAMES, inputs)
                raise
            ctx.save_for_backward(*inputs, A)
            return out, state
        wanted = (True, output_final_state, False, True, False)
        found = _compute("chunk_forward", inputs, options, inputs, (*wanted[1:4], None))
        o, final_state, _, A, _ = _align(found, wanted)
        ctx.save_for_backward(*inputs, A)
        return o, final_state

    @staticmethod
    def backward(ctx: Any, do: Optional[Tensor], dht: Optional[Tensor]) -> Tuple[Optional[Tensor], ...]:
        saved = ctx.saved_tensors
        needs = ctx.needs_input_grad[2:]
        # Signs of what was saved have been looked for in the forward pass.
        if ctx.plain and not torch.is_grad_enabled() and _nobody_watches((*saved, do, dht), (do, dht)):
            q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state, A = saved
            dq, dk, dv = _gradient_like(q, needs[0]), _gradient_like(k, needs[1]), _gradient_like(v, needs[2])
            dg, dbeta = _gradient_like(g, needs[3]), _gradient_like(beta, needs[4])
            dA_log, ddt_bias, dh0 = None, None, None
            if A_log is not None:
                dA_log, ddt_bias = _gradient_like(A_log, needs[5]), _gradient_like(dt_bias, needs[6])
            if initial_state is not None:
                dh0 = _gradient_like(initial_state, needs[8])
            results = (dq, dk, dv, dg, dbeta, dh0, dA_log, ddt_bias, None)
            arguments = (*ctx.options, _threads(q), *saved[:9], False, A, None, do, dht, *results)
            _ffi.backward(_allocator(q), arguments)
            return None, None, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, None, dh0
        *inputs, A = saved
        wanted = (*needs[:7], needs[8])
        tensors = (*inputs, A, do, dht)
        found = _compute("chunk_backward", tensors, ctx.options, (*inputs,), (False, A, do, dht, False, wanted))
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # under create_graph=True
            found = refuse_second_derivatives(ctx.options.operation, found, (*inputs, do, dht))
        dq, dk, dv, dg, dbeta, dA_log, ddt_bias, dh0 = _align(found, wanted)
        return None, None, dq, dk, dv, dg, dbeta, dA_log, ddt_bias, None, dh0


def saved_for_backward(arguments: Mapping[str, Any]) -> Tuple[int, int]:
    """Bytes that chunk_gated_delta_rule() with these arguments keeps beside its inputs, and its tokens. No bytes where
    no gradient is recorded, or where the arguments are no torch tensors."""
    tensors = [t for t in arguments.values() if isinstance(t, Tensor)]
    k, v = arguments["k"], arguments["v"]
    if not isinstance(v, Tensor) or not _wants_gradient(tensors):
        return 0, 0
    return math.prod(a_shape(v.shape)) * k.element_size(), v.shape[0] * v.shape[1]


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> Tuple[Tensor, Tensor, Tensor]:
    """Under autocast, q, k, v of several dtypes (a norm leaves float32 behind) get autocast's own."""
    if q.dtype == k.dtype == v.dtype or not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def chunk(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    beta: Optional[Tensor],
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    initial_state: Optional[Tensor],
    output_final_state: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    """chunk_gated_delta_rule() on tensors."""
    q, k, v = _autocast(q, k, v)
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    if _wants_gradient(inputs):
        return _ChunkGatedDeltaRule.apply(options, output_final_state, *inputs)
    found = _compute("chunk_forward", inputs, options, inputs, (output_final_state, False, False, None))
    return found[0], found[1] if output_final_state else None


def chunk_fwd(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    beta: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    initial_state: Optional[Tensor],
    output_final_state: bool,
    chunks: Optional[int],
) -> Tuple[Optional[Tensor], ...]:
    """(g, A, o, h, final_state) of chunk_gated_delta_rule_fwd()."""
    inputs = (q, k, v, g, beta, None, None, cu_seqlens, initial_state)
    wanted = (True, output_final_state, True, True, chunks is not None)
    found = _compute("chunk_forward", inputs, options, inputs, (*wanted[1:4], chunks))
    o, final_state, g_cumsum, A, h = _align(found, wanted)
    return g_cumsum, A, o, h, final_state


def chunk_bwd(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    beta: Optional[Tensor],
    A: Optional[Tensor],
    do: Optional[Tensor],
    dht: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    initial_state: Optional[Tensor],
) -> Tuple[Optional[Tensor], ...]:
    """(dq, dk, dv, db, dg, dh0) of chunk_gated_delta_rule_bwd()."""
    inputs = (q, k, v, g, beta, None, None, cu_seqlens, initial_state)
    wanted = (True, True, True, g is not None, beta is not None, False, False, initial_state is not None)
    tensors = (*inputs, A, do, dht)
    found = _compute("chunk_backward", tensors, options, inputs, (g is not None, A, do, dht, True, wanted))
    dq, dk, dv, dg, db, _, _, dh0 = _align(found, wanted)
    return dq, dk, dv, db, dg, dh0


_CONVERTIBLE = frozenset(getattr(torch, name) for name in CONVERTIBLE)


def recurrent(
    options: Options,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Optional[Tensor],
    beta: Optional[Tensor],
    A_log: Optional[Tensor],
    dt_bias: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    initial_state: Optional[Tensor],
    output_final_state: bool,
) -> Tuple[Tensor, Optional[Tensor]]:
    """fused_recurrent_gated_delta_rule() on tensors."""
    q, k, v = _autocast(q, k, v)
    o_dtype = None  # of an o that has to be converted
    if not q.dtype == k.dtype == v.dtype and {q.dtype, k.dtype, v.dtype} <= _CONVERTIBLE:
        o_dtype = v.dtype
        q, k, v = q.float(), k.float(), v.float()
    inputs = (q, k, v, g, beta, A_log, dt_bias, cu_seqlens, initial_state)
    found = _compute("recurrent", inputs, options, inputs, (output_final_state,))
    o = _forward_only(options.operation, found[0] if o_dtype is None else found[0].to(o_dtype), inputs)
    return o, _forward_only(options.operation, found[1], inputs) if output_final_state else None


def compute_into(
    name: str,
    tensors: tuple,
    options: Options,
    inputs: Tuple[Optional[Tensor], ...],
    rest: tuple,
    sources: tuple,
    out: Optional[Tensor],
) -> Tensor:
    """o of a serving call: `out`, or a new tensor where that is None. It is the last of the tensors and arguments of
    the operator `name`, and not among those given here. `sources`: what a gradient of o would go to."""
    if out is not None and _wants_gradient(sources) and not _ffi.is_explaining():
        if out.requires_grad and out.is_leaf:
            raise ValueError(f"{options.operation}: out (a leaf that requires a gradient) must not be written in place")
        _forward_only(options.operation, out, sources, True)  # before anything is written: autograd may refuse it
    o = _output_like(inputs[0], inputs[2]) if out is None else out  # type: ignore[arg-type]
    _compute(name, (*tensors, o), options, inputs, (*rest, o))
    return _forward_only(options.operation, o, sources) if out is None else out


def pool(
    recurrent: bool, options: Options, inputs: Tuple[Optional[Tensor], ...], states: tuple, out: Optional[Tensor]
) -> Tensor:
    """gated_delta_rule_prefill() and gated_delta_rule_decode() on tensors. `inputs`: q .. cu_seqlens; `states`:
    state_pool .. checkpoint_indices."""
    tensors = (*inputs, *states[:5], *states[7:])
    return compute_into("pool_forward", tensors, options, inputs, (recurrent, *states), (*inputs, states[0]), out)


# verify: states that are read, and drafts' states in a buffer of their own.


def _verify(options: Options, inputs: tuple, rest: tuple) -> None:
    q = inputs[0]
    if _ffi.verify(_allocator(q), (*options, _threads(q), *inputs, *rest)):
        states_out, o = rest[3], rest[6]
        increment_version((o,) if states_out is None else (o, states_out))


_define(
    f"verify({_OPTIONS}, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, "
    "Tensor state_pool, Tensor initial_state_indices, Tensor? parents, Tensor(a!)? states_out, "
    "Tensor? states_out_indices, int null_index, Tensor(b!) o) -> ()",
    _verify,
    _pool_forward_fake,
    inputs=7,
)


def verify(options: Options, inputs: Tuple[Optional[Tensor], ...], states: tuple, out: Optional[Tensor]) -> Tensor:
    """gated_delta_rule_verify() on tensors. `inputs`: q .. dt_bias; `states`: state_pool .. null_index."""
    return compute_into("verify", (*inputs, *states[:-1]), options, inputs, states, (*inputs, states[0]), out)
