"""The adapter for SGLang in SGLang's released Python: its hooks and its base class whole, its table of kernels cut out."""

import ast
from enum import Enum
from types import SimpleNamespace

import msgspec_stand_in
import pytest
import releases
import test_sglang as small
import torch

from flash_qla.integrations import _engines
from flash_qla.integrations import sglang as adapter

pytestmark = releases.needed
SRT = "sglang/srt/"


@pytest.fixture
def sglang(monkeypatch, fast):
    """A process of SGLang as far as its table of GDN kernels needs one."""
    arguments = SimpleNamespace(linear_attn_backend="triton", linear_attn_prefill_backend=None, linear_attn_decode_backend=None, linear_attn_verify_backend=None)
    exec_ = SimpleNamespace(mamba=arguments, deterministic=SimpleNamespace(enable_deterministic_inference=False))
    releases.stand_in(monkeypatch, adapter._CONTEXT, get_exec=lambda: exec_)
    releases.stand_in(monkeypatch, "sglang.srt.plugins")
    for package in ("layers", "layers.attention", "layers.attention.linear", "layers.attention.linear.kernels", "arg_groups"):
        releases.stand_in(monkeypatch, f"sglang.srt.{package}")
    files = {adapter._HOOKS: "plugins/hook_registry.py", adapter._KERNELS: "layers/attention/linear/kernels/kernel_backend.py"}
    hooks, kernels = (releases.whole(monkeypatch, name, releases.path_of("sglang", SRT + file)) for name, file in files.items())
    utils = releases.cut(monkeypatch, adapter._BACKENDS, releases.path_of("sglang", SRT + "layers/attention/linear/utils.py"),
                         ["LinearAttnKernelBackend", "LinearAttnBackends", "resolve_linear_attn_backends"],
                         dict(Enum=Enum, msgspec=msgspec_stand_in, get_exec=lambda: exec_, rank0_log=lambda text: None))
    choices = releases.cut(monkeypatch, adapter._CHOICES, releases.path_of("sglang", SRT + "arg_groups/choices.py"),
                           ["LINEAR_ATTN_KERNEL_BACKEND_CHOICES", "add_linear_attn_kernel_backend_choices"], {})

    class TritonGDNKernel(kernels.LinearAttnKernelBase):
        supports_packed_decode = True
        decode = extend = None

    module = releases.cut(monkeypatch, "sglang.srt.layers.attention.linear.gdn_backend", releases.path_of("sglang", SRT + "layers/attention/linear/gdn_backend.py"),
                          ["GDNKernelDispatcher"], dict(TritonGDNKernel=TritonGDNKernel, is_cuda=lambda: True, is_xpu=lambda: False, rank0_log=lambda text: None))
    monkeypatch.setattr(adapter, "_hooked", None)
    monkeypatch.setattr(_engines, "version_of", lambda name: releases.version("sglang"))
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda: fast.reason)
    yield SimpleNamespace(arguments=arguments, hooks=hooks, kernels=kernels, utils=utils, choices=choices, module=module, triton=TritonGDNKernel)
    hooks.HookRegistry.reset()


def start(sglang, **arguments):
    """What SGLang does in a process: plugins, then arguments, then a layer's table of kernels."""
    adapter.register()
    sglang.hooks.HookRegistry.apply_hooks()
    for name, value in arguments.items():
        if value != "triton" and name != "linear_attn_verify_backend":
            assert value in sglang.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES, "argparse would refuse it"
    vars(sglang.arguments).update(arguments)
    backends = sglang.utils.resolve_linear_attn_backends()
    return sglang.module.GDNKernelDispatcher(backends.decode, backends.prefill, backends.verify)


def ours(kernel):
    return type(kernel).__name__ == "FlashQLAGDNKernel"


def test_the_kernel_is_of_sglangs_base_class_and_has_all_its_methods(sglang):
    kernel = start(sglang, linear_attn_backend="flash_qla").extend_kernel
    assert ours(kernel) and isinstance(kernel, sglang.kernels.LinearAttnKernelBase)
    flags = [name for name, value in vars(sglang.kernels.LinearAttnKernelBase).items() if isinstance(value, bool)]
    assert {name: getattr(kernel, name) for name in flags} == dict(
        uses_state_checkpoints=True, supports_fused_chain_verify=False, supports_strided_target_verify_qkv=True, supports_track_state_snapshot=False)


