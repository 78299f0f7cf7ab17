"""The adapter for vLLM in vLLM's released Python: its registry whole, its operation and its layer cut out, the rest stand-ins."""

import sys
from types import SimpleNamespace

import helpers
import mamba
import pytest
import releases
import test_vllm as small
import torch
from helpers import assert_bitwise, assert_close

from flash_qla.integrations import vllm as adapter

pytestmark = releases.needed
HQ, HV, K, V, WIDTH = small.HQ, small.HV, small.K, small.V, small.WIDTH
QWEN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"


class Linear(torch.nn.Module):
    """Every projection of the layer; of the convolution's the weight is used."""

    def __init__(self, input_size=1, output_size=1, *arguments, **named):
        super().__init__()
        size = output_size if isinstance(output_size, int) else 1
        self.weight = torch.nn.Parameter(torch.randn(size, input_size, generator=torch.Generator().manual_seed(5)), requires_grad=False)
        self.bias = None


# --- Triton's part of the layer, in plain PyTorch ---

def fused_post_conv_prep(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm, output_g_exp):
    assert apply_l2norm and not output_g_exp
    keys = num_k_heads * head_k_dim
    q, k, v = conv_output[:, :keys], conv_output[:, keys:2 * keys], conv_output[:, 2 * keys:]
    q, k = (x.unflatten(1, (num_k_heads, head_k_dim)).float() for x in (q, k))
    q, k = ((x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(conv_output.dtype) for x in (q, k))
    g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float())
    return q, k, v.unflatten(1, (-1, head_v_dim)).contiguous(), g, b.float().sigmoid()


def vendored_chunk(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, chunk_indices, chunk_offsets,
                   use_qk_l2norm_in_kernel, core_attn_out):
    assert not use_qk_l2norm_in_kernel and output_final_state
    x = helpers.Inputs(q, k, v, g, beta, initial_state, cu_seqlens, options=dict(state_v_first=True))
    found = helpers.reference(x, grads=False)
    return torch.from_numpy(found["o"]).to(q.dtype), torch.from_numpy(found["final_state"]).float()


def fused_sigmoid_gating_delta_rule_update(A_log, a, b, dt_bias, q, k, v, initial_state, inplace_final_state, cu_seqlens,
                                           ssm_state_indices, use_qk_l2norm_in_kernel):
    assert inplace_final_state and use_qk_l2norm_in_kernel
    lengths, slots = cu_seqlens.diff().tolist(), ssm_state_indices[:len(cu_seqlens) - 1].long()
    o, final = mamba.recurrence(q[0], k[0], v[0], a, b, A_log, dt_bias, initial_state[slots], lengths)
    initial_state[slots] = final.to(initial_state.dtype)
    return o[None].to(q.dtype), None


CONFIG = SimpleNamespace(hidden_size=8, hidden_act="silu", rms_norm_eps=1e-6, linear_num_key_heads=HQ, linear_num_value_heads=HV,
                         linear_key_head_dim=K, linear_value_head_dim=V, linear_conv_kernel_dim=WIDTH)


def vllm_config(asked=None, cache_mode="none", speculative=None, dtype=torch.bfloat16):
    return SimpleNamespace(
        additional_config={} if asked is None else {"gdn_prefill_backend": asked}, speculative_config=speculative,
        model_config=SimpleNamespace(dtype=dtype, hf_text_config=CONFIG), quant_config=None,
        cache_config=SimpleNamespace(mamba_cache_mode=cache_mode, mamba_cache_dtype="auto", mamba_ssm_cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=256, max_num_seqs=8),
        compilation_config=SimpleNamespace(static_forward_context={}))


class Logger:
    def __getattr__(self, name):
        return lambda *words, **named: None


