"""Transformers' layer classes with and without patch(): the same weights, the same numbers, in every layout, with and
without a cache."""

import copy
import importlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
cache_utils = pytest.importorskip("transformers.cache_utils")
if not hasattr(cache_utils, "LinearAttentionLayer"):
    pytest.skip("a Transformers whose caches have no linear-attention layers", allow_module_level=True)

from flash_qla.integrations import _transformers_layers as layers
from flash_qla.integrations import transformers as integration

from helpers import assert_bitwise, settings

LOGITS, GRADIENTS = 1e-4, 1e-3
HIDDEN, HQ, HV, K, V, W = 48, 2, 4, 32, 24, 4

KINDS = [name for name in layers.LAYERS if importlib.util.find_spec(f"transformers.models.{name}.modeling_{name}")]


def module_of(name):
    return importlib.import_module(f"transformers.models.{name}.modeling_{name}")


def build(name, **changes):
    config = SimpleNamespace(**{**dict(
        hidden_size=HIDDEN, linear_num_value_heads=HV, linear_num_key_heads=HQ, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_conv_kernel_dim=W, hidden_act="silu", rms_norm_eps=1e-6, layer_types=["linear_attention"], dtype=torch.float32,
        linear_allow_neg_eigval=True, linear_a_log_min=0.1, linear_a_log_max=4.0, linear_dt_min=0.001, linear_dt_max=0.1,
        linear_dt_init_floor=1e-4, output_gate_type="swish", linear_output_gate_type="swish"), **changes})
    torch.manual_seed(0)
    layer = getattr(module_of(name), layers.LAYERS[name][0])(config, 0).to(settings.device)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def cache(batch=2):
    part = cache_utils.LinearAttentionLayer()
    result = cache_utils.Cache(layers=[part])
    return result


@pytest.fixture(autouse=True)
def unpatched():
    integration.unpatch()
    yield
    integration.unpatch()


def hidden(T, batch=2, seed=1):
    return torch.randn(batch, T, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(settings.device)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def watched(layer):
    """Counts the calls of gated_delta_net()."""
    calls = []
    original = layers.gated_delta_net

    def count(*args, **kwargs):
        calls.append(kwargs)
        return original(*args, **kwargs)

    return calls, count


@pytest.mark.parametrize("name", KINDS)
def test_outputs_and_gradients(name, monkeypatch):
    layer, x = build(name), hidden(70)
    calls, count = watched(layer)
    monkeypatch.setattr(layers, "gated_delta_net", count)

    def run():
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        out.square().sum().backward()
        return out.detach(), torch.cat([leaf.grad.flatten(), *(p.grad.flatten() for p in layer.parameters())])

    theirs, their_gradients = run()
    assert not calls
    changed = integration.patch()
    assert any(layers.LAYERS[name][0] in text for text in changed)
    ours, our_gradients = run()
    assert len(calls) == 1
    assert relative(ours, theirs) < LOGITS
    assert relative(our_gradients, their_gradients) < GRADIENTS


@pytest.mark.parametrize("name", KINDS)
def test_worst_parameter_against_fp64(name):
    layer = build(name)

    def gradients(x):
        layer.zero_grad()
        layer(x).square().sum().backward()
        return {key: p.grad.clone() for key, p in layer.named_parameters()}

    exact_layer = copy.deepcopy(layer).double()
    integration.patch()
    ours = gradients(hidden(40))
    layer = exact_layer
    if settings.device == "cuda":
        integration.unpatch()
    exact = gradients(hidden(40).double())
    for key, gradient in exact.items():
        assert relative(ours[key], gradient) < GRADIENTS, key


@pytest.mark.parametrize("name", KINDS)
def test_caches(name, monkeypatch):
    """Prefill, several more tokens at once, decode, reset: each step as Transformers has it, and so are the states."""
    layer = build(name)
    steps = [hidden(3), hidden(70, seed=2), hidden(1, seed=3), hidden(1, seed=4), hidden(5, seed=5)]

    def run():
        past, outs = cache(), []
        with torch.no_grad():
            for x in steps:
                outs.append(layer(x, cache_params=past))
            outs += [past.layers[0].conv_states[0].clone(), past.layers[0].recurrent_states[0].clone()]
            past.reset()
            outs.append(layer(steps[1], cache_params=past))
            past.layers[0].reorder_cache(torch.tensor([1, 0]))
            outs.append(layer(steps[2], cache_params=past))
        return outs

    theirs = run()
    calls, count = watched(layer)
    monkeypatch.setattr(layers, "gated_delta_net", count)
    integration.patch()
    ours = run()
    assert len(calls) == 7
    for a, b in zip(ours, theirs):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert relative(a, b) < LOGITS
    assert_bitwise("conv_state", ours[5], theirs[5])


@pytest.mark.parametrize("name", KINDS)
def test_prefill_and_decode_are_one_prefill(name):
    layer, x = build(name), hidden(72)
    integration.patch()
    past = cache()
    with torch.no_grad():
        whole = layer(x)
        parts = [layer(x[:, :66], cache_params=past), *(layer(x[:, t:t + 1], cache_params=past) for t in range(66, 72))]
    assert relative(torch.cat(parts, 1), whole) < LOGITS


@pytest.mark.parametrize("name", KINDS)
def test_left_padding(name):
    layer, x = build(name), hidden(40)
    mask = torch.ones(2, 40, dtype=torch.long, device=settings.device)
    mask[0, :13] = 0
    with torch.no_grad():
        theirs = layer(x, attention_mask=mask)
        integration.patch()
        ours = layer(x, attention_mask=mask)
        alone = layer(x[:1, 13:])
    assert relative(ours, theirs) < LOGITS
    assert relative(ours[:1, 13:], alone) < LOGITS


@pytest.mark.parametrize("name", KINDS)
def test_packed_sequences_do_not_see_each_other(name):
    layer, x = build(name), hidden(60, batch=1)
    integration.patch()
    cu = torch.tensor([0, 17, 17, 60], dtype=torch.int32, device=settings.device)
    with torch.no_grad():
        packed = layer(x, cu_seq_lens_q=cu)
        for begin, end in ((0, 17), (17, 60)):
            assert relative(packed[:, begin:end], layer(x[:, begin:end])) < LOGITS


def test_seq_idx_alone_bounds_the_convolution_and_warns(monkeypatch):
    monkeypatch.setattr(layers, "_warned", False)
    layer, x = build("qwen3_next"), hidden(20, batch=1)
    index = torch.tensor([[0] * 9 + [1] * 11], dtype=torch.int32, device=settings.device)
    integration.patch()
    with torch.no_grad(), pytest.warns(UserWarning, match="cu_seq_lens_q"):
        bounded = layer(x, seq_idx=index)
    with torch.no_grad():
        assert not torch.equal(bounded, layer(x))


@pytest.mark.parametrize("name", KINDS)
def test_checkpointing_is_bitwise_equal(name):
    from torch.utils.checkpoint import checkpoint

    layer, x = build(name), hidden(40).requires_grad_()
    integration.patch()
    want = torch.autograd.grad(layer(x).square().sum(), x)[0]
    got = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), x)[0]
    assert_bitwise("gradient", got, want)