@pytest.mark.parametrize("arguments,taken", [
    ({}, set()), (dict(linear_attn_backend="flash_qla"), {"extend", "decode"}), (dict(linear_attn_prefill_backend="flash_qla"), {"extend"}),
    (dict(linear_attn_decode_backend="flash_qla"), {"decode"}), (dict(linear_attn_verify_backend="flash_qla"), {"verify", "tree_verify"})], ids=str)
def test_what_the_flags_choose(arguments, taken, sglang):
    table = start(sglang, **arguments)
    kernels = {name: getattr(table, f"{name}_kernel") for name in ("extend", "decode", "verify", "tree_verify")}
    assert {name for name, kernel in kernels.items() if ours(kernel)} == taken
    assert all(isinstance(kernel, sglang.triton) for name, kernel in kernels.items() if name not in taken)
    assert table.supports_packed_decode is True and table.extend_uses_state_checkpoints == ("extend" in taken)


def test_calls_go_through_sglangs_table(sglang):
    table = start(sglang, linear_attn_backend="flash_qla", linear_attn_verify_backend="flash_qla")
    x, pool = small.prefill_inputs([70, 5], torch.bfloat16), small.make_pool()
    before = pool.clone()
    o, final, h = table.extend(
        x.q, x.k, x.v, x.g, x.beta, ssm_states=pool, cache_indices=torch.tensor([2, 7]), query_start_loc=x.cu_seqlens.int(), state_checkpoint_cu_starts=None,
        num_state_checkpoints=0, state_checkpoint_every_n_tokens=0, output=None, layer_id=0, extend_prefix_lens=None, track_state=None, track_chunk_idx=None)
    want, after, _ = small.expected_extend(x, before, [2, 7])
    small.helpers.compare(dict(o=o), dict(o=want), torch.bfloat16)
    small.compare_pool(pool, before, after, torch.bfloat16)
    mixed, rows, a, b = small.raw_rows(2, torch.bfloat16)
    A_log, dt_bias = small.mamba.parameters(small.HV)
    before = pool.clone()
    o = table.packed_decode(mixed, a, b, A_log=A_log, dt_bias=dt_bias, scale=small.K**-0.5, ssm_states=pool, cache_indices=torch.tensor([2, 7]), num_v_heads=small.HV,
                            head_v_dim=small.V, replayssm_d=None, replayssm_k=None, replayssm_g=None, replayssm_write_pos=None, replayssm_force_flush=None)
    want, after = small.expected_decode(rows, a, b, A_log, dt_bias, before, [2, 7])
    small.helpers.compare(dict(o=o), dict(o=want), torch.bfloat16)
    small.compare_pool(pool, before, after, torch.bfloat16)
    buffer = torch.zeros(2, 1, small.HV, small.V, small.K)
    table.target_verify(A_log=A_log, dt_bias=dt_bias, q=rows[0], k=rows[1], v=rows[2], a=a, b=b, ssm_states=pool, cache_indices=torch.tensor([2, 7]),
                        query_start_loc=torch.arange(3), intermediate_states_buffer=buffer, intermediate_state_indices=torch.arange(4), cache_steps=1,
                        retrieve_parent_token=None, stable_rows=False)
    assert buffer.any()


def test_a_second_registration_wraps_once(sglang):
    adapter.register()
    adapter.register()
    (hooks,) = sglang.hooks.HookRegistry._hooks.values()
    assert len(hooks) == 1 and sglang.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES.count("flash_qla") == 1


def test_opting_out(sglang, monkeypatch):
    monkeypatch.setenv("FLASH_QLA_SGLANG", "0")
    assert not ours(start(sglang).extend_kernel)
    assert "flash_qla" not in sglang.choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES


def test_the_choices_for_verification_are_a_copy():
    # Why no plugin can add to --linear-attn-verify-backend. Where this fails, the flag can name us: say so in the documentation.
    tree = ast.parse(releases.path_of("sglang", SRT + "arg_groups/fields/exec_.py").read_text())
    field = next(node for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "linear_attn_verify_backend")
    assert "choices=LINEAR_ATTN_KERNEL_BACKEND_CHOICES + ['nv_cutedsl']" in ast.unparse(field.annotation)


def test_what_stays_out_of_reach():
    # Multi-item scoring asks for Triton by name; a pool that is laid out page by page is copied around every prefill.
    text = releases.path_of("sglang", SRT + "layers/attention/linear/gdn_backend.py").read_text()
    assert "if not prefill_backend.is_triton():" in text and "requires_contiguous_prefill_state: bool = True" in text
