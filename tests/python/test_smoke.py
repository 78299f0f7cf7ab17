"""Smoke tests of the Python package on the fp64 reference path: each front end once, end to end."""

import numpy as np
import pytest
import torch

import flash_qla

OPERANDS = ("q", "k", "v", "g", "beta", "initial_state")


@pytest.fixture(autouse=True)
def reference_path():
    with flash_qla.use_path("reference"):
        yield


def make_inputs(dtype=torch.float32, B=2, T=70, Hq=2, Hv=4, K=8, V=6, requires_grad=True, seed=0):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=gen, dtype=torch.float64)

    tensors = dict(
        q=normal(B, T, Hq, K),
        k=torch.nn.functional.normalize(normal(B, T, Hq, K), dim=-1),
        v=normal(B, T, Hv, V),
        g=-normal(B, T, Hv).abs(),
        beta=normal(B, T, Hv).sigmoid(),
        initial_state=normal(B, Hv, K, V),
    )
    return {name: t.to(dtype).requires_grad_(requires_grad) for name, t in tensors.items()}


def chunk(q, k, v, g, beta, initial_state):
    return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=True)


def gradients(function, x):
    o, final_state = function(**x)
    return torch.autograd.grad(o.square().sum() + final_state.sum(), [x[name] for name in OPERANDS])


def test_gradcheck():
    x = make_inputs(torch.float64, B=1, T=5, Hq=1, Hv=2, K=3, V=4)
    assert torch.autograd.gradcheck(chunk, tuple(x.values()))


def test_compiled_equals_eager():
    x = make_inputs()
    eager = gradients(chunk, x)
    compiled = gradients(torch.compile(chunk, fullgraph=True), x)
    for name, a, b in zip(OPERANDS, eager, compiled):
        assert torch.equal(a, b), name


def test_operators_pass_opcheck():
    x = make_inputs(requires_grad=False)
    options = ("opcheck", "reference", None, False, False, False, False, False, 1, False, None)
    inputs = (x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, None, x["initial_state"])
    ops = torch.ops.flash_qla
    torch.library.opcheck(ops.chunk_forward.default, (*options, *inputs, True, True, True, 4))
    torch.library.opcheck(ops.recurrent.default, (*options, *inputs, True))
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    wanted = [True, True, True, True, True, False, False, True]
    torch.library.opcheck(ops.chunk_backward.default, (*options, *inputs, False, None, do, dht, True, wanted))
    pool = (torch.randn(3, 4, 8, 6), torch.tensor([2, 0]), None, None, None, -1, 0, None, None, None, None)
    torch.library.opcheck(ops.pool_forward.default, (False, *options, *inputs[:8], *pool, torch.empty_like(x["v"])))


def test_fake_tensors_need_no_computation():
    with torch._subclasses.FakeTensorMode():
        x = make_inputs(torch.bfloat16)
        o, final_state = chunk(**x)
        assert (o.shape, o.dtype) == ((2, 70, 4, 6), torch.bfloat16)
        assert (final_state.shape, final_state.dtype) == ((2, 4, 8, 6), torch.float32)


def test_gradient_checkpointing_and_expanded_gradients():
    x = make_inputs()

    def checkpointed(**inputs):
        return torch.utils.checkpoint.checkpoint(chunk, *inputs.values(), use_reentrant=False)

    for a, b in zip(gradients(chunk, x), gradients(checkpointed, x)):
        assert torch.equal(a, b)
    o, _ = chunk(**x)
    (expanded,) = torch.autograd.grad(o.sum(), x["v"], retain_graph=True)
    (dense,) = torch.autograd.grad(o, x["v"], torch.ones_like(o))
    assert torch.equal(expanded, dense)


def test_autocast_joins_dtypes():
    x = make_inputs(requires_grad=False)
    x["v"] = x["v"].bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        o, _ = chunk(**x)
    assert o.dtype == torch.bfloat16
    with pytest.raises(TypeError, match=r"chunk_gated_delta_rule: v.dtype \(bfloat16\) must be that of q \(float32\)"):
        chunk(**x)


