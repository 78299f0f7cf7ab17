"""The adapter for TensorRT-LLM between stand-ins of the functions of its mixer that decide which kernel prefill calls."""

import functools
from types import SimpleNamespace

import helpers
import pytest
import releases
import torch
from helpers import assert_bitwise, assert_close

from flash_qla import chunk_gated_delta_rule, gated_delta_rule_prefill
from flash_qla.integrations import _engines
from flash_qla.integrations import tensorrt_llm as adapter

HQ, HV, K, V, SLOTS, LENGTHS = 2, 4, 16, 32, 7, [5, 70, 1]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=helpers.dtype_name)


@pytest.fixture
def mixer(monkeypatch):
    """gdn_mixer: what it resolves, and whether that is FlashInfer's, are remembered."""
    calls = []

    def flashinfer(*arguments, **named):
        calls.append((arguments, named))
        return "TensorRT-LLM's", None

    flashinfer.__module__ = "tensorrt_llm._torch.modules.fla.flashinfer_chunk"

    @functools.lru_cache(maxsize=1)
    def resolve():
        return flashinfer

    @functools.lru_cache(maxsize=1)
    def uses_flashinfer():
        return module._resolve_chunk_gated_delta_rule().__module__.rsplit(".", 1)[-1] == "flashinfer_chunk"

    def prefill(*arguments, state_workspace=None, **named):
        if state_workspace is not None:
            named["state_workspace"] = state_workspace
        return module._resolve_chunk_gated_delta_rule()(*arguments, **named)

    module = releases.stand_in(monkeypatch, adapter._MIXER, _resolve_chunk_gated_delta_rule=resolve, chunk_gated_delta_rule=prefill,
                               _gdn_prefill_uses_flashinfer=uses_flashinfer, calls=calls)
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: None)
    yield module
    adapter.unpatch()


@pytest.fixture
def patched(mixer):
    assert adapter.patch()
    return mixer


def inputs(dtype=torch.bfloat16, pool_dtype=None):
    x = helpers.make_inputs(Hq=HQ, Hv=HV, K=K, V=V, dtype=dtype, seqlens=LENGTHS, state=False)
    x.pool = torch.randn(SLOTS, HV, V, K, generator=torch.Generator().manual_seed(3)).to(pool_dtype or dtype)
    x.slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    return x


def tokens(x):
    return dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta)


def in_place(x, **more):
    """The call of the mixer's forward_extend, older and newer."""
    return dict(tokens(x), initial_state=x.pool, initial_state_indices=x.slots, inplace_indexed_state_update=True, output_final_state=False,
                cu_seqlens=x.cu_seqlens, head_first=False, use_qk_l2norm_in_kernel=False, **more)


def test_patch_and_unpatch(mixer, log):
    assert mixer._gdn_prefill_uses_flashinfer()
    assert adapter.patch() and adapter.patch()
    assert not mixer._gdn_prefill_uses_flashinfer(), "g arrives as a logarithm"
    assert [level for level, _ in log()] == ["INFO"] and "prefill" in log()[0][1]
    adapter.unpatch()
    adapter.unpatch()
    assert mixer._gdn_prefill_uses_flashinfer() and mixer.chunk_gated_delta_rule(1)[0] == "TensorRT-LLM's"


def test_versions_that_remember_less(mixer):
    del mixer._gdn_prefill_uses_flashinfer
    assert adapter.patch()
    adapter.unpatch()
    del mixer._resolve_chunk_gated_delta_rule
    with pytest.raises(ImportError, match="_resolve_chunk_gated_delta_rule"):
        adapter.patch()


def test_not_installed():
    with pytest.raises(ImportError):
        adapter.patch()
    assert adapter.status() == (False, "not installed")


def test_declined_where_slow(mixer, monkeypatch, log):
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: "path cuda_generic")
    before = mixer._resolve_chunk_gated_delta_rule
    assert not adapter.patch() and mixer._resolve_chunk_gated_delta_rule is before
    assert log() == [("WARNING", "flash_qla: TensorRT-LLM of unknown version was left alone: path cuda_generic")]


@DTYPES
@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_in_place(patched, dtype, pool_dtype):
    x = inputs(dtype, pool_dtype)
    expected_pool = x.pool.clone()
    expected = gated_delta_rule_prefill(**tokens(x), state_pool=expected_pool, initial_state_indices=x.slots, cu_seqlens=x.cu_seqlens)
    untouched = [slot for slot in range(SLOTS) if slot not in x.slots.tolist()]
    before = x.pool[untouched].clone()
    output = torch.full((1, x.q.shape[1] + 3, HV, V), 9.0, dtype=dtype)[:, :-3]  # rows of the decode tokens come behind
    o, final = patched.chunk_gated_delta_rule(**in_place(x, output=output, use_cp="auto", g_is_linear=False), state_workspace=(1, 2))
    assert final is None and o is output
    assert_bitwise("o", o, expected)
    assert_bitwise("pool", x.pool, expected_pool)
    assert_bitwise("other slots", x.pool[untouched], before)