@pytest.fixture
def vllm(monkeypatch, fast):
    """A process of vLLM as far as GDN layers need one, on what they take for a Hopper GPU."""
    state = SimpleNamespace(config=vllm_config(), context=SimpleNamespace(attn_metadata=None, no_compile_layers={}))
    compilation = SimpleNamespace(custom_ops=["all"], enabled_custom_ops=set(), disabled_custom_ops=set())
    platform = SimpleNamespace(
        is_cuda=lambda: True, is_cuda_alike=lambda: True, is_xpu=lambda: False, is_cpu=lambda: False, is_rocm=lambda: False, is_tpu=lambda: False,
        is_out_of_tree=lambda: False, is_device_capability=lambda version: version == 90, is_device_capability_family=lambda family: False,
        current_device=lambda: "cpu", device_name="cuda", has_device_capability=lambda version: True)
    releases.stand_in(monkeypatch, "vllm", __version__=releases.version("vllm"))
    releases.stand_in(monkeypatch, "vllm.config", get_cached_compilation_config=lambda: compilation)
    releases.stand_in(monkeypatch, "vllm.logger", init_logger=lambda name: Logger())
    releases.stand_in(monkeypatch, "vllm.model_executor")
    releases.stand_in(monkeypatch, "vllm.model_executor.utils", maybe_disable_graph_partition=None)
    releases.stand_in(monkeypatch, "vllm.platforms", current_platform=platform)
    for package in ("layers", "layers.mamba", "layers.mamba.gdn"):
        releases.stand_in(monkeypatch, f"vllm.model_executor.{package}")
    registry = releases.whole(monkeypatch, "vllm.model_executor.custom_op", releases.path_of("vllm", "vllm/model_executor/custom_op.py"))
    import collections
    import functools
    import itertools
    import os
    from dataclasses import dataclass, replace
    from typing import Literal

    cuts = releases.cut(monkeypatch, "checkpoint", releases.path_of("vllm", "vllm/model_executor/layers/mamba/checkpoint.py"),
                        ["MambaPrefillCheckpointExporter"], dict(dataclass=dataclass))
    attention = releases.cut(monkeypatch, "gdn_attn", releases.path_of("vllm", "vllm/v1/attention/backends/gdn_attn.py"),
                             ["FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", "GDNAttentionMetadata"], dict(dataclass=dataclass, torch=torch))
    base = releases.cut(monkeypatch, "base", releases.path_of("vllm", "vllm/model_executor/layers/mamba/gdn/base.py"), ["GatedDeltaNetAttention"], dict(
        PluggableLayer=registry.PluggableLayer, MambaBase=type("MambaBase", (), dict(get_kv_cache_spec=lambda self, config: "spec")), torch=torch,
        MambaStateDtypeCalculator=SimpleNamespace(gated_delta_net_state_dtype=lambda dtype, *rest: (dtype, torch.float32)),
        get_tensor_model_parallel_world_size=lambda: 1, get_tensor_model_parallel_rank=lambda: 0, extract_layer_index=lambda prefix: 0,
        MambaAttentionBackendEnum=SimpleNamespace(GDN_ATTN="GDN_ATTN")))
    around = dict(
        CustomOp=registry.CustomOp, PluggableLayer=registry.PluggableLayer, GatedDeltaNetAttention=base.GatedDeltaNetAttention,
        GDNAttentionMetadata=attention.GDNAttentionMetadata, FLASHINFER_GDN_CHECKPOINT_ALIGNMENT=attention.FLASHINFER_GDN_CHECKPOINT_ALIGNMENT,
        MambaPrefillCheckpointExporter=cuts.MambaPrefillCheckpointExporter, current_platform=platform, logger=Logger(), torch=torch, nn=torch.nn, os=os,
        functools=functools, itertools=itertools, replace=replace, Literal=Literal, rocm_aiter_ops=None,
        get_current_vllm_config=lambda: state.config, get_forward_context=lambda: state.context, is_conv_state_dim_first=lambda: False,
        causal_conv1d_fn=small.causal_conv1d_fn, causal_conv1d_update=None, fused_post_conv_prep=fused_post_conv_prep,
        fla_chunk_gated_delta_rule=vendored_chunk, fused_sigmoid_gating_delta_rule_update=fused_sigmoid_gating_delta_rule_update,
        ColumnParallelLinear=Linear, MergedColumnParallelLinear=Linear, RowParallelLinear=Linear, divide=lambda a, b: a // b,
        RMSNormGated=lambda *a, **named: SimpleNamespace(activation="silu"), set_weight_attrs=lambda weight, attrs: None,
        sharded_weight_loader=lambda axis: None, mamba_v2_sharded_weight_loader=lambda *a: None, AutoAWQConfig=Linear, AutoGPTQConfig=Linear, INCConfig=Linear,
        envs=SimpleNamespace(VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE=False, VLLM_GDN_DECODE_KERNEL="triton"), FLA_CHUNK_SIZE=64,
        get_mamba_prefill_checkpoint_alignment=lambda config: 64, get_mamba_prefill_checkpoint_grid=lambda config: 64, MambaSpec=collections.Counter,
        MambaStateShapeCalculator=None, l2norm_fwd=None, cdiv=lambda a, b: -(-a // b))
    names = ["_resolve_gdn_prefill_backend", "_log_gdn_backend_decision", "ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention", "fi_chunk_gated_delta_rule",
             "FUSED_GDN_STATE_DTYPES", "MAX_FUSED_GDN_MTP_TOKENS"]
    state.module = releases.cut(monkeypatch, adapter._QWEN, releases.path_of("vllm", QWEN), names, around)
    state.registry, state.attention = registry, attention
    monkeypatch.setattr(adapter, "_current_device", lambda: 0)
    return state


def build(vllm, **options):
    """A layer as a model makes it."""
    vllm.config = vllm_config(**options)
    layer = vllm.module.QwenGatedDeltaNetAttention(CONFIG, vllm.config, prefix="layers.0")
    layer.A_log.data, layer.dt_bias.data = mamba.parameters(HV)
    return layer


def run(vllm, layer, m, mixed, a, b, cache):
    """core_attn_out of one batch; the cache's states in place."""
    layer.kv_cache = cache
    fields = {name: value for name, value in vars(m).items()}
    known = vllm.attention.GDNAttentionMetadata.__dataclass_fields__
    rest = dict(num_prefill_tokens=m.num_actual_tokens - m.num_decode_tokens, num_spec_decodes=0, num_spec_decode_tokens=0)
    vllm.context.attn_metadata = {"layers.0": vllm.attention.GDNAttentionMetadata(**{k: v for k, v in fields.items() if k in known}, **rest)}
    out = torch.zeros(len(mixed), HV, V, dtype=mixed.dtype)
    with torch.inference_mode():
        layer._forward_core(mixed_qkv=mixed, b=b, a=a, core_attn_out=out)
    return out


def test_our_classes_are_chosen(vllm, fast, log):
    adapter.register()
    layer = build(vllm)
    assert type(layer).__name__ == "FlashQLAQwenGatedDeltaNetAttention" and isinstance(layer, vllm.module.QwenGatedDeltaNetAttention)
    operation = layer.chunk_gated_delta_rule
    assert type(operation).__name__ == "FlashQLAChunkGatedDeltaRule" and operation._forward_method == operation.forward_flash_qla
    assert layer.gdn_prefill_backend == operation.gdn_prefill_backend == "triton", "FlashInfer is not compiled"
    assert set(fast.asked) == {(0, torch.bfloat16, K, V, False)}
    assert [level for level, _ in log()] == ["INFO", "INFO"] and all("FLASH_QLA_VLLM=0: off" in text for _, text in log())


def test_a_second_registration_changes_nothing(vllm):
    adapter.register()
    before = dict(vllm.registry.op_registry_oot)
    adapter.register()
    assert vllm.registry.op_registry_oot == before and len(before) == 2


@pytest.mark.parametrize("asked,method", [("triton", "forward_native"), ("flashinfer", "forward_cuda")])
def test_another_backend_is_the_users_choice(asked, method, vllm):
    adapter.register()
    layer = build(vllm, asked=asked)
    assert layer.chunk_gated_delta_rule._forward_method.__name__ == method and layer._flash_qla_auto_cp is None
    assert layer.gdn_prefill_backend == asked


@pytest.mark.parametrize("asked", [None, "flash_qla"])
def test_models_that_would_be_slow_stay(asked, vllm, fast, log):
    fast.reason = "path cuda_generic: sm90 needs K = V = 128"
    adapter.register()
    layer = build(vllm, asked=asked)
    assert layer._flash_qla_auto_cp is None
    # vLLM's resolver answers "triton" to a name that it does not know, and FlashInfer to auto on Hopper.
    assert layer.chunk_gated_delta_rule._forward_method.__name__ == ("forward_cuda" if asked is None else "forward_native")
    assert [level for level, _ in log()] == ["INFO" if asked is None else "WARNING"]


def test_opting_out(vllm, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_VLLM", "0")
    adapter.register()
    assert type(build(vllm)) is vllm.module.QwenGatedDeltaNetAttention
    monkeypatch.setenv("FLASH_QLA_VLLM", "operation")
    adapter.register()
    layer = build(vllm)
    assert type(layer) is vllm.module.QwenGatedDeltaNetAttention and type(layer.chunk_gated_delta_rule).__name__ == "FlashQLAChunkGatedDeltaRule"


@pytest.mark.parametrize("who", ["vLLM's", "operation", "layer"])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
@pytest.mark.parametrize("batch", small.BATCHES)
def test_the_same_outputs_and_pool(batch, state_dtype, who, vllm, monkeypatch):
    # vLLM's own _forward_core is the reference as well: what this suite takes for its meaning is what it does.
    monkeypatch.setenv("FLASH_QLA_VLLM", {"vLLM's": "0", "operation": "operation", "layer": "1"}[who])
    adapter.register()
    layer, dtype = build(vllm, asked="triton" if who == "vLLM's" else None), torch.bfloat16
    decodes, lengths, slots, has = small.BATCHES[batch]
    m, cache = small.metadata(decodes, lengths, slots, has), small.pools(dtype, state_dtype)
    before = [t.clone() for t in cache]
    mixed, a, b = mamba.raw_inputs(m.num_actual_tokens, HQ, HV, K, V, dtype)
    out = run(vllm, layer, m, mixed, a, b, cache)
    o, states, conv_states = small.expected(layer, m, mixed, a, b, before)
    if batch == "padding rows" and who != "layer":
        # Its scatter writes the null slot, and what it leaves there nobody reads.
        cache[1][0], cache[0][0] = before[1][0], before[0][0]
    small.compare(out, cache, before, o, states, conv_states, dtype, slots)


def test_the_operation_fills_the_buffer_that_it_is_given(vllm):
    adapter.register()
    operation = build(vllm).chunk_gated_delta_rule
    x = helpers.make_inputs(seqlens=[70, 5], Hq=HQ, Hv=HV, K=K, V=V, dtype=torch.bfloat16, grads=False, state_v_first=True)
    buffer = torch.full((80, HV * V), 7.0, dtype=torch.bfloat16)
    o, final_state = operation(x.q, x.k, x.v, x.g, x.beta, x.initial_state, True, cu_seqlens=x.cu_seqlens.int(), use_qk_l2norm_in_kernel=False,
                               chunk_indices=torch.zeros(3, 2), core_attn_out=buffer)
    want = helpers.reference(x, grads=False)
    helpers.compare(dict(o=o, final_state=final_state), want, torch.bfloat16)
    assert_bitwise("buffer", buffer[:75].view(75, HV, V), o[0])
    assert (buffer[75:] == 7).all()
    assert operation(x.q, x.k, x.v, x.g, x.beta, None, False, cu_seqlens=x.cu_seqlens)[1] is None
    with pytest.raises(TypeError, match=r"^ChunkGatedDeltaRule: scale \(float\) .*FLASH_QLA_VLLM=0"):
        operation(x.q, x.k, x.v, x.g, x.beta, None, False, scale=2.0)
    operation(x.q, x.k, x.v, x.g, x.beta, None, False, scale=None)


@pytest.mark.parametrize("speculative", [None, SimpleNamespace(num_speculative_tokens=2)], ids=["plain", "speculative"])
@pytest.mark.parametrize("cache_mode", ["none", "all", "align"])
def test_checkpoints_in_align_mode(cache_mode, speculative, vllm):
    adapter.register()
    layer = build(vllm, cache_mode=cache_mode, speculative=speculative)
    exports = cache_mode == "align" and speculative is None
    assert layer.get_prefill_checkpoint_alignment() == (64 if exports else None)
    assert layer._exports_checkpoints == exports


def test_a_profiling_run_touches_scratch_alone(vllm, monkeypatch):
    adapter.register()
    layer = build(vllm)
    sizes = []
    mixed = torch.zeros(16, 2 * HQ * K + HV * V, dtype=torch.bfloat16)
    monkeypatch.setattr(type(mixed), "new_empty", lambda self, size, dtype: sizes.append((size, dtype)), raising=False)
    for _ in range(2):
        layer._forward_core(mixed, None, None, torch.zeros(16, HV, V, dtype=torch.bfloat16))
    (size, dtype), = sizes
    assert size > 0 and dtype == torch.uint8
