"""Smoke tests of the Python package on the fp64 reference path: each front end once, end to end."""

import importlib
import inspect
import subprocess
import sys

import numpy as np
import pytest
import torch

import flash_qla
from flash_qla._options import make_options

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
    options = make_options("opcheck")._replace(path="reference")
    inputs = (x["q"], x["k"], x["v"], x["g"], x["beta"], None, None, None, x["initial_state"])
    ops = torch.ops.flash_qla
    torch.library.opcheck(ops.chunk_forward.default, (*options, *inputs, True, True, True, 2))
    torch.library.opcheck(ops.recurrent.default, (*options, *inputs, True))
    do, dht = torch.randn_like(x["v"]), torch.randn_like(x["initial_state"])
    wanted = [True, True, True, True, True, False, False, True]
    torch.library.opcheck(ops.chunk_backward.default, (*options, *inputs, False, None, do, dht, True, wanted))
    pool = (torch.randn(3, 4, 8, 6), torch.tensor([2, 0]), None, None, None, -1, 0, None, None, None, None)
    torch.library.opcheck(ops.pool_forward.default, (*options, *inputs[:8], False, *pool, torch.empty_like(x["v"])))


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


@pytest.mark.parametrize("path", ["reference", None])
def test_numpy_equals_torch(path):
    """On the chosen path too: its scratch then comes from numpy, at numpy's alignment."""
    with flash_qla.use_path(path):
        compare_numpy_with_torch()


def compare_numpy_with_torch():
    x = make_inputs(torch.float64, requires_grad=False)
    a = {name: t.numpy() for name, t in x.items()}
    args = ("q", "k", "v", "g", "beta")
    kwargs = dict(output_h=True)
    by_torch = flash_qla.chunk_gated_delta_rule_fwd(*(x[n] for n in args), initial_state=x["initial_state"], **kwargs)
    by_numpy = flash_qla.chunk_gated_delta_rule_fwd(*(a[n] for n in args), initial_state=a["initial_state"], **kwargs)
    for t, n in zip(by_torch, by_numpy, strict=True):
        assert isinstance(n, np.ndarray)
        np.testing.assert_array_equal(t.numpy(), n)
    g, A, o, _, final_state = by_torch
    grads = flash_qla.chunk_gated_delta_rule_bwd(
        x["q"], x["k"], x["v"], g, x["beta"], A, o, final_state, initial_state=x["initial_state"]
    )
    by_numpy = flash_qla.chunk_gated_delta_rule_bwd(
        *(a[n] for n in ("q", "k", "v")),
        g.numpy(),
        a["beta"],
        A.numpy(),
        o.numpy(),
        final_state.numpy(),
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
        *(t[:, :66] for t in named.values()),
        pool,
        slot,
        cu_seqlens=torch.tensor([0, 66]),
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
    with pytest.raises(ValueError, match="cp_context.group"):
        flash_qla.chunk_gated_delta_rule(**named, cp_context=form(pre_num_ranks=1))


def test_transformers_patch_and_unpatch():
    integration = pytest.importorskip("flash_qla.integrations.transformers")
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    before = module.torch_chunk_gated_delta_rule
    reference = inspect.unwrap(before)  # their torch function itself, also where another package would take its place

    class OldLayer(torch.nn.Module):
        """A layer of the generation that keeps its functions in itself."""

        def __init__(self):
            super().__init__()
            self.chunk_gated_delta_rule = before
            self.recurrent_gated_delta_rule = module.torch_recurrent_gated_delta_rule

    model = torch.nn.Sequential(OldLayer())
    x = make_inputs(Hv=2, V=8)
    tensors = [x[name] for name in ("q", "k", "v")]
    named = dict(g=x["g"], beta=x["beta"], initial_state=x["initial_state"], output_final_state=True)
    named.update(use_qk_l2norm_in_kernel=True, cu_seqlens=None, some_attention_option=1)
    expected, expected_state = reference(*tensors, **named)
    expected_gradients = torch.autograd.grad(expected.square().sum(), tensors)
    try:
        changed = integration.patch(model)
        assert module.__name__ in changed and "0" in changed
        functions = [module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule]
        functions += [model[0].chunk_gated_delta_rule, model[0].recurrent_gated_delta_rule]
        for function in functions:
            assert function.__module__ == integration.__name__
            o, state = function(*tensors, **named)
            torch.testing.assert_close(o, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(state, expected_state, rtol=1e-4, atol=1e-5)
            for a, b in zip(torch.autograd.grad(o.square().sum(), tensors), expected_gradients):
                torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
        assert integration.patch(model) == []
    finally:
        integration.unpatch()
    assert module.torch_chunk_gated_delta_rule is before
    assert model[0].chunk_gated_delta_rule is before


def test_serving_calls_compile():
    x = make_inputs(B=1, requires_grad=False)
    tensors = [x[name] for name in ("q", "k", "v", "g", "beta")]
    cu_seqlens, slots = torch.tensor([0, 30, 70]), torch.tensor([1, 3])

    def serve(*arguments):
        return flash_qla.gated_delta_rule_prefill(*arguments, slots, cu_seqlens=cu_seqlens)

    pools = [torch.ones(4, 4, 6, 8), torch.ones(4, 4, 6, 8)]
    eager = serve(*tensors, pools[0])
    with torch.inference_mode():
        compiled = torch.compile(serve, fullgraph=True)(*tensors, pools[1])
    assert torch.equal(eager, compiled) and torch.equal(*pools)
    assert torch.equal(pools[0][[0, 2]], torch.ones(2, 4, 6, 8))


@pytest.mark.parametrize(
    "command", [["info"], ["check", "--only", "3", "--num-heads", "2"], ["demo", "--tokens", "65", "--device", "cpu"]]
)
def test_command_line(command):
    testing = pytest.importorskip("typer.testing")
    result = testing.CliRunner().invoke(importlib.import_module("flash_qla.cli").app, command)
    assert result.exit_code == 0, result.output


def test_import_and_call_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, flash_qla\n"
        "x = np.ones((1, 3, 2, 4), np.float32)\n"
        "with flash_qla.use_path('reference'):\n"
        "    g, A, o, h, s = flash_qla.chunk_gated_delta_rule_fwd(x, x, x, None, None)\n"
        "    pool = np.zeros((2, 2, 4, 4), np.float32)\n"
        "    p = flash_qla.gated_delta_rule_decode(x, x, x, None, None, pool, np.array([1]))\n"
        "assert isinstance(o, np.ndarray) and np.array_equal(o, p) and pool[1].any() and not pool[0].any()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_command_fails_loudly(monkeypatch):
    testing = pytest.importorskip("typer.testing")
    monkeypatch.setattr("flash_qla.cli.errors.bound", lambda name, dtype: 0.0)
    command = ["check", "--only", "3", "--num-heads", "2"]
    result = testing.CliRunner().invoke(importlib.import_module("flash_qla.cli").app, command)
    assert result.exit_code == 1
    assert "FAIL" in result.output and "repeat: python -m flash_qla check --set develop" in result.output
