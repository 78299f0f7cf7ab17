"""The adapter for vLLM: what it takes over and what it leaves, and that both give the same outputs and states."""

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import mamba
import pytest
import releases
import torch
from helpers import assert_bitwise, assert_close

from flash_qla.integrations import _engines
from flash_qla.integrations import vllm as adapter

HQ, HV, K, V, WIDTH, SLOTS = 2, 4, 16, 32, 4, 12
LOW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)


# --- a layer and its metadata, as the adapter sees them ---

@dataclasses.dataclass
class GDNAttentionMetadata:
    num_prefills: int
    num_decodes: int
    num_decode_tokens: int
    num_actual_tokens: int
    has_initial_state: torch.Tensor
    non_spec_query_start_loc: torch.Tensor
    non_spec_state_indices_tensor: torch.Tensor
    prefill_query_start_loc: torch.Tensor
    prefill_state_indices: torch.Tensor
    prefill_has_initial_state: torch.Tensor
    spec_sequence_masks: torch.Tensor | None = None
    checkpoint: object = None
    flashinfer_checkpoint_plan: object = None
    spec_query_start_loc: torch.Tensor | None = None
    spec_token_indx: torch.Tensor | None = None
    non_spec_token_indx: torch.Tensor | None = None
    spec_state_indices_tensor: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    chunk_indices: torch.Tensor | None = None
    chunk_offsets: torch.Tensor | None = None
    aiter_prefill_metadata: object = None


def metadata(decodes, lengths, slots, has, **more):
    """Of `decodes` rows of one token, then prefills of `lengths` tokens."""
    offsets = helpers.offsets([1] * decodes + lengths, torch.int32)
    slots, has = torch.tensor(slots, dtype=torch.int32), torch.tensor(has)
    return GDNAttentionMetadata(
        num_prefills=len(lengths), num_decodes=decodes, num_decode_tokens=decodes, num_actual_tokens=decodes + sum(lengths),
        has_initial_state=has, non_spec_query_start_loc=offsets, non_spec_state_indices_tensor=slots,
        prefill_query_start_loc=offsets[decodes:] - decodes, prefill_state_indices=slots[decodes:], prefill_has_initial_state=has[decodes:], **more)


def causal_conv1d_fn(x, weight, bias, conv_states, query_start_loc, cache_indices=None, has_initial_state=None, activation="silu",
                     metadata=None, **rest):
    assert activation == "silu"
    return mamba.causal_convolution(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state)


def module(forward_context=None, platform="cuda"):
    return SimpleNamespace(
        causal_conv1d_fn=causal_conv1d_fn, is_conv_state_dim_first=lambda: False, GDNAttentionMetadata=GDNAttentionMetadata,
        get_forward_context=lambda: forward_context, current_platform=SimpleNamespace(is_cuda=lambda: platform == "cuda"))


def pools(dtype, state_dtype=torch.float32, seed=3):
    """(conv states [slots, W - 1, dim], states [slots, HV, V, K]) in pages, as vLLM lays them out: a slot has both."""
    generator = torch.Generator().manual_seed(seed)
    conv, state = (WIDTH - 1) * (2 * HQ * K + HV * V), HV * V * K
    sizes = conv * dtype.itemsize, state * state_dtype.itemsize
    pages = torch.zeros(SLOTS, sum(sizes) + 64, dtype=torch.int8)
    conv_states = pages[:, :sizes[0]].view(dtype).view(SLOTS, WIDTH - 1, -1)
    states = pages[:, sizes[0]:sum(sizes)].view(state_dtype).view(SLOTS, HV, V, K)
    conv_states.copy_(torch.randn(conv_states.shape, generator=generator))
    states.copy_(torch.randn(states.shape, generator=generator))
    return conv_states, states


