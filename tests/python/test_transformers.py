"""Hugging Face Transformers with and without patch(): the same model, the same numbers."""

import pytest
import torch

pytest.importorskip("transformers")
qwen = pytest.importorskip("transformers.models.qwen3_next")

from flash_qla.integrations import transformers as integration

from helpers import settings

# Against Transformers' own float32 functions: outputs, and the gradients of a loss.
LOGITS, GRADIENTS = 1e-4, 1e-3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = qwen.Qwen3NextConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        linear_conv_kernel_dim=2, hidden_act="silu", layer_types=["linear_attention", "full_attention"], num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=32, shared_expert_intermediate_size=32, attention_dropout=0.0)
    from transformers import Qwen3NextForCausalLM

    return Qwen3NextForCausalLM(config).to(settings.device).eval()


@pytest.fixture
def patched():
    integration.unpatch()
    yield lambda: integration.patch()
    integration.unpatch()


def ids(T=150, batch=2, seed=0):
    return torch.randint(0, 128, (batch, T), generator=torch.Generator().manual_seed(seed)).to(settings.device)


def relative(a, b):
    return ((a - b).norm() / b.norm()).item()


def test_logits(model, patched):
    with torch.no_grad():
        theirs = model(ids(), use_cache=False).logits
        assert patched()
        ours = model(ids(), use_cache=False).logits
    assert relative(ours, theirs) < LOGITS
    assert not torch.equal(ours, theirs), "patch() changed nothing: these are the same functions"


def test_gradients(model, patched):
    def gradients():
        model.zero_grad()
        model(ids(), labels=ids(), use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    theirs = gradients()
    patched()
    ours = gradients()
    assert theirs.keys() == ours.keys()
    for name, gradient in theirs.items():
        if gradient.norm() > 1e-7:
            assert relative(ours[name], gradient) < GRADIENTS, name


def test_prefill_then_decode_is_one_prefill(model, patched):
    patched()
    tokens = ids(100)
    with torch.no_grad():
        whole = model(tokens, use_cache=False).logits
        first = model(tokens[:, :96], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for t in range(96, 100):
            step = model(tokens[:, t:t + 1], past_key_values=cache, use_cache=True)
            logits, cache = [*logits, step.logits], step.past_key_values
    assert relative(torch.cat(logits, 1), whole) < LOGITS


def test_padded_batch(model, patched):
    tokens, mask = ids(80), torch.ones(2, 80, dtype=torch.long, device=settings.device)
    mask[0, :30] = 0
    with torch.no_grad():
        theirs = model(tokens, attention_mask=mask, use_cache=False).logits
        patched()
        ours = model(tokens, attention_mask=mask, use_cache=False).logits
    assert ours.isfinite().all()
    assert relative(ours[1], theirs[1]) < LOGITS
    assert relative(ours[0, 30:], theirs[0, 30:]) < LOGITS


def test_unpatch_puts_everything_back(patched):
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    before = [getattr(module, name) for name in names]
    changed = patched()
    assert any("qwen3_next" in name for name in changed)
    assert [getattr(module, name) for name in names] != before
    integration.patch()  # twice is once
    integration.unpatch()
    assert [getattr(module, name) for name in names] == before
    integration.unpatch()
    assert [getattr(module, name) for name in names] == before
