"""The adapter for SGLang: each method of its kernel against an oracle, and what register() does and leaves."""

import sys
from pathlib import Path
from types import SimpleNamespace

import helpers
import mamba
import numpy as np
import oracle
import pytest
import releases
import torch
from helpers import assert_bitwise, assert_close, to_numpy

from flash_qla.integrations import _engines
from flash_qla.integrations import sglang as adapter

HQ, HV, K, V, SLOTS = 2, 4, 16, 32, 12
LOW = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)


class Triton:
    """SGLang's own kernel: what it is asked is noted."""

    supports_packed_decode = True

    def __init__(self):
        self.calls = []

    def packed_decode(self, *given, **named):
        self.calls.append((given, named))
        return "Triton's"


@pytest.fixture
def context(monkeypatch):
    """The server's arguments as SGLang publishes them."""
    mamba_arguments = SimpleNamespace(linear_attn_backend="triton", linear_attn_prefill_backend=None, linear_attn_decode_backend=None,
                                      linear_attn_verify_backend=None)
    exec_ = SimpleNamespace(mamba=mamba_arguments, deterministic=SimpleNamespace(enable_deterministic_inference=False))
    releases.stand_in(monkeypatch, adapter._CONTEXT, get_exec=lambda: exec_)
    releases.stand_in(monkeypatch, adapter._KERNELS, LinearAttnKernelBase=type("LinearAttnKernelBase", (), {}))
    return exec_


@pytest.fixture
def kernel(context):
    return adapter._kernel_class()(Triton())


def make_pool(state_dtype=torch.float32, seed=3):
    """[slots, HV, V, K] of a pool that holds several layers: slots lie apart."""
    values = torch.randn(SLOTS, 2, HV, V, K, generator=torch.Generator().manual_seed(seed)).to(state_dtype)
    return values[:, 1]


def prefill_inputs(lengths, dtype, padding=0):
    return helpers.make_inputs(seqlens=lengths, padding=padding, Hq=HQ, Hv=HV, K=K, V=V, dtype=dtype, grads=False, state=False, normalise=False,
                               use_qk_l2norm_in_kernel=True, state_v_first=True)


def extend(kernel, x, pool, slots, **more):
    return kernel.extend(x.q, x.k, x.v, x.g, x.beta, ssm_states=pool, cache_indices=torch.tensor(slots, dtype=torch.int32),
                         query_start_loc=x.cu_seqlens.int(), **more)


def expected_extend(x, pool, slots, final=None, **options):
    return oracle.pooled(*(to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), pool=to_numpy(pool), initial_indices=slots, final_indices=final,
                         cu_seqlens=x.cu_seqlens.numpy(), options=helpers.oracle_options(x.dtype, x.options), **options)


def compare_pool(pool, before, want, dtype):
    written = np.flatnonzero((want != to_numpy(before)).any((1, 2, 3))).tolist()
    others = [slot for slot in range(SLOTS) if slot not in written]
    assert_bitwise("pool", pool[others], before[others])
    bound = helpers.bound_for("pool", dtype if pool.dtype == torch.float32 else pool.dtype)
    assert_close("pool", pool[written], want[written], bound, 1)
    return written


# --- prefill ---

@LOW
@STATES
def test_extend(state_dtype, dtype, kernel):
    x, pool = prefill_inputs([70, 1, 130], dtype, padding=3), make_pool(state_dtype)
    before, slots = pool.clone(), [2, -1, 7]
    o, final, h = extend(kernel, x, pool, slots, layer_id=3, extend_prefix_lens=torch.tensor([0, 0, 5]))
    want_o, want_pool, _ = expected_extend(x, before, slots)
    assert final is None and h is None and o.shape == (1, 204, HV, V) and o.dtype == dtype
    helpers.compare(dict(o=o), dict(o=want_o), dtype)
    assert compare_pool(pool, before, want_pool, dtype) == [2, 7]


@LOW
def test_extend_into_a_given_output(dtype, kernel):
    x, pool = prefill_inputs([70, 5], dtype), make_pool()
    output = torch.full_like(x.v, 7.0)
    o, _, _ = extend(kernel, x, pool.clone(), [2, 3], output=output)
    assert o is output
    assert_bitwise("o", output, extend(kernel, x, pool.clone(), [2, 3])[0])


