"""The layer's operations under PyTorch: gradcheck, opcheck, compilation, fake tensors, autocast, refusals, questions."""

import pytest
import torch
from helpers import assert_bitwise, offsets, settings
from layer_helpers import Conv, drawn

import flash_qla


def convolution(residual=True, **case):
    case = Conv(**{"C": 12, "T": 9, "state": 4, "residual": residual, **case})
    names = [name for name in Conv.DIFFERENTIABLE if getattr(case, name) is not None]
    tensors = [getattr(case, name).detach().requires_grad_() for name in names]
    return case, tensors, lambda *given: [t for t in case.call(**dict(zip(names, given))) if t is not None]


def norm(**options):
    dtype = options.pop("dtype", torch.float32)
    tensors = [drawn(shape, dtype, seed=i).requires_grad_() for i, shape in enumerate([(2, 5, 8), (2, 5, 8), (8,), (8,)])]
    return tensors, lambda *given: flash_qla.rms_norm_gated(*given, **options)


GRADCHECKED = {
    "dense": {}, "packed": dict(seqlens=[3, 0, 1, 5], padding=1), "norm": dict(residual=False, l2norm_heads=2, head_dim=4),
    "index": dict(residual=False, B=1, state=0, seq_idx=[[0, 0, 1, -1, 0, 2, 2, 2, 1]]), "plain": dict(activation=None, bias=False),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", GRADCHECKED)
def test_gradcheck_of_the_convolution(name):
    _, tensors, call = convolution(dtype=torch.float64, **GRADCHECKED[name])
    assert torch.autograd.gradcheck(call, tensors, fast_mode=False)


@pytest.mark.cpu_only
@pytest.mark.parametrize("options", [{}, dict(activation="sigmoid"), dict(norm_before_gate=False, eps=0.1)])
def test_gradcheck_of_the_norm(options):
    tensors, call = norm(dtype=torch.float64, **options)
    assert torch.autograd.gradcheck(call, tensors)


def op_samples():
    """(operator, arguments) of one call each."""
    config = ("op", None, 1, 0, 2, 4)
    x, weight, bias = drawn((2, 9, 12)), drawn((12, 4)), drawn((12,))
    state, dy = drawn((2, 12, 4)), drawn((2, 9, 12))
    conv = (*config, x, weight, bias, None, state, None, None)
    index = torch.tensor([1, 0], device=settings.device)
    pool = (weight, bias, drawn((3, 12, 4)), None, index, None, None, None, None, None, None, None, None)
    rows, dnorm = drawn((2, 5, 8)), ("op", None, 1e-6, 1, False)
    return {
        "conv_forward": (*conv, 4), "conv_backward": (*conv, dy, state, [True, True, True, False, True]),
        "conv_states": (*config, True, -1, x, *pool, drawn((2, 9, 12))), "conv_replace": (*config, True, -1, x, *pool),
        "norm_gated": (*dnorm, rows, rows, drawn((8,)), None),
        "norm_gated_backward": (*dnorm, rows, rows, drawn((8,)), None, rows, [True, True, True, False]),
    }


@pytest.mark.parametrize("name", ["conv_forward", "conv_backward", "conv_states", "conv_replace", "norm_gated", "norm_gated_backward"])
def test_opcheck(name):
    arguments = op_samples()[name]
    # The operators are below autograd: a Function stands around each.
    torch.library.opcheck(getattr(torch.ops.flash_qla, name).default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", [{}, dict(seqlens=[3, 0, 6]), dict(residual=False, l2norm_heads=3, head_dim=4)])
def test_compiled_convolution(case):
    _, tensors, call = convolution(**case)

    def step(*given):
        y, final = call(*given)
        return (y.float().square().sum() + final.float().sum())

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for given, want in zip(torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(step(*tensors), tensors)):
        assert_bitwise("gradient", given, want)


def test_compiled_norm():
    tensors, call = norm()
    torch._dynamo.reset()
    compiled = torch.compile(lambda *given: call(*given).sum(), fullgraph=True, backend="aot_eager")
    for given, want in zip(torch.autograd.grad(compiled(*tensors), tensors), torch.autograd.grad(call(*tensors).sum(), tensors)):
        assert_bitwise("gradient", given, want)


def test_compiled_decode_mutates_its_pool():
    x, weight, pool = drawn((2, 1, 8)), drawn((8, 4)), drawn((3, 8, 3))
    index = torch.tensor([2, 0], device=settings.device)
    want_pool = pool.clone()
    want = flash_qla.causal_conv1d_decode(x, weight, None, want_pool, index)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: flash_qla.causal_conv1d_decode(*a) + 0, fullgraph=True, backend="aot_eager")
    assert_bitwise("y", compiled(x, weight, None, pool, index), want)
    assert_bitwise("pool", pool, want_pool)


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.empty(2, 9, 12), torch.empty(12, 4)
        y, final = flash_qla.causal_conv1d(x, weight, output_final_state=True)
        assert y.shape == x.shape and final.shape == (2, 12, 4)
        assert flash_qla.rms_norm_gated(x, x, torch.empty(12)).shape == x.shape


def test_checkpointing():
    from torch.utils.checkpoint import checkpoint

    _, tensors, call = convolution()
    want = torch.autograd.grad(call(*tensors)[0].sum(), tensors)
    got = torch.autograd.grad(checkpoint(lambda *a: call(*a)[0], *tensors, use_reentrant=False).sum(), tensors)
    for a, b in zip(got, want):
        assert_bitwise("gradient", a, b)


def test_inference_mode_and_no_grad():
    case = Conv()
    want = case.run(grads=False)["y"]
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert_bitwise("y", case.call()[0], want)


def test_second_derivatives_are_refused():
    x = drawn((1, 5, 4)).requires_grad_()
    y, _ = flash_qla.causal_conv1d(x, drawn((4, 2)), activation="silu")
    dx, = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal_conv1d: second derivatives"):
        dx.sum().backward()
    n = flash_qla.rms_norm_gated(x, x, None)
    dx, = torch.autograd.grad(n.sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="rms_norm_gated: second derivatives"):
        dx.sum().backward()


def test_empty():
    for shape in ((0, 5, 8), (2, 0, 8)):
        x, weight = torch.empty(shape, device=settings.device, requires_grad=True), drawn((8, 4)).requires_grad_()
        state = drawn((shape[0], 8, 3)).requires_grad_()
        y, final = flash_qla.causal_conv1d(x, weight, initial_state=state, output_final_state=True)
        assert y.shape == shape
        assert_bitwise("final", final, state)
        dx, dw, dh = torch.autograd.grad([y, final], [x, weight, state], [torch.ones_like(y), torch.ones_like(final)])
        assert dx.shape == shape and not dw.any() and (dh == 1).all()


X, W = "torch.ones(2, 5, 8)", "torch.ones(8, 4)"
REFUSED = {
    f"causal_conv1d({X}, None)": (TypeError, r"causal_conv1d: weight \(None\) must be a torch.Tensor"),
    f"causal_conv1d(3, {W})": (TypeError, r"causal_conv1d: x \(int\) must be a torch.Tensor"),
    f"causal_conv1d(torch.ones(5, 8), {W})": (ValueError, r"causal_conv1d: x.ndim \(2\) must be 3"),
    f"causal_conv1d({X}, torch.ones(7, 4))": (ValueError, r"causal_conv1d: weight.shape\[0\] \(7\) must be the channels \(8\)"),
    f"causal_conv1d({X}, torch.ones(8, 9))": (ValueError, r"weight.shape\[1\] \(9\) must be from 1 to 8"),
    f"causal_conv1d({X}, {W}, torch.ones(3))": (ValueError, r"bias.shape\[0\] \(3\) must be the channels \(8\)"),
    f"causal_conv1d({X}, {W}, activation='relu')": (ValueError, r"activation \('relu'\) must be None"),
    f"causal_conv1d({X}.long(), {W})": (TypeError, r"x.dtype \(int64\) must be float32"),
    f"causal_conv1d({X}, {W}.double())": (TypeError, r"weight.dtype \(float64\) must be float32.*float64 only with float64 x"),
    f"causal_conv1d({X}, {W}, cu_seqlens=torch.tensor([0, 5]))": (ValueError, r"x.shape\[0\] \(2\) must be 1 with cu_seqlens"),
    f"causal_conv1d({X}, {W}, cu_seqlens=torch.tensor([0., 5.]))": (TypeError, r"cu_seqlens.dtype \(float32\)"),
    f"causal_conv1d({X}, {W}, initial_state=torch.ones(2, 8, 2))": (
        ValueError, r"initial_state.shape\[2\] \(2\) must be at least 1 and weight.shape\[1\] - 1 \(3\)"),
    f"causal_conv1d({X}, {W}, initial_state=torch.ones(3, 8, 4))": (ValueError, r"initial_state.shape\[0\] \(3\) must be the number"),
    f"causal_conv1d({X}, {W}, residual=torch.ones(2, 5, 8), l2norm_heads=2, head_dim=4)": (ValueError, "residual must not come with l2norm"),
    f"causal_conv1d({X}, {W}, l2norm_heads=2)": (ValueError, r"head_dim \(None\) must be given"),
    f"causal_conv1d({X}, {W}, l2norm_heads=3, head_dim=4)": (ValueError, r"l2norm_heads \* head_dim \(3 \* 4\)"),
    f"causal_conv1d({X}, {W}, seq_idx=torch.zeros(2, 5).int(), initial_state=torch.ones(2, 8, 4))": (
        ValueError, "initial_state must not come with seq_idx"),
    f"causal_conv1d({X}, {W}, seq_idx=torch.zeros(2, 4).int())": (ValueError, r"seq_idx.shape\[1\] \(4\) must be x.shape\[1\]"),
    f"causal_conv1d(torch.ones(2, 5, 8, device='meta'), {W})": (ValueError, r"x.device \(meta\) must be cpu or cuda"),
    f"causal_conv1d({X}.to_sparse(), {W})": (ValueError, "x.layout"),
    f"causal_conv1d_update(torch.ones(2, 8), torch.ones(2, 8, 2), {W})": (ValueError, r"conv_state.shape\[2\] \(2\)"),
    f"causal_conv1d_update(torch.ones(2, 8), None, {W})": (TypeError, r"conv_state \(None\)"),
    f"causal_conv1d_decode(torch.ones(2, 3, 8), {W}, None, torch.ones(4, 8, 4), torch.tensor([0, 1]), "
    "num_accepted_tokens=torch.tensor([1, 1]))": (ValueError, r"state_pool.shape\[2\] \(4\) must be at least .* \(5\)"),
    f"causal_conv1d_decode({X}, {W}, None, torch.ones(4, 8, 4), torch.tensor([0, 1, 2]))": (ValueError, r"initial_state_indices.shape\[0\]"),
    "rms_norm_gated(torch.ones(2, 8), torch.ones(2, 7), None)": (ValueError, r"rms_norm_gated: g.shape\[1\] \(7\) must be x.shape\[1\] \(8\)"),
    "rms_norm_gated(torch.ones(2, 8), None, torch.ones(7))": (ValueError, r"weight.shape\[0\] \(7\) must be the last of x \(8\)"),
    "rms_norm_gated(torch.ones(2, 8), None, None, activation='relu')": (ValueError, "activation"),
    "rms_norm_gated(torch.ones(2, 8), None, None, residual=torch.ones(2, 8))": (NotImplementedError, "residual"),
    "rms_norm_gated(torch.ones(2, 8), torch.ones(2, 8).half(), None)": (TypeError, r"g.dtype \(float16\) must be that of x"),
    "rms_norm_gated(torch.ones(1, 1, 1, 2, 8), None, None)": (ValueError, r"x.ndim \(5\) must be from 1 to 4"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("call", REFUSED)
def test_refusals(call):
    kind, message = REFUSED[call]
    with pytest.raises(kind, match=message):
        eval("flash_qla." + call, {"flash_qla": flash_qla, "torch": torch})


def test_a_refused_call_writes_nothing():
    x, weight, pool = drawn((2, 1, 8)), drawn((8, 4)), drawn((3, 8, 3))
    before = pool.clone()
    with pytest.raises(ValueError):
        flash_qla.causal_conv1d_decode(x, weight, None, pool, torch.tensor([0, 1, 2], device=settings.device))
    assert_bitwise("pool", pool, before)


def test_outputs_apart_from_inputs():
    x, weight, pool = drawn((1, 6, 8)), drawn((8, 4)), drawn((3, 8, 3))
    index = torch.tensor([0], device=settings.device)
    with pytest.raises(ValueError, match="out must not share memory with x"):
        flash_qla.causal_conv1d_prefill(x, weight, None, pool, index, cu_seqlens=offsets([6]), out=x.view(1, 6, 8))


def test_explain():
    x = drawn((1, 40, 16))
    text = flash_qla.explain(x, drawn((16, 4)), op="causal_conv1d")
    assert text.startswith("path: ")
    assert flash_qla.explain(x, x, None, op=flash_qla.rms_norm_gated).startswith("path: ")
    pool = torch.zeros(2, 16, 3, device=settings.device)
    before = pool._version
    text = flash_qla.explain(x, drawn((16, 4)), None, pool, torch.tensor([1], device=settings.device), op="causal_conv1d_decode")
    assert text.startswith("path: ") and pool._version == before
    assert "conv_forward" in flash_qla.build_info()