def make_layer(cache, **more):
    A_log, dt_bias = mamba.parameters(HV)
    weight = torch.randn(2 * HQ * K + HV * V, 1, WIDTH, generator=torch.Generator().manual_seed(5))
    return SimpleNamespace(**dict(
        prefix="layers.0", num_k_heads=HQ, num_v_heads=HV, tp_size=1, head_k_dim=K, head_v_dim=V, kv_cache=cache, activation="silu",
        conv1d=SimpleNamespace(weight=weight, bias=None), A_log=A_log, dt_bias=dt_bias, _flash_qla_auto_cp=True) | more)


def expected(layer, m, mixed, a, b, cache):
    """(o, states, conv states) of a batch, in double precision but for the convolution."""
    conv_states, states = (t.clone() for t in cache)
    x = mamba.causal_convolution(
        mixed.T, layer.conv1d.weight[:, 0], None, conv_states.transpose(1, 2), m.non_spec_query_start_loc, m.non_spec_state_indices_tensor,
        m.has_initial_state).T
    q, k, v = x.split([HQ * K, HQ * K, HV * V], 1)
    slots = m.non_spec_state_indices_tensor.long()
    start = torch.where(m.has_initial_state[:, None, None, None], states[slots].double(), 0.0)
    start[slots == 0] = 0
    lengths = m.non_spec_query_start_loc.diff().tolist()
    o, final = mamba.recurrence(q.unflatten(1, (HQ, K)), k.unflatten(1, (HQ, K)), v.unflatten(1, (HV, V)), a, b, layer.A_log, layer.dt_bias,
                                start, lengths)
    after = states.double()
    for n, slot in enumerate(slots.tolist()):
        if slot > 0:
            after[slot] = final[n]
    return o, after, conv_states


def compare(got, cache, before, o, states, conv_states, dtype, slots):
    assert_close("o", got[None], o[None], helpers.bound_for("o", dtype), 2)
    bound = helpers.bound_for("pool", dtype if cache[1].dtype == torch.float32 else cache[1].dtype)
    written = [slot for slot in slots if slot > 0]
    assert_close("pool", cache[1][written], states[written], bound, 1)
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert_bitwise("pool", cache[1][others], before[1][others])
    assert torch.equal(cache[0][written], conv_states[written])


# --- register(), as vLLM calls it ---

@pytest.fixture
def registries(monkeypatch):
    """Stand-ins for the modules that register() imports. The classes are its own affair."""
    class Registry:
        @classmethod
        def register_oot(cls, name):
            return lambda taken: registry.op_registry_oot.__setitem__(name, taken)

    registry = releases.stand_in(monkeypatch, "vllm.model_executor.custom_op", op_registry_oot={}, CustomOp=Registry, PluggableLayer=Registry)
    sys.modules["vllm"].__version__ = "0.33.0"

    class ChunkGatedDeltaRule:
        def forward_native(self, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, chunk_indices=None,
                           chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None, aiter_prefill_metadata=None):
            pass

    class QwenGatedDeltaNetAttention:
        def _forward_core(self, mixed_qkv, b, a, core_attn_out):
            pass

    names = vars(module()) | dict(ChunkGatedDeltaRule=ChunkGatedDeltaRule, QwenGatedDeltaNetAttention=QwenGatedDeltaNetAttention,
                                  MambaPrefillCheckpointExporter=None, get_current_vllm_config=None)
    releases.stand_in(monkeypatch, adapter._QWEN, **names)
    return registry.op_registry_oot


BOTH = ["ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention"]


def test_both_are_registered_once(registries):
    adapter.register()
    classes = dict(registries)
    assert sorted(classes) == BOTH
    for name in BOTH:
        assert issubclass(classes[name], getattr(sys.modules[adapter._QWEN], name)), "without, __init__ would never be called"
    adapter.register()
    assert registries == classes


@pytest.mark.parametrize("value,names", [("0", []), ("operation", BOTH[:1]), ("1", BOTH)])
def test_the_switch(value, names, registries, monkeypatch, log):
    monkeypatch.setenv("FLASH_QLA_VLLM", value)
    adapter.register()
    assert sorted(registries) == names
    assert (value == "0") == any("FLASH_QLA_VLLM=0" in text for _, text in log())