@pytest.mark.parametrize("name", KINDS)
def test_fullgraph_compilation(name):
    layer, x = build(name), hidden(20).requires_grad_()
    integration.patch()
    want = layer(x)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x), want) < 1e-6
    want, = torch.autograd.grad(layer(x).square().sum(), x)
    got, = torch.autograd.grad(compiled(x).square().sum(), x)
    assert relative(got, want) < 1e-6


def left_alone(layer, monkeypatch, **arguments):
    """Whether the layer's own forward ran."""
    calls, count = watched(layer)
    monkeypatch.setattr(layers, "gated_delta_net", count)
    layer(hidden(6), **arguments)
    return not calls


@pytest.mark.parametrize("name", KINDS)
def test_what_is_not_known_is_left_alone(name, monkeypatch):
    integration.patch()
    with torch.no_grad():
        assert not left_alone(build(name), monkeypatch)
        hooked = build(name)
        hooked.conv1d.register_forward_hook(lambda *args: None)
        assert left_alone(hooked, monkeypatch)
        other = build(name)
        other.conv1d.__class__ = type("OtherConv", (torch.nn.Conv1d,), {})
        assert left_alone(other, monkeypatch)
        recording = cache()
        recording.layers[0].activate_past_recording()
        assert left_alone(build(name), monkeypatch, cache_params=recording)
    assert left_alone(build(name), monkeypatch, cache_params=cache())  # gradients are recorded together with a cache


def test_layers_may_be_left_out(monkeypatch):
    changed = integration.patch(layers=False)
    assert all("GatedDeltaNet" not in text and "RMSNormGated" not in text for text in changed)
    with torch.no_grad():
        assert left_alone(build("qwen3_next"), monkeypatch)


@pytest.mark.parametrize("name", KINDS)
def test_norm_classes(name):
    torch.manual_seed(0)
    norm = getattr(module_of(name), layers.NORMS[name])(V).to(settings.device)
    torch.nn.init.normal_(norm.weight)
    x, gate = torch.randn(2, 7, V, device=settings.device), torch.randn(2, 7, V, device=settings.device)
    theirs = norm(x, gate)
    integration.patch()
    ours = norm(x, gate)
    assert relative(ours, theirs) < 1e-6
    assert not torch.equal(ours, theirs) or ours.grad_fn.name() != theirs.grad_fn.name()


@pytest.mark.parametrize("name", KINDS)
def test_unpatch_puts_classes_back(name):
    module = module_of(name)
    holders = [getattr(module, layers.LAYERS[name][0]), getattr(module, layers.NORMS[name])]
    before = [holder.forward for holder in holders]
    integration.patch()
    assert all(holder.forward is not forward for holder, forward in zip(holders, before))
    patched = [holder.forward for holder in holders]
    integration.patch()
    assert [holder.forward for holder in holders] == patched
    integration.unpatch()
    assert [holder.forward for holder in holders] == before
