"""The bench's serving modes, and the engines' operations beside them, without a GPU and without the engines."""

import json
import re
import sys
import types

import pytest
import torch

import flash_qla
from flash_qla.cli import bench_engines, bench_gpu, bench_inputs, bench_peers, bench_serving, bench_serving_inputs

from bench_helpers import bench, clock  # noqa: F401  (fixtures)

pytestmark = pytest.mark.cpu_only

LENGTHS = {"prefill": {"mixed": [70, 3]}, "steps": {"batch3": [1, 1, 1]}, "verify": {"8x2": [8, 8]}}
TENSORS = {"prefill": {"o", "final_state"}, "steps": {"o", "final_state"}, "verify": {"o", "h"}}


@pytest.fixture
def serving(bench, clock, monkeypatch):  # noqa: F811
    """bench() on rows of a few tokens."""
    for mode, lengths in LENGTHS.items():
        monkeypatch.setitem(bench_serving_inputs.SERVING_LENGTHS, mode, lengths)
    monkeypatch.setattr(bench_serving_inputs, "TREES", ("8x2",))
    clock.ms = [2.0, 2.5, 3.0]
    return bench


def test_rows_are_checked_and_have_one_file(serving, capsys, tmp_path):
    assert serving(["serving"], out="{machine}_{mode}.json")[0] == 0, capsys.readouterr().out
    report = json.loads((tmp_path / "results" / "x900_serving.json").read_text())
    rows = report["rows"]
    assert [(row["mode"], *row["options"].values()) for row in rows] == [
        ("prefill", "float32"), ("prefill", "bfloat16"), ("steps", "float32"), ("steps", "bfloat16"),
        ("verify", "float32"), ("verify", "bfloat16"), ("verify", "float32", "tree"), ("verify", "bfloat16", "tree")]
    for row in rows:
        assert set(row["err"]) == TENSORS[row["mode"]]
        assert all(0 <= row["err"][name] <= row["err_worst_head"][name] < 5e-3 for name in row["err"])
        split = (2.5, 3.0) if row["mode"] == "prefill" else (None, None)
        assert (row["ms"], row.get("unsplit_ms"), row.get("invariant_ms")) == (2.0, *split)
    assert "raw gates in bfloat16; norms, gates and sigmoid in the kernel" in report["protocol"]
    printed = capsys.readouterr().out
    repeats = re.findall(r"repeat: python -m flash_qla bench --mode (\w+) --heads 1x2 --seqs (\S+)\n", printed)
    assert len(repeats) == len(rows) and set(repeats) == {("prefill", "mixed"), ("steps", "batch3"), ("verify", "8x2")}
    assert "prefill: 1.25x of the same calls without a sequence split" in printed
    assert "prefill: 1.50x of the same calls with one that all batches have alike" in printed
    assert "steps 1/2 batch 3 state_dtype bfloat16: 2.0000 ms" in printed


@pytest.mark.parametrize("mode, name", [("prefill", "gated_delta_rule_prefill"), ("steps", "gated_delta_rule_decode"), ("verify", "gated_delta_rule_verify")])
def test_what_is_wrong_is_not_written(serving, monkeypatch, capsys, mode, name):
    right = getattr(flash_qla, name)
    monkeypatch.setattr(flash_qla, name, lambda **x: right(**x) * (1.0 if x["q"].dtype == torch.float64 else 1.02))
    code, report, _ = serving([mode])
    assert code == 1 and report is None and f"FAIL {mode} 1/2" in capsys.readouterr().out


def test_auto_cp_of_each_call(monkeypatch):
    seen = []
    monkeypatch.setattr(flash_qla, "gated_delta_rule_prefill", lambda **x: seen.append(x["auto_cp"]))
    row = {**bench_inputs.rows_of("prefill", "1x2", "128x64")[0], "seqlens": [5]}
    for call in bench_serving.serving_calls(row, bench_inputs.make_inputs(row, device="cpu")):
        call.run()
    assert seen == [True, False, "invariant"]