@DTYPES
@pytest.mark.parametrize("gathered", [True, False])
@pytest.mark.parametrize("wants", [True, False])
def test_gathered_states(patched, dtype, gathered, wants):
    x = inputs(dtype)
    before = x.pool.clone()
    rows = x.pool[x.slots]
    states = dict(initial_state=rows) if gathered else dict(initial_state=x.pool, initial_state_indices=x.slots)
    o, final = patched.chunk_gated_delta_rule(**tokens(x), **states, output_final_state=wants, cu_seqlens=x.cu_seqlens)
    expected, expected_final = chunk_gated_delta_rule(
        x.q, x.k, x.v, x.g, x.beta, initial_state=x.pool[x.slots].float(), output_final_state=True, cu_seqlens=x.cu_seqlens, state_v_first=True)
    assert_bitwise("o", o, expected)
    assert_bitwise("the pool is read alone", x.pool, before)
    assert_bitwise("the states are read alone", rows, before[x.slots])
    if wants:
        assert final.dtype == dtype
        assert_close("final", final, expected_final, helpers.bound_for("final_state", dtype))
    else:
        assert final is None


@pytest.mark.parametrize("wants", [True, False])
def test_without_states(patched, wants):
    x = inputs()
    output = torch.empty(1, x.q.shape[1], HV, V, dtype=x.q.dtype)
    o, final = patched.chunk_gated_delta_rule(**tokens(x), output_final_state=wants, cu_seqlens=x.cu_seqlens, scale=0.3, use_qk_l2norm_in_kernel=True, output=output)
    expected, expected_final = chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, scale=0.3, output_final_state=wants, cu_seqlens=x.cu_seqlens,
                                                      use_qk_l2norm_in_kernel=True, state_v_first=True)
    assert o is output
    assert_bitwise("o", o, expected)
    assert (final is None) == (not wants)
    if wants:
        assert_bitwise("final", final, expected_final)


@pytest.mark.parametrize("wrong, message", [
    (dict(g_is_linear=True), "g must be the logarithm"),
    (dict(head_first=True), "head_first must be False"),
    (dict(initial_state_indices=None), "needs initial_state_indices"),
], ids=["linear g", "head first", "no indices"])
def test_refused(patched, wrong, message):
    with pytest.raises(ValueError, match=message):
        patched.chunk_gated_delta_rule(**dict(in_place(inputs()), **wrong))


def test_unknown_keyword(patched):
    with pytest.raises(TypeError, match="chunk_indices"):
        patched.chunk_gated_delta_rule(**in_place(inputs(), chunk_indices=1))


def test_slow_calls_are_tensorrt_llms(patched, monkeypatch, log):
    monkeypatch.setattr(adapter, "_slow_reason", lambda q, v: "sm90 needs K = V = 128")
    x = inputs()
    for _ in range(2):
        assert patched.chunk_gated_delta_rule(**in_place(x, output=None))[0] == "TensorRT-LLM's"
    arguments, named = patched.calls[0]
    assert arguments[0] is x.q and named["initial_state"] is x.pool and named["inplace_indexed_state_update"]
    assert [level for level, _ in log()] == ["WARNING"] and "K = V = 128" in log()[0][1]


def test_question_about_slow_calls(fast):
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1), dtype=torch.bfloat16, shape=(1, 8, 2, 128))
    assert adapter._slow_reason(tensor, tensor) is None and fast.asked == [(1, torch.bfloat16, 128, 128, False)]


def test_auto_cp(mixer, monkeypatch):
    seen = []
    monkeypatch.setattr("flash_qla.ops.gated_delta_rule.gated_delta_rule_prefill", lambda *_, auto_cp, **named: seen.append(auto_cp))
    monkeypatch.setenv("FLASH_QLA_AUTO_CP", "invariant")
    adapter.patch()
    mixer.chunk_gated_delta_rule(**in_place(inputs()))
    assert seen == ["invariant"]


def test_status(monkeypatch):
    monkeypatch.setattr(_engines, "version_of", lambda name: "1.4.0")
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: None)
    assert adapter.status() == (True, "by flash_qla.integrations.tensorrt_llm.patch()")
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: "no GPU")
    assert adapter.status() == (False, "no GPU")
