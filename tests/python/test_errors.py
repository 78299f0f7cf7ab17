"""Requirement 18: every rule of the contract broken once, on purpose: the right exception, the right words, nothing written.

A message reads "operation: argument rule (what was given)" in some order of the last two; each case below says which
argument and which given value must appear.
"""

import functools
import re
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
import torch
from helpers import make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla

pytestmark = pytest.mark.requirement(18)

B, T, HQ, HV, K, V, N, SLOTS = 2, 70, 2, 4, 16, 8, 2, 5


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype, device=helpers.settings.device)


def cu(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=helpers.settings.device)


# How to call each operation legally: every case changes this in one place.


def tokens(batch=B, count=T):
    x = make_inputs(B=batch, T=count, Hq=HQ, Hv=HV, K=K, V=V, grads=False, state=False)
    return dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta)


def chunk_arguments():
    return tokens() | dict(initial_state=zeros(N, HV, K, V), output_final_state=True)


def fwd_arguments():
    return tokens() | dict(initial_state=zeros(N, HV, K, V), output_h=True)


def bwd_arguments():
    return tokens() | dict(A=zeros(B, T, HV, 64), do=zeros(B, T, HV, V), dht=zeros(N, HV, K, V), initial_state=zeros(N, HV, K, V))


def recurrent_arguments():
    return tokens(count=3) | dict(initial_state=zeros(N, HV, K, V), output_final_state=True)


def prefill_arguments():
    # Canaries: 7 in the pool, in out, and in the checkpoints.
    return tokens(1, 130) | dict(
        state_pool=zeros(SLOTS, HV, V, K) + 7, initial_state_indices=cu([1, 2]), final_state_indices=cu([1, 3]),
        cu_seqlens=cu([0, 60, 130]), out=zeros(1, 130, HV, V) + 7, checkpoint_every=64, checkpoints=zeros(2, HV, V, K) + 7,
        checkpoint_cu_starts=cu([0, 0, 1]), checkpoint_offsets=cu([10]), checkpoint_indices=cu([4]))


def decode_arguments():
    return tokens(N, 2) | dict(
        state_pool=zeros(SLOTS, HV, V, K) + 7, initial_state_indices=cu([[0, 1], [2, 3]]), final_state_indices=cu([[0, 1], [2, 3]]),
        num_accepted_tokens=cu([1, 2]), out=zeros(N, 2, HV, V) + 7)


def verify_arguments():
    return tokens(N, 2) | dict(
        state_pool=zeros(SLOTS, HV, V, K) + 7, initial_state_indices=cu([1, 2]), parents=cu([[-1, 0], [-1, -1]]),
        states_out=zeros(3, 2, HV, V, K) + 7, states_out_indices=cu([2, 0]), out=zeros(N, 2, HV, V) + 7)


OPERATIONS = {
    "chunk_gated_delta_rule": chunk_arguments, "chunk_gated_delta_rule_fwd": fwd_arguments,
    "chunk_gated_delta_rule_bwd": bwd_arguments, "fused_recurrent_gated_delta_rule": recurrent_arguments,
    "gated_delta_rule_prefill": prefill_arguments, "gated_delta_rule_decode": decode_arguments,
    "gated_delta_rule_verify": verify_arguments}
WRITTEN = ("state_pool", "states_out", "out", "checkpoints")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_unbroken_call_is_accepted(operation):
    getattr(flash_qla, operation)(**OPERATIONS[operation]())


def refuse(operation, changes, exception, argument, *given):
    """The call with `changes` raises; the message has the form, names the argument and each of `given`; nothing changed."""
    arguments = OPERATIONS[operation]()
    arguments |= changes(SimpleNamespace(**arguments))
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    with pytest.raises(exception) as caught:
        getattr(flash_qla, operation)(**arguments)
    assert type(caught.value) is exception
    message = str(caught.value)
    assert message.startswith(f"{operation}: "), message
    words = message.removeprefix(f"{operation}: ")
    assert re.match(rf"(.* )?{re.escape(argument)}\b", words) or words.startswith(argument), message
    for value in given:
        assert str(value) in words, f"{value!r} is not in: {message}"
    assert "\n" not in message
    for name, t in before.items():
        helpers.assert_bitwise(name, arguments[name], t)


def case(name, changes, exception, argument, *given, of=tuple(OPERATIONS)):
    return [pytest.param(operation, changes, exception, argument, given, id=f"{operation}-{name}") for operation in of]


STATE = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "fused_recurrent_gated_delta_rule")
IN_PLACE = ("gated_delta_rule_prefill", "gated_delta_rule_decode")
POOL = (*IN_PLACE, "gated_delta_rule_verify")
ACTIVATIONS = ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule", *POOL)
CHUNK, FWD, BWD, RECURRENT, PREFILL, DECODE, VERIFY = ((name,) for name in OPERATIONS)
ONE_DTYPE = tuple(name for name in OPERATIONS if name not in RECURRENT)  # of q, k and v
VARLEN = ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "fused_recurrent_gated_delta_rule")
Value, Type, Missing = ValueError, TypeError, NotImplementedError