def test_tables():
    rows = {mode: bench_inputs.rows_of(mode, "", "") for mode in bench_serving_inputs.SERVING_LENGTHS}
    assert sum(bench_serving_inputs.SERVING_LENGTHS["prefill"]["mixed8k"]) == 8192
    assert {len(row["seqlens"]) for row in rows["steps"]} == {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert {row["seqlens"][0] for row in rows["verify"]} == {4, 6, 8}
    assert {row["option"] for row in rows["verify"] if row["name"] in bench_serving_inputs.TREES} == {"", "tree"}
    assert all({row["state_dtype"] for row in of_mode} == {"float32", "bfloat16"} for of_mode in rows.values())
    for mode, of_mode in rows.items():
        short = bench_inputs.rows_of(mode, "", "", "short")
        assert short and all(row in of_mode and row["short"] for row in short)
        assert {row["name"] for row in short} == set(bench_serving_inputs.SERVING_SHORT[mode])
    assert bench_inputs.rows_of("steps", "4x8", "batch16") == [row for row in rows["steps"] if row["hq"] == 4 and row["name"] == "batch16"]
    assert bench_inputs.rows_of("steps", "", "", gates="strong") == [] == bench_inputs.rows_of("steps", "", "", "peers")
    assert bench_serving_inputs.PARENTS[0] == -1 and all(parent < i for i, parent in enumerate(bench_serving_inputs.PARENTS))


def test_inputs_are_parts_of_one_tensor():
    row = {**bench_inputs.rows_of("verify", "2x4", "8x16")[2], "seqlens": [8, 8]}
    x = bench_inputs.make_inputs(row, device="cpu")
    assert row["option"] == "tree" and x["parents"].tolist() == [list(bench_serving_inputs.PARENTS)] * 2
    pointers = {x[name].untyped_storage().data_ptr() for name in ("mixed", "q", "k", "v")}
    assert len(pointers) == 1 and x["q"].shape == (2, 8, 2, 128) and x["v"].shape == (2, 8, 4, 128)
    assert sorted(x["slots"].tolist()) == [1, 2] and len(x["h0"]) == 3


def test_the_smallest_traffic():
    row = {**bench_inputs.rows_of("steps", "1x2", "batch1")[1], "seqlens": [1, 1]}
    state, token = 128 * 128 * 2 * 2, 2 * 256 * 1 + 2 * 256 * 2 + 4 * 2
    assert row["state_dtype"] == "bfloat16"
    assert bench_serving.serving_work(row, 1.0)[0] == 2 * token + 4 * state
    assert bench_serving.serving_work({**row, "mode": "verify", "seqlens": [3, 3]}, 1.0)[0] == 6 * token + state * (2 + 6)


# --- the engines ---

def in_kernel(A_log, dt_bias):
    return dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True)


def packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel):
    assert use_qk_l2norm_in_kernel
    q, k, v = (x.unflatten(1, (1, -1, 128)) for x in mixed_qkv.split([128, 128, 256], 1))
    flash_qla.gated_delta_rule_decode(q, k, v, a[:, None], b[:, None], initial_state, ssm_state_indices, scale=scale, out=out, **in_kernel(A_log, dt_bias))
    return out, initial_state