def test_another_plugin_is_left_alone(registries, log):
    registries["ChunkGatedDeltaRule"] = "another's"
    adapter.register()
    assert registries == {"ChunkGatedDeltaRule": "another's"}
    assert log() == [("INFO", "flash_qla: vLLM's ChunkGatedDeltaRule has been taken over already")]


@pytest.mark.parametrize("version", ["0.34.0", "0.3.0", "1.0", "dev"])
def test_a_version_that_is_not_known_is_declined_aloud(version, registries, monkeypatch, log):
    sys.modules["vllm"].__version__ = version
    for _ in range(3):
        adapter.register()
    assert registries == {}
    assert log() == [("WARNING", f"flash_qla: left alone: vLLM {version} is not known here (0.33 are); FLASH_QLA_VLLM=1 tries it all the same")]
    monkeypatch.setenv("FLASH_QLA_VLLM", "1")
    adapter.register()
    assert sorted(registries) == BOTH


def remove_field(found):
    fields = {f: v for f, v in GDNAttentionMetadata.__dataclass_fields__.items() if f != "num_prefills"}
    found.GDNAttentionMetadata = SimpleNamespace(__dataclass_fields__=fields)


BROKEN = {
    "a name is gone": (lambda m: delattr(m, "causal_conv1d_fn"), "it has no causal_conv1d_fn"),
    "a field is gone": (remove_field, "it has no GDNAttentionMetadata.num_prefills"),
    "another signature": (lambda m: setattr(m, "ChunkGatedDeltaRule", type("ChunkGatedDeltaRule", (), dict(forward_native=lambda self, q: 0))),
                          "ChunkGatedDeltaRule.forward_native takes self, q, and not self, q, k, v,"),
    "another layer": (lambda m: setattr(m, "QwenGatedDeltaNetAttention", type("Q", (), dict(_forward_core=lambda self, x: 0))),
                      "QwenGatedDeltaNetAttention._forward_core takes self, x, and not self, mixed_qkv"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_another_interface_is_left_alone(kind, registries, log):
    change, words = BROKEN[kind]
    change(sys.modules[adapter._QWEN])
    adapter.register()
    assert registries == {}
    (level, text), = log()
    assert level == "WARNING" and f"vLLM was left as it is: NotImplementedError: {words}" in text, text


@pytest.mark.parametrize("missing", ["vllm", "vllm.model_executor.custom_op", adapter._QWEN])
def test_register_returns_whatever_is_broken(missing, registries, monkeypatch, log):
    monkeypatch.setitem(sys.modules, missing, None)  # importing it raises
    adapter.register()
    assert registries == {} and [level for level, _ in log()] == ["WARNING"]


@pytest.mark.parametrize("name,value", [("FLASH_QLA_VLLM", "yes"), ("FLASH_QLA_AUTO_CP", "2")])
def test_a_variable_that_says_nothing_known_is_told(name, value, registries, monkeypatch, log):
    monkeypatch.setenv(name, value)
    adapter.register()
    (level, text), = log()
    assert registries == {} and level == "WARNING" and f"{name} ({value}) must be " in text


def test_importing_the_adapter_imports_nothing_of_vllm():
    done = helpers.in_subprocess("import sys, flash_qla.integrations.vllm; assert 'vllm' not in sys.modules and 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


# --- who computes a model ---

def config(asked=None, dtype=torch.bfloat16, **dims):
    dims = dict(linear_key_head_dim=128, linear_value_head_dim=128) | dims
    return SimpleNamespace(additional_config={} if asked is None else {"gdn_prefill_backend": asked},
                           model_config=SimpleNamespace(dtype=dtype, hf_text_config=SimpleNamespace(**dims)))


@pytest.mark.parametrize("asked", [None, "auto", "flash_qla", " Flash_QLA "])
def test_models_that_are_taken(asked, fast, monkeypatch, log):
    monkeypatch.setattr(adapter, "_current_device", lambda: 3)
    assert adapter._decline(module(), config(asked)) is None
    assert fast.asked == [(3, torch.bfloat16, 128, 128, False)] and log() == []


def test_what_is_declined_is_told_once(fast, monkeypatch, log):
    monkeypatch.setattr(adapter, "_current_device", lambda: 0)
    declined = [(config("triton"), "cuda", "gdn_prefill_backend=triton was asked for", "INFO"),
                (config("flashinfer"), "cuda", "gdn_prefill_backend=flashinfer was asked for", "INFO"),
                (config(), "rocm", "the platform is not CUDA", "INFO"),
                (config("flash_qla"), "cpu", "the platform is not CUDA", "WARNING"),
                (config(linear_key_head_dim=None), "cuda", "the model names no head dimensions", "INFO")]
    for given, platform, reason, level in declined:
        _engines._said.clear()
        for _ in range(3):
            assert adapter._decline(module(platform=platform), given) == reason
        assert log()[-1] == (level, f"flash_qla: vLLM's kernels compute the gated delta rule: {reason}")
    assert len(log()) == len(declined)
    fast.reason = "path cuda_generic: sm90 needs K = V = 128"
    assert adapter._decline(module(), config()) == fast.reason and log()[-1][0] == "INFO"
    assert adapter._decline(module(), config("flash_qla")) == fast.reason and log()[-1][0] == "WARNING"


def test_additional_config_of_another_kind(fast, monkeypatch):
    monkeypatch.setattr(adapter, "_current_device", lambda: 0)
    given = config()
    given.additional_config = None
    assert adapter._decline(module(), given) is None


# --- the layer's core ---

BATCHES = {
    "prefill": (0, [70, 3, 130], [2, 5, 7], [True, False, True]),
    "decodes ahead": (3, [65, 1], [4, 8, 1, 2, 11], [True, True, True, False, True]),
    "padding rows": (0, [40, 0, 0], [3, 0, 0], [False, False, False]),
}


@LOW
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
@pytest.mark.parametrize("batch", BATCHES)
def test_core(batch, state_dtype, dtype):
    decodes, lengths, slots, has = BATCHES[batch]
    m, cache = metadata(decodes, lengths, slots, has), pools(dtype, state_dtype)
    layer, before = make_layer(cache), [t.clone() for t in cache]
    tokens = m.num_actual_tokens
    mixed, a, b = mamba.raw_inputs(tokens + 5, HQ, HV, K, V, dtype)  # vLLM pads batches
    out = torch.full((tokens + 5, HV, V), 7.0, dtype=dtype)
    adapter._compute_core(module(), layer, m, mixed, b, a, out)
    compare(out[:tokens], cache, before, *expected(layer, m, mixed[:tokens], a[:tokens], b[:tokens], before), dtype, slots)
    assert (out[tokens:] == 7).all()


@pytest.mark.parametrize("mode", [True, False, "invariant"])
def test_auto_cp_reaches_the_call(mode, monkeypatch):
    from flash_qla.ops import gated_delta_rule

    seen = []
    monkeypatch.setattr(gated_delta_rule, "gated_delta_rule_prefill", lambda *a, **named: seen.append(named["auto_cp"]))
    mixed, a, b = mamba.raw_inputs(70, HQ, HV, K, V, torch.bfloat16)
    layer = make_layer(pools(torch.bfloat16), _flash_qla_auto_cp=mode)
    adapter._compute_core(module(), layer, metadata(0, [70], [3], [True]), mixed, b, a, torch.zeros(70, HV, V, dtype=torch.bfloat16))
    assert seen == [mode]


@LOW
@pytest.mark.parametrize("decodes", [0, 2])
def test_checkpoints_leave_with_the_prefill(decodes, dtype):
    lengths, slots, has = [200, 70, 130], [2, 5, 7], [True, False, True]
    at, into = [128, 0, 64], [9, 0, 10]  # of the second sequence none
    rows = [0] * decodes
    checkpoint = SimpleNamespace(checkpoint_offsets=torch.tensor(rows + at, dtype=torch.int32), state_indices=torch.tensor(rows + into, dtype=torch.int32))
    exported = []
    m = metadata(decodes, lengths, [8, 1][:decodes] + slots, [True] * decodes + has, checkpoint=checkpoint)
    cache = pools(dtype)
    before = [t.clone() for t in cache]
    layer = make_layer(cache, _checkpoint_exporter=SimpleNamespace(export=lambda *given, **named: exported.append((given, named))))
    mixed, a, b = mamba.raw_inputs(m.num_actual_tokens, HQ, HV, K, V, dtype)
    out = torch.zeros(len(mixed), HV, V, dtype=dtype)
    adapter._compute_core(module(), layer, m, mixed, b, a, out)
    o, states, conv_states = expected(layer, m, mixed, a, b, before)
    assert_close("o", out[None], o[None], helpers.bound_for("o", dtype), 2)
    # The states at the checkpoints are the final ones of the sequences cut there.
    tokens, begin = torch.zeros(len(mixed), dtype=torch.bool), decodes
    for length, end in zip(lengths, at):
        tokens[begin:begin + end] = True
        begin += length
    short = metadata(0, at, slots, has)
    _, want, _ = expected(layer, short, mixed[tokens], a[tokens], b[tokens], before)
    for slot, source in ((9, 2), (10, 7)):
        assert_close("checkpoint", cache[1][slot][None], want[source][None], helpers.bound_for("pool", dtype), 1)
    for slot in slots:
        assert_close("pool", cache[1][slot][None], states[slot][None], helpers.bound_for("pool", dtype), 1)
    assert_bitwise("pool", cache[1][[0, 3, 6, 11]], before[1][[0, 3, 6, 11]])
    (given, named), = exported
    assert given == (checkpoint,) and "recurrent_checkpoint" not in named, "the convolution's windows alone"
    assert named["raw_qkv"].data_ptr() == mixed.data_ptr() and named["cu_seqlens"] is m.non_spec_query_start_loc


def test_batches_that_stay_with_vllm():
    m = metadata(1, [65], [4, 2], [True, False])
    mixed, out = torch.zeros(66, 8, dtype=torch.bfloat16), torch.zeros(66, HV, V, dtype=torch.bfloat16)

    def chosen(layer=None, context=None, out=out, **changes):
        changed = dataclasses.replace(m, **changes)
        context = {"layers.0": changed} if context is None else context
        found = adapter._prefill_metadata(module(SimpleNamespace(attn_metadata=context)), layer or make_layer(None), mixed, out)
        return found is not None and found is changed

    assert chosen()
    assert not chosen(num_prefills=0), "decode alone"
    assert not chosen(spec_sequence_masks=torch.ones(2, dtype=torch.bool)), "speculative rows"
    assert not chosen(num_decode_tokens=2), "decodes of several tokens"
    assert not chosen(context={}), "a profiling run"
    assert not chosen(context=[m])
    assert not chosen(context={"layers.0": SimpleNamespace(num_prefills=1)}), "another backend's metadata"
    assert not chosen(layer=make_layer(None, _flash_qla_auto_cp=None)), "a layer that was declined"
    assert not chosen(out=out.float())
    assert chosen(layer=make_layer(None, _flash_qla_auto_cp=False)), "auto_cp of False is a choice of its own"


# --- the table of `python -m flash_qla info` ---

def test_status(fast, monkeypatch):
    versions = {}
    monkeypatch.setattr(_engines, "version_of", versions.get)
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: fast.reason)
    assert adapter.status() == (False, "not installed")
    versions["vllm"] = "0.33.2"
    assert adapter.status() == (True, "prefill; FLASH_QLA_VLLM=0 turns it off")
    fast.reason = "no GPU"
    assert adapter.status() == (False, "no GPU")
    versions["vllm"] = "0.40.0"
    assert adapter.status()[1].startswith("vLLM 0.40.0 is not known here")
    monkeypatch.setenv("FLASH_QLA_VLLM", "0")
    assert adapter.status() == (False, "FLASH_QLA_VLLM=0")


def test_the_entry_point_names_register():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nflash_qla = "flash_qla.integrations.vllm:register"\n' in text