@LOW
def test_extend_without_keeping_states(dtype, kernel):
    x, pool = prefill_inputs([70, 5, 64], dtype), make_pool()
    before = pool.clone()
    o, _, _ = extend(kernel, x, pool, [2, 2, 4], inplace_update=False)  # items of one query share its slot
    assert_bitwise("pool", pool, before)
    for n, tokens in enumerate((slice(0, 70), slice(70, 75), slice(75, 139))):
        part = x.replace(**{name: getattr(x, name)[:, tokens] for name in ("q", "k", "v", "g", "beta")},
                         cu_seqlens=helpers.offsets([tokens.stop - tokens.start]))
        want, _, _ = expected_extend(part, before, [[2, 2, 4][n]])
        helpers.compare(dict(o=o[:, tokens]), dict(o=want), dtype)


@LOW
@STATES
@pytest.mark.parametrize("every", [64, 128])
def test_extend_leaves_states_for_the_cache(every, state_dtype, dtype, kernel):
    lengths, slots = [200, 63, 130], [2, 5, 7]
    x, pool = prefill_inputs(lengths, dtype), make_pool(state_dtype)
    before = pool.clone()
    starts = torch.tensor(np.concatenate([[0], np.cumsum([n // every for n in lengths])]))
    o, _, h = extend(kernel, x, pool, slots, state_checkpoint_cu_starts=starts, num_state_checkpoints=int(starts[-1]),
                     state_checkpoint_every_n_tokens=every)
    want_o, want_pool, rows = expected_extend(x, before, slots, checkpoint_every=every)
    helpers.compare(dict(o=o), dict(o=want_o), dtype)
    compare_pool(pool, before, want_pool, dtype)
    assert h.shape == (1, int(starts[-1]), HV, V, K) and h.dtype == state_dtype
    assert_close("h", h[0], rows, helpers.bound_for("pool", dtype if state_dtype == torch.float32 else state_dtype), 1)


def test_what_extend_refuses(kernel):
    x, pool = prefill_inputs([70], torch.bfloat16), make_pool()
    before = pool.clone()
    with pytest.raises(ValueError, match=r"^extend: state_checkpoint_every_n_tokens \(96\) must be a multiple of 64"):
        extend(kernel, x, pool, [2], num_state_checkpoints=1, state_checkpoint_every_n_tokens=96, state_checkpoint_cu_starts=torch.tensor([0, 1]))
    for name in ("track_state", "a_keyword_of_tomorrow"):
        with pytest.raises(TypeError, match=rf"^extend: {name} \(Tensor\) .*FLASH_QLA_SGLANG=0"):
            extend(kernel, x, pool, [2], **{name: pool})
    extend(kernel, x, pool.clone(), [2], a_keyword_of_tomorrow=None)
    assert_bitwise("pool", pool, before)


@pytest.mark.parametrize("variable,deterministic,mode", [(None, False, True), ("invariant", False, "invariant"), ("0", False, False),
                                                         ("1", True, False), ("invariant", True, False)])
def test_auto_cp(variable, deterministic, mode, context, monkeypatch):
    from flash_qla.ops import gated_delta_rule

    context.deterministic.enable_deterministic_inference = deterministic
    if variable is not None:
        monkeypatch.setenv("FLASH_QLA_AUTO_CP", variable)
    seen = []
    monkeypatch.setattr(gated_delta_rule, "gated_delta_rule_prefill", lambda *a, **named: seen.append(named["auto_cp"]))
    extend(adapter._kernel_class()(Triton()), prefill_inputs([70], torch.bfloat16), make_pool(), [2])
    assert seen == [mode]


# --- decode ---

def raw_rows(B, dtype):
    mixed, a, b = mamba.raw_inputs(B, HQ, HV, K, V, dtype)
    q, k, v = mixed.split([HQ * K, HQ * K, HV * V], 1)
    return mixed, (q.unflatten(1, (HQ, K))[None], k.unflatten(1, (HQ, K))[None], v.unflatten(1, (HV, V))[None]), a, b


def expected_decode(rows, a, b, A_log, dt_bias, pool, slots, scale=None):
    q, k, v = (to_numpy(x.transpose(0, 1)) for x in rows)
    options = helpers.oracle_options(rows[0].dtype, dict(state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                                                         use_beta_sigmoid_in_kernel=True) | ({} if scale is None else dict(scale=scale)))
    o, after, _ = oracle.pooled(q, k, v, to_numpy(a)[:, None], to_numpy(b)[:, None], pool=to_numpy(pool), initial_indices=slots,
                                A_log=to_numpy(A_log), dt_bias=to_numpy(dt_bias), options=options)
    return np.swapaxes(o, 0, 1), after


@LOW
@STATES
@pytest.mark.parametrize("packed", [False, True], ids=["decode", "packed"])
def test_decode(packed, state_dtype, dtype, kernel):
    slots, pool = [3, -1, 7, 0, 11], make_pool(state_dtype)
    before, (A_log, dt_bias) = pool.clone(), mamba.parameters(HV)
    mixed, rows, a, b = raw_rows(5, dtype)
    common = dict(A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=torch.tensor(slots, dtype=torch.int32))
    if packed:
        o = kernel.packed_decode(mixed, a, b, scale=0.3, num_v_heads=HV, head_v_dim=V, replayssm_d=None, replayssm_write_pos=None, **common)
    else:
        o = kernel.decode(*rows, a, b, query_start_loc=torch.arange(6), **common)
    want_o, want_pool = expected_decode(rows, a, b, A_log, dt_bias, before, slots, 0.3 if packed else None)
    assert o.shape == (1, 5, HV, V) and o.dtype == dtype and not o[0, 1].any()
    helpers.compare(dict(o=o), dict(o=want_o), dtype)
    assert compare_pool(pool, before, want_pool, dtype) == [0, 3, 7, 11]


def test_buffered_steps_are_tritons(kernel):
    pool, (A_log, dt_bias) = make_pool(), mamba.parameters(HV)
    before = pool.clone()
    mixed, _, a, b = raw_rows(2, torch.bfloat16)
    common = dict(A_log=A_log, dt_bias=dt_bias, scale=0.3, ssm_states=pool, cache_indices=torch.tensor([3, 4]), num_v_heads=HV, head_v_dim=V)
    assert kernel.packed_decode(mixed, a, b, replayssm_d=torch.zeros(1), replayssm_write_pos=None, **common) == "Triton's"
    (given, named), = kernel._triton.calls
    assert given == (mixed, a, b) and set(named) == {*common, "replayssm_d", "replayssm_write_pos"}
    with pytest.raises(TypeError, match=r"^packed_decode: something \(int\) .*FLASH_QLA_SGLANG=0"):
        kernel.packed_decode(mixed, a, b, something=1, **common)
    with pytest.raises(TypeError, match=r"^decode: something \(int\) "):
        kernel.decode(mixed, mixed, mixed, a, b, A_log=A_log, dt_bias=dt_bias, ssm_states=pool, cache_indices=None, query_start_loc=None, something=1)
    assert_bitwise("pool", pool, before)


# --- verification ---

TREES = [[0, 0, 0, 1], [99, 0, 1, 2], [-7, 0, 0, 0]]  # what stands for the first token is whatever the memory held


@LOW
@STATES
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
def test_target_verify(checked, tree, state_dtype, dtype, kernel, monkeypatch):
    if checked:
        monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    N, T = 3, 4
    pool, (A_log, dt_bias), slots, rows_of = make_pool(state_dtype), mamba.parameters(HV), [3, -1, 7], [4, 2, 0]
    before = pool.clone()
    buffer = torch.full((6, T + 2, HV, V, K), torch.nan, dtype=state_dtype)  # there may be room for more steps
    mixed, rows, a, b = raw_rows(N * T, dtype)
    o = kernel.target_verify(
        A_log, dt_bias, *rows, a, b, ssm_states=pool, cache_indices=torch.tensor([*slots, -1], dtype=torch.int32), query_start_loc=torch.arange(N + 1) * T,
        intermediate_states_buffer=buffer, intermediate_state_indices=torch.tensor([*rows_of, 5, 5], dtype=torch.int32), cache_steps=T,
        retrieve_parent_token=torch.tensor(TREES) if tree else None, stable_rows=False)
    assert o.shape == (1, N * T, HV, V) and o.dtype == dtype
    options = helpers.oracle_options(dtype, dict(state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True))
    q, k, v = (to_numpy(x.unflatten(1, (N, T))[0]) for x in rows)
    want_o, want_states, _ = oracle.verified(q, k, v, to_numpy(a.view(N, T, HV)), to_numpy(b.view(N, T, HV)), to_numpy(before), slots,
                                             TREES if tree else None, A_log=to_numpy(A_log), dt_bias=to_numpy(dt_bias), options=options)
    helpers.compare(dict(o=o[0].unflatten(0, (N, T))), dict(o=want_o), dtype)
    bound = helpers.bound_for("pool", dtype if state_dtype == torch.float32 else state_dtype)
    for n in (0, 2):
        assert_close("states", buffer[rows_of[n], :T], want_states[n], bound, 1)
    assert buffer[[1, 2, 3, 5]].isnan().all() and buffer[:, T:].isnan().all()
    assert_bitwise("pool", pool, before)


# --- register(), and the table of kernels ---

@pytest.fixture
def server(monkeypatch, context, fast):
    """Stand-ins for the modules that register() and the hook import."""
    hooks = []
    registry = type("HookRegistry", (), dict(register=staticmethod(lambda *given: hooks.append(given))))
    releases.stand_in(monkeypatch, adapter._HOOKS, HookRegistry=registry, HookType=SimpleNamespace(AROUND="around"))
    choices = ["triton", "flashinfer"]
    releases.stand_in(monkeypatch, adapter._CHOICES, LINEAR_ATTN_KERNEL_BACKEND_CHOICES=choices, add_linear_attn_kernel_backend_choices=choices.extend)
    releases.stand_in(monkeypatch, adapter._BACKENDS, LinearAttnKernelBackend=SimpleNamespace(TRITON="triton"))
    monkeypatch.setattr(adapter, "_hooked", None)
    monkeypatch.setattr(_engines, "version_of", lambda name: "0.5.23")
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: fast.reason)
    return SimpleNamespace(hooks=hooks, choices=choices, mamba=context.mamba)


def test_register_adds_a_choice_and_a_hook_once(server):
    for _ in range(3):
        adapter.register()
    assert server.choices == ["triton", "flashinfer", "flash_qla"]
    assert server.hooks == [(adapter.DISPATCHER, adapter._around_init, "around")]


def test_switched_off(server, monkeypatch, log):
    monkeypatch.setenv("FLASH_QLA_SGLANG", "0")
    adapter.register()
    assert server.hooks == [] and "flash_qla" not in server.choices
    assert log() == [("INFO", "flash_qla: switched off for SGLang by FLASH_QLA_SGLANG=0")]


@pytest.mark.parametrize("version", ["0.5.24", "0.5.2", "0.6.0.dev1"])
def test_a_version_that_is_not_known_is_declined_aloud(version, server, monkeypatch, log):
    monkeypatch.setattr(_engines, "version_of", lambda name: version)
    adapter.register()
    assert server.hooks == [] and "flash_qla" not in server.choices
    (level, text), = log()
    assert level == "WARNING" and text.startswith(f"flash_qla: left alone: SGLang {version} is not known here (0.5.23 are)")
    monkeypatch.setenv("FLASH_QLA_SGLANG", "1")
    adapter.register()
    assert "flash_qla" in server.choices


@pytest.mark.parametrize("broken", [adapter._HOOKS, adapter._CHOICES])
def test_register_returns_whatever_is_broken(broken, server, monkeypatch, log):
    monkeypatch.setitem(sys.modules, broken, None)
    adapter.register()
    assert "flash_qla" not in server.choices, "a choice without a kernel would be worse than none"
    assert [level for level, _ in log()] == ["WARNING"]


def dispatcher(server, **arguments):
    """A table of kernels, constructed through the hook, and what its constructor was given."""
    vars(server.mamba).update(arguments)
    given = []

    def original(self, *backends):
        given.extend(backends)
        self.tree_verify_kernel = self.verify_kernel = self.extend_kernel = self.decode_kernel = Triton()
        self.supports_packed_decode, self.verify_kernel_is_flashinfer = True, False

    table = SimpleNamespace()
    adapter._around_init(original, table, "d", "p", "v")
    return table, given


def named(table):
    kernels = {name: getattr(table, f"{name}_kernel") for name in ("extend", "decode", "verify", "tree_verify")}
    return {name for name, kernel in kernels.items() if type(kernel).__name__ == "FlashQLAGDNKernel"}


CASES = [
    (dict(), ["d", "p", "v"], set()),
    (dict(linear_attn_backend="another"), ["d", "p", "v"], set()),
    (dict(linear_attn_backend="flash_qla"), ["triton", "triton", "v"], {"extend", "decode"}),
    (dict(linear_attn_prefill_backend="flash_qla"), ["d", "triton", "v"], {"extend"}),
    (dict(linear_attn_decode_backend="flash_qla"), ["triton", "p", "v"], {"decode"}),
    (dict(linear_attn_backend="flash_qla", linear_attn_prefill_backend="triton"), ["triton", "p", "v"], {"decode"}),
    (dict(linear_attn_verify_backend="flash_qla"), ["d", "p", "triton"], {"verify", "tree_verify"})]


@pytest.mark.parametrize("arguments,given,ours", CASES, ids=[str(c[0]) for c in CASES])
def test_what_the_arguments_name(arguments, given, ours, server, log):
    table, backends = dispatcher(server, **arguments)
    assert backends == given and named(table) == ours
    assert len(log()) == bool(ours)


def test_verification_by_the_switch(server, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_SGLANG", "verify")
    assert named(dispatcher(server)[0]) == {"verify", "tree_verify"}
    assert named(dispatcher(server, linear_attn_verify_backend="triton")[0]) == set(), "another that is named stays"


def test_a_machine_that_would_be_slow_is_told(server, fast):
    fast.reason = "path cuda_generic: sm90 needs a GPU of compute capability 9.0"
    with pytest.raises(ValueError, match="^--linear-attn-backend flash_qla: would be slower .*compute capability 9.0"):
        dispatcher(server, linear_attn_backend="flash_qla")
    assert named(dispatcher(server, linear_attn_backend="triton")[0]) == set(), "nobody asked"


def test_heads_that_would_be_slow_are_told(fast):
    fast.reason = "path cuda_generic: sm90 needs K = V = 128"
    q = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=1), dtype=torch.bfloat16, shape=(1, 5, 2, 64))
    with pytest.raises(ValueError, match="^--linear-attn-prefill-backend flash_qla: .*sm90 needs K = V = 128"):
        adapter._refuse_slow(q, SimpleNamespace(shape=(1, 5, 4, 32)))
    assert fast.asked == [(1, torch.bfloat16, 64, 32, False)]


def test_a_constructor_with_more_arguments(server):
    with pytest.raises(TypeError, match=r"^GDNKernelDispatcher: new_backend \(str\) .*FLASH_QLA_SGLANG=0"):
        server.mamba.linear_attn_backend = "flash_qla"
        adapter._around_init(None, None, "d", "p", new_backend="x")


def test_importing_the_adapter_imports_nothing_of_sglang():
    done = helpers.in_subprocess("import sys, flash_qla.integrations.sglang; assert 'sglang' not in sys.modules and 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_status(fast, monkeypatch):
    versions = {}
    monkeypatch.setattr(_engines, "version_of", versions.get)
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: fast.reason)
    assert adapter.status() == (False, "not installed")
    versions["sglang"] = "0.5.23"
    assert adapter.status() == (True, "by --linear-attn-prefill-backend flash_qla, --linear-attn-decode-backend flash_qla")
    versions["sglang"] = "0.6.0"
    assert adapter.status()[1].startswith("SGLang 0.6.0 is not known here")
    monkeypatch.setenv("FLASH_QLA_SGLANG", "0")
    assert adapter.status() == (False, "FLASH_QLA_SGLANG=0")


def test_the_entry_point_names_register():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    assert '[project.entry-points."sglang.srt.plugins"]\nflash_qla = "flash_qla.integrations.sglang:register"\n' in text