def post_conv(conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, apply_l2norm, output_g_exp):
    assert apply_l2norm and not output_g_exp and (num_k_heads, head_k_dim, head_v_dim) == (1, 128, 128)
    q, k, v = (x.unflatten(1, (-1, 128)) for x in conv_output.split([128, 128, 256], 1))
    q, k = (torch.nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    return q, k, v, -A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.float().sigmoid()


@pytest.fixture
def engines(monkeypatch):
    """Our own functions behind the names, orders and layouts of the engines'."""

    def vllm_chunk(q, k, v, g, beta, initial_state, output_final_state, cu_seqlens, chunk_indices, chunk_offsets, use_qk_l2norm_in_kernel):
        assert (chunk_indices, chunk_offsets) == ("indices", "offsets") and not use_qk_l2norm_in_kernel
        return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=output_final_state,
                                                cu_seqlens=cu_seqlens, state_v_first=True)

    def vllm_spec(A_log, a, b, dt_bias, q, k, v, initial_state, inplace_final_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, use_qk_l2norm_in_kernel):
        count, tokens = ssm_state_indices.shape
        q, k, v = (x[0].unflatten(0, (count, tokens)) for x in (q, k, v))
        a, b = (x.unflatten(0, (count, tokens)) for x in (a, b))
        o = flash_qla.gated_delta_rule_decode(q, k, v, a, b, initial_state, ssm_state_indices, num_accepted_tokens=num_accepted_tokens, null_index=0,
                                              **in_kernel(A_log, dt_bias))
        return o.flatten(0, 1)[None], None

    vllm = types.SimpleNamespace(
        index=types.SimpleNamespace(prepare_chunk_indices=lambda offsets, size: "indices", prepare_chunk_offsets=lambda offsets, size: "offsets"),
        fused_gdn_prefill_post_conv=types.SimpleNamespace(fused_post_conv_prep=post_conv),
        chunk=types.SimpleNamespace(chunk_gated_delta_rule=vllm_chunk),
        fused_recurrent=types.SimpleNamespace(fused_recurrent_gated_delta_rule_packed_decode=packed_decode),
        fused_sigmoid_gating=types.SimpleNamespace(fused_sigmoid_gating_delta_rule_update=vllm_spec))

    def sglang_chunk(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens, head_first, use_qk_l2norm_in_kernel, inplace_update):
        assert inplace_update and not head_first
        o = flash_qla.gated_delta_rule_prefill(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens=cu_seqlens,
                                               use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)
        return o, None, None

    def sglang_verify(A_log, a, dt_bias, softplus_beta, softplus_threshold, q, k, v, b, initial_state_source, initial_state_indices, cu_seqlens,
                      use_qk_l2norm_in_kernel, disable_state_update, intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token):
        assert disable_state_update and (softplus_beta, softplus_threshold) == (1.0, 20.0)
        shape = (len(initial_state_indices), cache_steps)
        q, k, v = (x[0].unflatten(0, shape) for x in (q, k, v))
        a, b = (x.unflatten(0, shape) for x in (a, b))
        o = flash_qla.gated_delta_rule_verify(q, k, v, a, b, initial_state_source, initial_state_indices, parents=retrieve_parent_token,
                                              states_out=intermediate_states_buffer, states_out_indices=intermediate_state_indices, **in_kernel(A_log, dt_bias))
        return o.flatten(0, 1)[None]

    def gating(A_log, a, b, dt_bias):
        return (-A_log.exp() * torch.nn.functional.softplus(a.float() + dt_bias))[None], b.float().sigmoid()[None]

    sglang = types.SimpleNamespace(
        gating=types.SimpleNamespace(fused_gdn_gating=gating), chunk=types.SimpleNamespace(chunk_gated_delta_rule=sglang_chunk),
        fused_recurrent=types.SimpleNamespace(fused_recurrent_gated_delta_rule_packed_decode=packed_decode),
        fused_sigmoid=types.SimpleNamespace(fused_sigmoid_gating_delta_rule_update=sglang_verify))

    def flashinfer(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, initial_state, initial_state_indices):
        assert state is None and use_qk_l2norm
        return flash_qla.gated_delta_rule_decode(q, k, v, a, b, initial_state, initial_state_indices, scale=scale, out=output, **in_kernel(A_log, dt_bias)), None

    monkeypatch.setattr(bench_engines, "_vllm_operations", lambda: vllm)
    monkeypatch.setattr(bench_engines, "_sglang_operations", lambda: sglang)
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    module = types.ModuleType("flashinfer.gdn_decode")
    module.gated_delta_rule_decode_pretranspose = flashinfer
    monkeypatch.setitem(sys.modules, "flashinfer.gdn_decode", module)
    monkeypatch.setattr(bench_engines.importlib.metadata, "version", lambda package: "1.0")


@pytest.mark.parametrize("mode", LENGTHS)
@pytest.mark.parametrize("package", ["vllm", "sglang", "flashinfer", "fla", "flashqla"])
def test_tensors_of_engines_are_named_and_laid_out_as_ours(package, mode, serving, engines):
    for row in bench_inputs.rows_of(mode, "1x2", ""):
        x = bench_inputs.make_inputs(row, device="cpu")
        peers = [*bench_peers.ways(package, row, x)]
        runs = {"vllm": row["option"] == "", "sglang": True, "flashinfer": mode == "steps"}.get(package, False)
        assert [peer.name for peer in peers] == ([f"{package} 1.0"] if runs else [])
        judge = bench_gpu._Judge(row, x)
        for peer in peers:
            before = x["h0"].clone()
            peer.run()  # what a run leaves behind must not be what is compared
            of_heads = judge.heads(peer.tensors(peer.run()))["worst"]
            assert set(of_heads) == set(judge.tensors) and all(error < 5e-3 for error in of_heads.values())
            assert torch.equal(x["h0"], before), "the row's states are ours too"


def test_engines_have_no_rows_of_other_modes(bench):  # noqa: F811
    row = bench_inputs.rows_of("fwd", "1x2", "")[0]
    assert not [*bench_peers.ways("vllm", row, {})] and not [*bench_peers.ways("sglang", row, {})]


def test_hollow_packages(tmp_path, monkeypatch):
    """A module of a package is run without the package's own file."""
    (tmp_path / "engine" / "part").mkdir(parents=True)
    (tmp_path / "engine" / "__init__.py").write_text("raise AssertionError('all of the engine')")
    (tmp_path / "engine" / "part" / "__init__.py").write_text("raise AssertionError('all of the part')")
    (tmp_path / "engine" / "part" / "wanted.py").write_text("from engine.other import answer\nfrom .near import more\n")
    (tmp_path / "engine" / "part" / "near.py").write_text("more = 1\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    try:
        bench_engines._hollow_all("engine", ("part",))
        bench_engines._stand_in("engine.other", answer=42)
        wanted = __import__("importlib").import_module("engine.part.wanted")
        assert (wanted.answer, wanted.more) == (42, 1)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "engine"]:
            del sys.modules[name]
    with pytest.raises(ModuleNotFoundError, match="no_such_engine"):
        bench_engines._folder("no_such_engine")