def test_gradients_keep_their_inputs_dtype():
    x = make_inputs(torch.bfloat16)
    x["initial_state"] = x["initial_state"].detach().half().requires_grad_()
    for name, gradient in zip(OPERANDS, gradients(chunk, x)):
        assert gradient.dtype == x[name].dtype, name


def test_second_derivatives_are_refused():
    x = make_inputs()
    o, _ = chunk(**x)
    (dq,) = torch.autograd.grad(o.sum(), x["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        dq.sum().backward()


def test_recurrent_refuses_backward():
    x = make_inputs()
    o, _ = flash_qla.fused_recurrent_gated_delta_rule(x["q"], x["k"], x["v"], g=x["g"], beta=x["beta"])
    with pytest.raises(NotImplementedError, match="fused_recurrent_gated_delta_rule: backward"):
        o.sum().backward()


def test_numpy_equals_torch():
    x = make_inputs(torch.float64, requires_grad=False)
    a = {name: t.numpy() for name, t in x.items()}
    args = ("q", "k", "v", "g", "beta")
    kwargs = dict(output_h=True)
    by_torch = flash_qla.chunk_gated_delta_rule_fwd(
        *(x[n] for n in args), initial_state=x["initial_state"], **kwargs
    )
    by_numpy = flash_qla.chunk_gated_delta_rule_fwd(
        *(a[n] for n in args), initial_state=a["initial_state"], **kwargs
    )
    for t, n in zip(by_torch, by_numpy, strict=True):
        assert isinstance(n, np.ndarray)
        np.testing.assert_array_equal(t.numpy(), n)
    g, A, o, _, final_state = by_torch
    grads = flash_qla.chunk_gated_delta_rule_bwd(
        x["q"], x["k"], x["v"], g, x["beta"], A, o, final_state, initial_state=x["initial_state"]
    )
    by_numpy = flash_qla.chunk_gated_delta_rule_bwd(
        *(a[n] for n in ("q", "k", "v")), g.numpy(), a["beta"], A.numpy(), o.numpy(), final_state.numpy(),
        initial_state=a["initial_state"],
    )
    for t, n in zip(grads, by_numpy, strict=True):
        np.testing.assert_array_equal(t.numpy(), n)


def test_pool_is_written_in_place_and_prefill_then_decode_is_prefill():
    x = make_inputs(B=1, T=70, requires_grad=False)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    whole, _ = flash_qla.chunk_gated_delta_rule(**named)
    pool = torch.randn(3, 4, 6, 8)
    untouched = pool[[0, 1]].clone()
    slot = torch.tensor([2])
    first = flash_qla.gated_delta_rule_prefill(
        *(t[:, :66] for t in named.values()), pool, slot, cu_seqlens=torch.tensor([0, 66]),
        has_initial_state=torch.tensor([False]),
    )
    second = flash_qla.gated_delta_rule_decode(*(t[:, 66:] for t in named.values()), pool, slot)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-5, atol=1e-6)
    assert torch.equal(pool[[0, 1]], untouched)


def test_questions_about_calls():
    x = make_inputs(requires_grad=False)
    text = flash_qla.explain(x["q"], x["k"], x["v"], x["g"], x["beta"], op=flash_qla.chunk_gated_delta_rule_fwd)
    assert text.startswith("path: reference")
    for op in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "gated_delta_rule_prefill"):
        assert flash_qla.workspace_size(op, 1000, 4, 2, 4, 128, 128, device="cpu") >= 0
    assert "version" in flash_qla.build_info()


@pytest.mark.parametrize("form", [flash_qla.FLACPContext, flash_qla.FlashQLACPContext])
def test_contexts(form):
    x = make_inputs(B=1, requires_grad=False)
    named = {n: x[n] for n in ("q", "k", "v", "g", "beta")}
    cu_seqlens = torch.tensor([0, 30, 70])
    expected, _ = flash_qla.chunk_gated_delta_rule(**named, cu_seqlens=cu_seqlens)
    o, _ = flash_qla.chunk_gated_delta_rule(**named, cp_context=form(cu_seqlens=cu_seqlens))
    assert torch.equal(o, expected)
    with pytest.raises(NotImplementedError, match="several cards"):
        flash_qla.chunk_gated_delta_rule(**named, cp_context=form(pre_num_ranks=1))