def other(t, **extents):
    """A tensor like t with some extents changed: other(x, d2=6)."""
    shape = list(t.shape)
    for key, value in extents.items():
        shape[int(key[1:])] = value
    return zeros(*shape, dtype=t.dtype)


def host_offsets_case(name, offsets, argument, *given, exception=Value):
    return case(f"host offsets {name}", lambda a: tokens(1) | dict(cu_seqlens=cu([0, 10, 70]), cu_seqlens_cpu=offsets),
                exception, argument, *given, of=FWD)


def in_one_buffer(a, name):
    """`out` and the tensor `name`, the latter in the first elements of the former."""
    t = getattr(a, name)
    out = torch.cat([t.flatten(), a.out.flatten()])
    return {"out": out[: a.out.numel()].view(a.out.shape), name: out[: t.numel()].view(t.shape)}


CASES = [
    # shapes of q, k, v
    *case("heads", lambda a: dict(v=other(a.v, d2=3), g=other(a.g, d2=3), beta=other(a.beta, d2=3)), Value, "v.shape[2]", "(3)", "(2)"),
    *case("more key heads", lambda a: dict(k=other(a.k, d2=1)), Value, "k.shape[2]", "(1)", "(2)"),
    *case("key dim", lambda a: dict(k=other(a.k, d3=15)), Value, "k.shape[3]", "(15)", "(16)"),
    *case("key batch", lambda a: dict(k=other(a.k, d0=5)), Value, "k.shape[0]", "(5)"),
    *case("key tokens", lambda a: dict(k=other(a.k, d1=1)), Value, "k.shape[1]", "(1)"),
    *case("value tokens", lambda a: dict(v=other(a.v, d1=1)), Value, "v.shape[1]", "(1)"),
    *case("value batch", lambda a: dict(v=other(a.v, d0=5)), Value, "v.shape[0]", "(5)"),
    *case("q ndim", lambda a: dict(q=a.q[0]), Value, "q.ndim", "(3)"),
    *case("k ndim", lambda a: dict(k=a.k[..., None]), Value, "k.ndim", "(5)"),
    *case("v ndim", lambda a: dict(v=a.v[0, 0]), Value, "v.ndim", "(2)"),
    *case("q scalar", lambda a: dict(q=a.q.sum()), Value, "q.ndim", "(0)"),
    *case("no key heads", lambda a: dict(q=other(a.q, d2=0), k=other(a.k, d2=0)), Value, "q.shape[2]", "(0)"),
    *case("no value heads", lambda a: dict(v=other(a.v, d2=0), g=other(a.g, d2=0), beta=other(a.beta, d2=0)), Value, "v.shape[2]", "(0)"),
    *case("K of 0", lambda a: dict(q=other(a.q, d3=0), k=other(a.k, d3=0)), Value, "q.shape[3]", "(0)", "256"),
    *case("K of 257", lambda a: dict(q=other(a.q, d3=257), k=other(a.k, d3=257)), Value, "q.shape[3]", "(257)", "256"),
    *case("V of 0", lambda a: dict(v=other(a.v, d3=0)), Value, "v.shape[3]", "(0)"),
    *case("V of 257", lambda a: dict(v=other(a.v, d3=257)), Value, "v.shape[3]", "(257)"),
    # dtypes of q, k, v
    *case("q dtype", lambda a: dict(q=a.q.to(torch.int64)), Type, "q.dtype", "int64"),
    *case("complex q", lambda a: dict(q=a.q.to(torch.complex64)), Type, "q.dtype", "complex64"),
    *case("k dtype", lambda a: dict(k=a.k.bfloat16()), Type, "k.dtype", "bfloat16", "float32", of=ONE_DTYPE),
    *case("v dtype", lambda a: dict(v=a.v.half()), Type, "v.dtype", "float16", "float32", of=ONE_DTYPE),
    *case("k float64", lambda a: dict(k=a.k.double()), Type, "k.dtype", "float64", "float32", of=RECURRENT),
    *case("v integers", lambda a: dict(v=a.v.int()), Type, "v.dtype", "int32", of=RECURRENT),
    # gate and beta
    *case("g heads", lambda a: dict(g=other(a.g, d2=2)), Value, "g.shape[2]", "(2)", "(4)"),
    *case("g tokens", lambda a: dict(g=other(a.g, d1=1)), Value, "g.shape[1]", "(1)"),
    *case("g ndim", lambda a: dict(g=a.g[..., None]), Value, "g.ndim", "(4)"),
    *case("g dtype", lambda a: dict(g=a.g.to(torch.int32)), Type, "g.dtype", "int32"),
    *case("float64 g", lambda a: dict(g=a.g.double()), Type, "g.dtype", "float64"),
    *case("beta heads", lambda a: dict(beta=other(a.beta, d2=2)), Value, "beta.shape[2]", "(2)", "(4)"),
    *case("beta per channel", lambda a: dict(beta=torch.ones_like(a.v)), Value, "beta.ndim", "(4)"),
    *case("beta dtype", lambda a: dict(beta=a.beta.to(torch.bool)), Type, "beta.dtype", "bool"),
    # in-kernel activations
    *case("gate without A_log", lambda a: dict(use_gate_in_kernel=True), Value, "A_log", "None", of=ACTIVATIONS),
    *case("A_log without gate", lambda a: dict(A_log=zeros(HV)), Value, "A_log", "given", of=ACTIVATIONS),
    *case("dt_bias without gate", lambda a: dict(dt_bias=zeros(HV)), Value, "dt_bias", "given", of=ACTIVATIONS),
    *case("gate without g", lambda a: dict(g=None, use_gate_in_kernel=True, A_log=zeros(HV)), Value, "g", "None", of=ACTIVATIONS),
    *case("A_log shape", lambda a: dict(use_gate_in_kernel=True, A_log=zeros(HQ)), Value, "A_log.shape[0]", "(2)", "(4)", of=ACTIVATIONS),
    *case("A_log ndim", lambda a: dict(use_gate_in_kernel=True, A_log=zeros(1, HV)), Value, "A_log.ndim", "(2)", of=ACTIVATIONS),
    *case("A_log dtype", lambda a: dict(use_gate_in_kernel=True, A_log=zeros(HV, dtype=torch.int32)), Type, "A_log.dtype", "int32", of=ACTIVATIONS),
    *case("dt_bias shape", lambda a: dict(use_gate_in_kernel=True, A_log=zeros(HV), dt_bias=zeros(HQ)), Value, "dt_bias.shape[0]", "(2)", of=ACTIVATIONS),
    *case("dt_bias dtype", lambda a: dict(use_gate_in_kernel=True, A_log=zeros(HV), dt_bias=zeros(HV, dtype=torch.bool)), Type, "dt_bias.dtype", "bool", of=ACTIVATIONS),
    *case("sigmoid without beta", lambda a: dict(beta=None, use_beta_sigmoid_in_kernel=True), Value, "beta", "None", of=ACTIVATIONS),
    *case("negative eigenvalues alone", lambda a: dict(allow_neg_eigval=True), Value, "allow_neg_eigval", "True", "use_beta_sigmoid_in_kernel", of=ACTIVATIONS),
    # numbers and what is not a tensor
    *case("q None", lambda a: dict(q=None), Type, "q", "None"),
    *case("v a list", lambda a: dict(v=[1.0]), Type, "v", "list"),
    *case("beta a float", lambda a: dict(beta=0.5), Type, "beta", "float"),
    *case("beta an int", lambda a: dict(beta=1), Type, "beta", "int"),
    *case("scale text", lambda a: dict(scale="0.5"), Type, "scale", "str"),
    *case("scale NaN", lambda a: dict(scale=float("nan")), Value, "scale", "nan"),
    *case("scale NaN of numpy", lambda a: dict(scale=np.float32("nan")), Value, "scale", "nan"),
    # packed sequences
    *case("packed batch", lambda a: dict(cu_seqlens=cu([0, 10, 70])), Value, "q.shape[0]", "(2)", "cu_seqlens", of=VARLEN),
    *case("offsets dtype", lambda a: dict(cu_seqlens=zeros(3)), Type, "cu_seqlens.dtype", "float32", of=(*VARLEN, *PREFILL)),
    *case("offsets of 16 bits", lambda a: dict(cu_seqlens=cu([0, 10, 70], torch.int16)), Type, "cu_seqlens.dtype", "int16", "be int32 or int64", of=(*VARLEN, *PREFILL)),
    *case("offsets ndim", lambda a: dict(cu_seqlens=cu([[0, 10, 70]])), Value, "cu_seqlens.ndim", "(2)", of=(*VARLEN, *PREFILL)),
    *case("no offsets", lambda a: dict(cu_seqlens=cu([])), Value, "cu_seqlens.shape[0]", "(0)", of=(*VARLEN, *PREFILL)),
    *case("offsets a list", lambda a: dict(cu_seqlens=[0, 10]), Type, "cu_seqlens", "list", of=(*VARLEN, *PREFILL)),
    # states
    *case("state rows", lambda a: dict(initial_state=other(a.initial_state, d0=3)), Value, "initial_state.shape[0]", "(3)", "(2)", of=STATE),
    *case("state heads", lambda a: dict(initial_state=other(a.initial_state, d1=2)), Value, "initial_state.shape[1]", "(2)", "(4)", of=STATE),
    *case("state layout", lambda a: dict(initial_state=a.initial_state.mT), Value, "initial_state.shape[2]", "(8)", "(16)", of=STATE),
    *case("state layout v first", lambda a: dict(state_v_first=True), Value, "initial_state.shape[2]", "(16)", "(8)", of=STATE),
    *case("state ndim", lambda a: dict(initial_state=a.initial_state[0]), Value, "initial_state.ndim", "(3)", of=STATE),
    *case("state dtype", lambda a: dict(initial_state=a.initial_state.to(torch.int64)), Type, "initial_state.dtype", "int64", of=STATE),
    *case("float64 state", lambda a: dict(initial_state=a.initial_state.double()), Type, "initial_state.dtype", "float64", of=STATE),
    # the chunked call's own
    *case("head first", lambda a: dict(head_first=True), Value, "head_first", "True", "transpose", of=CHUNK),
    *case("auto_cp", lambda a: dict(auto_cp="always"), Value, "auto_cp", "always", of=(*CHUNK, *FWD, *BWD)),
    *case("auto_cp number", lambda a: dict(auto_cp=2), Value, "auto_cp", "2", of=CHUNK),
    *case("tolerance of zero", lambda a: dict(cp_tolerance=0.0), Value, "cp_tolerance", "0.0", of=CHUNK),
    *case("tolerance NaN", lambda a: dict(cp_tolerance=float("nan")), Value, "cp_tolerance", "nan", of=CHUNK),
    *case("neighbours without a group",
          lambda a: dict(cp_context=SimpleNamespace(group=None, pre_num_ranks=1, post_num_ranks=0, cu_seqlens=None)),
          Value, "cp_context.group", "1 other rank(s)", of=(*CHUNK, *FWD, *BWD)),
    *case("several cards", lambda a: dict(cp_context=SimpleNamespace(group=SimpleNamespace(size=lambda: 2, rank=lambda: 0))),
          Missing, "cp_context", "2 ranks", of=(*FWD, *BWD)),
    # offsets on the host
    *host_offsets_case("too few", [0, 70], "cu_seqlens_cpu.shape[0]", "(2)", "(3)"),
    *host_offsets_case("not from zero", [1, 10, 70], "cu_seqlens_cpu[0]", "(1)"),
    *host_offsets_case("that go back", [0, 60, 50], "cu_seqlens_cpu[2]", "(50)", "(60)"),
    *host_offsets_case("past the tokens", [0, 10, 71], "cu_seqlens_cpu[2]", "(71)", "(70)"),
    *host_offsets_case("of several rows", [[0, 10, 70]], "cu_seqlens_cpu[0]", "list", exception=Type),
    *host_offsets_case("a number", 70, "cu_seqlens_cpu", "int", exception=Type),
    # the low-level backward
    *case("A width", lambda a: dict(A=other(a.A, d3=32)), Value, "A.shape[3]", "(32)", "(64)", of=BWD),
    *case("A heads", lambda a: dict(A=other(a.A, d2=2)), Value, "A.shape[2]", "(2)", of=BWD),
    *case("A dtype", lambda a: dict(A=a.A.bfloat16()), Type, "A.dtype", "bfloat16", of=BWD),
    *case("do shape", lambda a: dict(do=other(a.do, d3=16)), Value, "do.shape[3]", "(16)", "(8)", of=BWD),
    *case("do dtype", lambda a: dict(do=a.do.to(torch.int32)), Type, "do.dtype", "int32", of=BWD),
    *case("dht shape", lambda a: dict(dht=other(a.dht, d0=1)), Value, "dht.shape[0]", "(1)", "(2)", of=BWD),
    *case("dht dtype", lambda a: dict(dht=a.dht.to(torch.int32)), Type, "dht.dtype", "int32", of=BWD),
    # decay per channel
    *case("gk", lambda a: dict(gk=torch.zeros_like(a.q)), Missing, "gk", "given", of=RECURRENT),
    *case("gv", lambda a: dict(gv=torch.zeros_like(a.v)), Missing, "gv", "given", of=RECURRENT),
    # the pool
    *case("pool heads", lambda a: dict(state_pool=other(a.state_pool, d1=2)), Value, "state_pool.shape[1]", "(2)", "(4)", of=POOL),
    *case("pool layout", lambda a: dict(state_pool=a.state_pool.mT.contiguous()), Value, "state_pool.shape[2]", "(16)", "(8)", of=POOL),
    *case("pool ndim", lambda a: dict(state_pool=a.state_pool[0]), Value, "state_pool.ndim", "(3)", of=POOL),
    *case("pool dtype", lambda a: dict(state_pool=a.state_pool.to(torch.int32)), Type, "state_pool.dtype", "int32", of=POOL),
    *case("float64 pool", lambda a: dict(state_pool=a.state_pool.double()), Type, "state_pool.dtype", "float64", of=POOL),
    *case("pool strides", lambda a: dict(state_pool=torch.zeros(SLOTS, HV, K, V, device=a.q.device).mT), Value, "state_pool.stride[3]", "(8)", of=POOL),
    *case("indices dtype", lambda a: dict(initial_state_indices=a.initial_state_indices.float()), Type, "initial_state_indices.dtype", "float32", of=POOL),
    *case("indices rows", lambda a: dict(initial_state_indices=a.initial_state_indices[:1]), Value, "initial_state_indices.shape[0]", "(1)", "(2)", of=POOL),
    *case("final rows", lambda a: dict(final_state_indices=a.final_state_indices[:1]), Value, "final_state_indices.shape[0]", "(1)", "(2)", of=IN_PLACE),
    *case("final dtype", lambda a: dict(final_state_indices=a.final_state_indices.bool()), Type, "final_state_indices.dtype", "bool", of=IN_PLACE),
    *case("prefill columns", lambda a: dict(initial_state_indices=cu([[1], [2]])), Value, "initial_state_indices.ndim", "(2)", of=PREFILL),
    *case("has dtype", lambda a: dict(has_initial_state=cu([1, 0])), Type, "has_initial_state.dtype", "int32", of=PREFILL),
    *case("has rows", lambda a: dict(has_initial_state=cu([True], torch.bool)), Value, "has_initial_state.shape[0]", "(1)", of=PREFILL),
    *case("out shape", lambda a: dict(out=other(a.out, d3=16)), Value, "o", "(16)", "(8)", of=POOL),
    *case("out dtype", lambda a: dict(out=a.out.bfloat16()), Type, "o", "bfloat16", of=POOL),
    *case("out expanded", lambda a: dict(out=a.out[..., :1].expand_as(a.out)), Value, "o", "(0)", of=POOL),
    *case("out is v", lambda a: dict(out=a.v), Value, "o", "memory with v", of=POOL),
    *(c for name in ("q", "k", "v", "g", "beta", "state_pool")
      for c in case(f"out over {name}", lambda a, name=name: in_one_buffer(a, name), Value, "o", f"memory with {name}", of=POOL)),
    *case("out over itself", lambda a: dict(out=a.out.flatten()[: a.out.numel() // 2 + V].as_strided(a.out.shape, (0, HV * V // 2, V, 1))),
          Value, "o.stride", "overlap", of=PREFILL),
    *case("checkpoints in the pool", lambda a: dict(checkpoints=a.state_pool[:2]), Value, "checkpoints", "memory with state_pool", of=PREFILL),
    *case("pool over v", lambda a: dict(v=a.state_pool.flatten()[: T * HV * V].view(1, T, HV, V)) | {name: getattr(a, name)[:, :T] for name in ("q", "k", "g", "beta", "out")},
          Value, "state_pool", "memory with v", of=PREFILL),
    *case("null index of 71 bits", lambda a: dict(null_index=2**70), Value, "null_index", 2**70, of=POOL),
    *case("null index a float", lambda a: dict(null_index=-1.0), Type, "null_index", "float", of=POOL),
    *case("null index a tensor", lambda a: dict(null_index=cu(-1)), Type, "null_index", "Tensor", of=POOL),
    *case("indices of 16 bits", lambda a: dict(initial_state_indices=a.initial_state_indices.to(torch.int16)), Type, "initial_state_indices.dtype", "int16", "be int32 or int64", of=POOL),
    *case("final indices of 8 bits", lambda a: dict(final_state_indices=a.final_state_indices.to(torch.uint8)), Type, "final_state_indices.dtype", "uint8", "be int32 or int64", of=IN_PLACE),
    *case("has of 8 bits", lambda a: dict(has_initial_state=cu([1, 0], torch.uint8)), Type, "has_initial_state.dtype", "uint8", "be bool", of=PREFILL),
    *case("drafts", lambda a: tokens(N, 17) | dict(out=None, final_state_indices=None, initial_state_indices=cu([0, 1]), num_accepted_tokens=None),
          Value, "q.shape[1]", "(17)", "16", of=DECODE),
    *case("columns without counts", lambda a: dict(num_accepted_tokens=None), Value, "num_accepted_tokens", "None", of=DECODE),
    *case("counts without columns", lambda a: dict(initial_state_indices=cu([0, 1])), Value, "initial_state_indices.ndim", "(1)", of=DECODE),
    *case("counts rows", lambda a: dict(num_accepted_tokens=cu([1])), Value, "num_accepted_tokens.shape[0]", "(1)", of=DECODE),
    *case("counts dtype", lambda a: dict(num_accepted_tokens=zeros(2)), Type, "num_accepted_tokens.dtype", "float32", of=DECODE),
    *case("final columns", lambda a: dict(final_state_indices=cu([[0, 1, 4], [2, 3, 4]])), Value, "final_state_indices.shape[1]", "(3)", "(2)", of=DECODE),
    *case("too few default columns", lambda a: dict(final_state_indices=None, initial_state_indices=cu([[0], [1]]), num_accepted_tokens=cu([1, 1])),
          Value, "initial_state_indices.shape[1]", "(1)", "(2)", of=DECODE),
    *case("verified drafts", lambda a: tokens(N, 17) | dict(out=None, parents=None, states_out=None, states_out_indices=None),
          Value, "q.shape[1]", "(17)", "16", of=VERIFY),
    *case("no pool", lambda a: dict(state_pool=None), Value, "state_pool", "None", of=VERIFY),
    *case("parents rows", lambda a: dict(parents=a.parents[:1]), Value, "parents.shape[0]", "(1)", "(2)", of=VERIFY),
    *case("parents tokens", lambda a: dict(parents=a.parents[:, :1]), Value, "parents.shape[1]", "(1)", "(2)", of=VERIFY),
    *case("parents ndim", lambda a: dict(parents=a.parents[0]), Value, "parents.ndim", "(1)", of=VERIFY),
    *case("parents dtype", lambda a: dict(parents=a.parents.float()), Type, "parents.dtype", "float32", of=VERIFY),
    *case("states tokens", lambda a: dict(states_out=a.states_out[:, :1]), Value, "states_out.shape[1]", "(1)", "(2)", of=VERIFY),
    *case("states heads", lambda a: dict(states_out=a.states_out[:, :, :2]), Value, "states_out.shape[2]", "(2)", "(4)", of=VERIFY),
    *case("states layout", lambda a: dict(states_out=a.states_out.mT.contiguous()), Value, "states_out.shape[3]", "(16)", "(8)", of=VERIFY),
    *case("states strides", lambda a: dict(states_out=a.states_out.mT.contiguous().mT), Value, "states_out.stride[4]", "(8)", of=VERIFY),
    *case("states ndim", lambda a: dict(states_out=a.states_out[0]), Value, "states_out.ndim", "(4)", of=VERIFY),
    *case("states dtype", lambda a: dict(states_out=a.states_out.bfloat16()), Type, "states_out.dtype", "bfloat16", "state_pool", of=VERIFY),
    *case("too few states", lambda a: dict(states_out=a.states_out[:1], states_out_indices=None), Value, "states_out.shape[0]", "(1)", "2", of=VERIFY),
    *case("states rows", lambda a: dict(states_out_indices=cu([0])), Value, "states_out_indices.shape[0]", "(1)", "(2)", of=VERIFY),
    *case("states rows dtype", lambda a: dict(states_out_indices=zeros(2)), Type, "states_out_indices.dtype", "float32", of=VERIFY),
    *case("rows without states", lambda a: dict(states_out=None), Value, "states_out_indices", "given", of=VERIFY),
    *case("states in the pool", lambda a: dict(states_out=a.state_pool[:4].view(2, 2, HV, V, K), states_out_indices=None),
          Value, "states_out", "memory with state_pool", of=VERIFY),
    # checkpoints
    *case("every 100", lambda a: dict(checkpoint_every=100), Value, "checkpoint_every", "(100)", "64", of=PREFILL),
    *case("every a float", lambda a: dict(checkpoint_every=64.0), Type, "checkpoint_every", "float", of=PREFILL),
    *case("every -64", lambda a: dict(checkpoint_every=-64), Value, "checkpoint_every", "(-64)", of=PREFILL),
    *case("no checkpoints", lambda a: dict(checkpoints=None), Value, "checkpoints", "None", of=PREFILL),
    *case("no starts", lambda a: dict(checkpoint_cu_starts=None), Value, "checkpoint_cu_starts", "None", of=PREFILL),
    *case("checkpoints without every", lambda a: dict(checkpoint_every=0), Value, "checkpoints", "given", of=PREFILL),
    *case("checkpoints shape", lambda a: dict(checkpoints=other(a.checkpoints, d3=8)), Value, "checkpoints.shape[3]", "(8)", of=PREFILL),
    *case("checkpoints dtype", lambda a: dict(checkpoints=a.checkpoints.long()), Type, "checkpoints.dtype", "int64", of=PREFILL),
    *case("starts rows", lambda a: dict(checkpoint_cu_starts=cu([0, 1])), Value, "checkpoint_cu_starts.shape[0]", "(2)", "(3)", of=PREFILL),
    *case("starts dtype", lambda a: dict(checkpoint_cu_starts=zeros(3)), Type, "checkpoint_cu_starts.dtype", "float32", of=PREFILL),
    *case("offsets without slots", lambda a: dict(checkpoint_indices=None), Value, "checkpoint_indices", "None", of=PREFILL),
    *case("slots without offsets", lambda a: dict(checkpoint_offsets=None), Value, "checkpoint_offsets", "None", of=PREFILL),
    *case("slots rows", lambda a: dict(checkpoint_indices=cu([4, 0])), Value, "checkpoint_indices.shape[0]", "(2)", "(1)", of=PREFILL),
    *case("listed dtype", lambda a: dict(checkpoint_offsets=zeros(1)), Type, "checkpoint_offsets.dtype", "float32", of=PREFILL),
    *case("listed slot dtype", lambda a: dict(checkpoint_indices=zeros(1)), Type, "checkpoint_indices.dtype", "float32", of=PREFILL),
]


@pytest.mark.parametrize("operation,changes,exception,argument,given", CASES)
def test_a_broken_rule_is_refused(operation, changes, exception, argument, given):
    refuse(operation, changes, exception, argument, *given)


@pytest.mark.parametrize("argument", ["state_pool", "initial_state_indices"])
@pytest.mark.parametrize("operation", POOL)
def test_required_pool_arguments(operation, argument):
    with pytest.raises((ValueError, TypeError), match=argument):
        getattr(flash_qla, operation)(**OPERATIONS[operation]() | {argument: None})


def test_unknown_path_is_refused():
    with flash_qla.use_path("warp_speed"), pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: path \(warp_speed\) must be one of: .*"):
        flash_qla.chunk_gated_delta_rule(**chunk_arguments())


# A tensor argument of an operation at a time.
EACH_TENSOR = [(operation, name) for operation, arguments in OPERATIONS.items()
               for name, value in arguments().items() if isinstance(value, torch.Tensor)]


def refuse_replaced(operation, replaced, argument, rule):
    """The call with some tensors replaced by others without memory of the usual kind is refused; nothing changed."""
    arguments = OPERATIONS[operation]()
    before = {name: t.clone() for name, t in arguments.items() if isinstance(t, torch.Tensor) and name not in replaced}
    for call in (getattr(flash_qla, operation), functools.partial(flash_qla.explain, op=operation)):
        with pytest.raises(ValueError) as caught:
            call(**arguments | replaced)
        assert str(caught.value).startswith(f"{operation}: {argument}{rule}"), str(caught.value)
    for name, t in before.items():
        helpers.assert_bitwise(name, arguments[name], t)


@pytest.mark.parametrize("operation,name", EACH_TENSOR)
def test_a_tensor_on_a_device_without_memory_is_refused(operation, name):
    refuse_replaced(operation, {name: OPERATIONS[operation]()[name].to("meta")}, name, ".device (meta) must be ")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_that_are_all_on_a_device_without_memory_are_refused(operation):
    arguments = OPERATIONS[operation]()
    replaced = {name: t.to("meta") for name, t in arguments.items() if isinstance(t, torch.Tensor)}
    refuse_replaced(operation, replaced, "q", ".device (meta) must be ")


def test_recorded_calls_on_a_device_without_memory_are_refused():
    arguments = chunk_arguments()
    refuse_replaced("chunk_gated_delta_rule", {"k": arguments["k"].to("meta").requires_grad_()}, "k", ".device (meta) must be ")


@pytest.mark.parametrize("operation,name", EACH_TENSOR)
def test_a_sparse_tensor_is_refused(operation, name):
    refuse_replaced(operation, {name: OPERATIONS[operation]()[name].to_sparse()}, name, ".layout (sparse_coo) must be strided")


def test_fake_tensors_have_shapes_alone():
    with FakeTensorMode(allow_non_fake_inputs=True):
        for device in (helpers.settings.device, "meta"):
            q, v = torch.empty(B, T, HQ, K, device=device), torch.empty(B, T, HV, V, device=device)
            o, final_state = flash_qla.chunk_gated_delta_rule(q, q, v, None, None, output_final_state=True)
            assert o.shape == (B, T, HV, V) and final_state.shape == (N, HV, K, V) and o.device.type == device
            with pytest.raises(ValueError, match=r"^explain: op \(chunk_gated_delta_rule\) must be given tensors with memory"):
                flash_qla.explain(q, q, v, None, None)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_sign_that_is_not_in_memory_counts(operation, name):
    # The imaginary part of a conjugate is a view of the positive numbers, with a mark.
    arguments = OPERATIONS[operation]()
    arguments |= {key: torch.rand_like(value) for key, value in arguments.items() if key in ("A", "do", "dht")}
    marked = torch.complex(arguments[name], arguments[name]).conj().imag
    assert marked.is_neg()
    marked_first = {}
    for kind, value in (("marked", marked), ("plain", marked.resolve_neg())):
        given = {key: t.clone() if key in WRITTEN else t for key, t in arguments.items()} | {name: value}
        found = getattr(flash_qla, operation)(**given)
        results = {f"result {i}": t for i, t in enumerate(found if isinstance(found, tuple) else (found,)) if t is not None}
        results |= {key: given[key] for key in WRITTEN if key in given}
        if kind == "marked":
            marked_first = results
        else:
            for key, t in results.items():
                helpers.assert_bitwise(key, marked_first[key], t)


@pytest.mark.parametrize("name", ["do", "dht"])
def test_a_gradients_sign_that_is_not_in_memory_counts(name):
    arguments = bwd_arguments()
    marked = torch.complex(torch.rand_like(arguments[name]), torch.rand_like(arguments[name])).conj().imag
    pairs = zip(flash_qla.chunk_gated_delta_rule_bwd(**arguments | {name: marked}),
                flash_qla.chunk_gated_delta_rule_bwd(**arguments | {name: marked.resolve_neg()}))
    for i, (a, b) in enumerate(pairs):
        helpers.assert_bitwise(f"gradient {i}", a, b)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_host_offsets_on_a_device_are_refused(device):
    arguments = fwd_arguments() | tokens(1) | dict(cu_seqlens=cu([0, 10, 70]), cu_seqlens_cpu=cu([0, 10, 70]).to(device))
    with pytest.raises(ValueError, match=rf"^chunk_gated_delta_rule_fwd: cu_seqlens_cpu.device \({device}.*\) must be the host"):
        flash_qla.chunk_gated_delta_rule_fwd(**arguments)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["k", "g", "initial_state"])
def test_tensors_on_two_devices_are_refused(name):
    arguments = chunk_arguments()
    arguments[name] = arguments[name].cpu()
    with pytest.raises((TypeError, ValueError), match=f"^chunk_gated_delta_rule: {name}'s device "):
        flash_qla.chunk_gated_delta_rule(**arguments)


def test_unknown_keywords_are_refused():
    with pytest.raises(TypeError, match="chunk_sizes"):
        flash_qla.chunk_gated_delta_rule(**chunk_arguments(), chunk_sizes=64)


@pytest.mark.cpu_only
def test_cuda_tensors_without_cuda_get_a_sentence_that_says_what_to_do():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    if any("cuda" in value for value in flash_qla.build_info().values()):
        pytest.skip("this build has CUDA")
    with pytest.raises(NotImplementedError, match=r"^gated_delta_rule_prefill: device \(cuda\) .*FLASH_QLA_CUDA=ON.*CPU"):
        flash_qla.workspace_size("gated_delta_rule_prefill", 1024, 4, HQ, HV, K, V, device="cuda")


def test_explain_and_workspace_size_refuse_what_the_call_refuses():
    arguments = chunk_arguments()
    arguments["k"] = arguments["k"][..., :15]
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: k.shape\[3\] \(15\)"):
        flash_qla.explain(**arguments)
    with pytest.raises(ValueError, match=r"^gated_delta_rule_decode: v.shape\[2\] \(3\)"):
        flash_qla.workspace_size("gated_delta_rule_decode", 16, 16, 2, 3, 64, 64, device=helpers.settings.device)
    with pytest.raises(ValueError, match=r"^workspace_size: op \(attention\)"):
        flash_qla.workspace_size("attention", 16, 16, 2, 4, 64, 64)
    for changed, exception, words in [
            (dict(max_tokens=10.5), TypeError, r"max_tokens must be an integer \(float\)"),
            (dict(max_tokens=-1), ValueError, r"max_tokens must be from 0 .*\(-1\)"),
            (dict(max_seqs=2**70), ValueError, rf"max_seqs must be from 0 .*\({2**70}\)"),
            (dict(checkpoint_offsets=-1), ValueError, r"checkpoint_offsets must be from 0 .*\(-1\)"),
            (dict(dtype="bloat16"), TypeError, r"dtype \(bloat16\) must be "),
            (dict(gate_dtype=torch.int32), TypeError, r"gate_dtype \(torch.int32\) must be "),
            (dict(device="cuda:x"), ValueError, r"device \(cuda:x\) must be "),
            (dict(device="cuda:-1"), ValueError, r"device \(cuda:-1\) must be "),
            (dict(device="tpu"), ValueError, r"device \(tpu\) must be ")]:
        legal = dict(max_tokens=16, max_seqs=16, Hq=2, Hv=4, K=64, V=64, device="cpu")
        with pytest.raises(exception, match="^workspace_size: " + words):
            flash_qla.workspace_size("gated_delta_rule_decode", **legal | changed)
    with pytest.raises(ValueError, match=r"^explain: op \(attention\)"):
        flash_qla.explain(**chunk_arguments(), op="attention")
