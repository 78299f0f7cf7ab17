"""`python -m flash_qla bench` without a GPU: the CPU computes, a clock that stands still times, scripts play the peers."""

import functools
import json
import re
import sys
import types

import pytest
import torch

pytest.importorskip("typer")

import flash_qla
from flash_qla.cli import bench_gpu, bench_inputs, bench_peers, bench_processes, results

pytestmark = pytest.mark.cpu_only

# A peer that answers for its first two rows with a tensor that is off by a tenth, complains about the third, and writes
# other things too.
PEER = """
import json, sys, torch
rows = json.loads(sys.stdin.readline())
assert sys.argv[1] == "fla" and int(sys.argv[2]) == 3
print("Autotuning ...")
print(json.dumps({"ready": True}), flush=True)
assert sys.stdin.readline() == "go\\n"
for i, row in rows:
    answer = {"peer": "fla", "error": "RuntimeError: no such shape"}
    if i < 2:
        answer = {"ms": 5.0 + i, "peak_bytes": 7_000_000, "tensors": f"{sys.argv[3]}/{i}.pt"}
        state = torch.full((len(row["seqlens"]), row["hv"], 128, 128), float("nan") if i == 1 else 0.0)
        torch.save({"final_state": state}, answer["tensors"])
    print(json.dumps({"row": i, "peer": "fla 9.9", **answer}), flush=True)
"""
READY = "import json, sys, time\nrows = json.loads(sys.stdin.readline())\nprint(json.dumps({'ready': True}), flush=True)\nsys.stdin.readline()\n"
CRASH = "raise ModuleNotFoundError('fla is not here')"
SLOW = "import time\ntime.sleep(60)"
HANG = READY + """print(json.dumps({"row": 0, "peer": "fla 9.9", "ms": 4.0, "peak_bytes": 1}), flush=True)\ntime.sleep(60)"""
REFUSES = """import json, sys\nrows = json.loads(sys.stdin.readline())
print(json.dumps({"row": 1, "peer": "fla", "error": "ValueError: odd"}), flush=True)
print(json.dumps({"ready": True}), flush=True)\nsys.stdin.readline()"""


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Runs the command on rows of a few tokens; returns (exit code, report, CSV lines)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench_gpu, "_sm_count", lambda: 100)
    monkeypatch.setattr(bench_gpu, "ORACLES", {"cuda": "reference"})
    monkeypatch.setattr(bench_gpu, "make_inputs", functools.partial(bench_inputs.make_inputs, device="cpu"))
    monkeypatch.setattr(bench_inputs, "FORWARD_LENGTHS", {"1x70": [70], "30+3": [30, 3], "5x2": [5, 5]})
    monkeypatch.setattr(bench_inputs, "BACKWARD_LENGTHS", {"70_1seq": [70]})
    monkeypatch.setattr(bench_inputs, "DECODE_LENGTHS", {"batch2": [1, 1]})

    def graphs_ms(functions, replays, calls=5):
        for function in functions:
            function()
        return [2.0, 2.5][: len(functions)]

    monkeypatch.setattr(bench_gpu, "graphs_ms", graphs_ms)
    monkeypatch.setattr(bench_gpu, "peak_bytes", lambda function: 3_000_000)

    def run(modes, peer=None, heads="1x2", recorded=None, peer_seconds=20.0, gates=""):
        out = tmp_path / "results" / "gpu.json"
        if peer is not None:
            script = tmp_path / "peer.py"
            script.write_text(peer)
            monkeypatch.setattr(bench_processes, "_PEER_SCRIPT", script)
        peers = "" if peer is None else "fla=/nowhere"
        code = bench_gpu.run(modes, heads, "", "all", gates, peers, peer_seconds, recorded, 3, out)
        report = json.loads(out.read_text()) if out.exists() else None
        lines = out.with_suffix(".csv").read_text().splitlines() if out.exists() else []
        return code, report, lines

    return run


def test_every_mode_writes_checked_rows(bench, capsys):
    code, report, lines = bench(["fwd", "bwd", "train", "decode"])
    assert code == 0
    rows = report["rows"]
    assert [row["mode"] for row in rows] == ["fwd"] * 3 + ["bwd", "train"] + ["decode"] * 4
    assert len(lines) == len(rows) + 1
    tensors = {
        "fwd": {"o", "final_state"}, "decode": {"o", "final_state"}, "bwd": {"dq", "dk", "dv", "dbeta", "dg", "dh0"},
        "train": {"o", "final_state", "dq", "dk", "dv", "dbeta", "dg", "dh0"}}
    for row in rows:
        assert set(row["err"]) == set(row["err_worst_head"]) == tensors[row["mode"]]
        assert all(0 <= row["err"][name] <= row["err_worst_head"][name] < 1.5e-2 for name in row["err"])
        assert all(row["err_median_head"][name] <= row["err_worst_head"][name] for name in row["err"])
        assert row["ms"] == 2.0 and row["peak_bytes"] == 3_000_000 and row["peers"] == row["peer_peak_bytes"] == {}
        assert row.get("unsplit_ms") == (2.5 if row["mode"] == "fwd" else None)
    assert [tuple(row["options"].values()) for row in rows[-4:]] == [
        ("float32", "[V, K]"), ("float32", "[K, V]"), ("bfloat16", "[V, K]"), ("bfloat16", "[K, V]")]
    # One line for each row says how to repeat it.
    repeats = re.findall(r"repeat: python -m flash_qla bench --mode (\w+) --heads 1x2 --seqs (\S+)", capsys.readouterr().out)
    assert len(repeats) == len(rows) and set(repeats) == {
        ("fwd", "1x70"), ("fwd", "30+3"), ("fwd", "5x2"), ("bwd", "70_1seq"), ("train", "70_1seq"), ("decode", "batch2")}


def test_a_row_whose_check_fails_is_not_written(bench, monkeypatch, capsys):
    right = bench_gpu._inference

    def wrong(x, auto_cp=True):
        o, final_state = right(x)
        broken = flash_qla._options.chosen_path() is None and o.shape[1] == 33
        return (o * 1.1 if broken else o), final_state

    monkeypatch.setattr(bench_gpu, "_inference", wrong)
    code, report, _ = bench(["fwd"])
    assert code == 1
    assert [row["seqlens"] for row in report["rows"]] == [[70], [5, 5]]
    assert re.search(r"FAIL fwd 1/2 30\+3: o: relative L2 .* repeat: python -m flash_qla bench", capsys.readouterr().out)


def test_a_row_that_raises_leaves_the_others(bench, monkeypatch):
    right = bench_gpu.graphs_ms

    def sometimes(functions, replays):
        if len(results_so_far) == 1:
            results_so_far.append(None)
            raise RuntimeError("out of memory")
        results_so_far.append(None)
        return right(functions, replays)

    results_so_far = []
    monkeypatch.setattr(bench_gpu, "graphs_ms", sometimes)
    code, report, _ = bench(["fwd"])
    assert code == 1 and [row["seqlens"] for row in report["rows"]] == [[70], [5, 5]]


def test_peers_stand_beside_our_rows(bench, capsys):
    code, report, lines = bench(["fwd"], PEER)
    assert code == 0
    assert [row["peers"] for row in report["rows"]] == [{"fla 9.9": 5.0}, {"fla 9.9": 6.0}, {}]
    assert lines[0].endswith("fla 9.9 ms")
    assert [row["peer_peak_bytes"] for row in report["rows"]] == [{"fla 9.9": 7_000_000}, {"fla 9.9": 7_000_000}, {}]
    printed = capsys.readouterr().out
    assert "peer fla, fwd 1/2 5x2: RuntimeError: no such shape" in printed
    assert "fwd: 2.74x of fla 9.9 (geometric mean of 2 rows, least 2.50x)" in printed
    assert "fwd: 1.25x of the same calls without a sequence split (geometric mean of 3 rows, least 1.25x)" in printed


def test_peers_are_compared_with_the_same_oracle(bench):
    _, report, _ = bench(["fwd"], PEER)
    first, second, third = report["rows"]
    assert first["peer_err_median_head"] == first["peer_err_worst_head"] == {"fla 9.9": {"final_state": 1.0}}  # zeros
    assert second["peer_err_worst_head"] == {"fla 9.9": {"final_state": None}}  # NaN where the oracle has none
    assert third["peer_err_worst_head"] == {}


def test_a_process_of_a_peer_has_the_rows_of_one_head_count(bench, monkeypatch):
    groups = [*bench_processes._groups(["a=/x", "b"], bench_inputs.rows_of("fwd", "1x2,2x4", "1x70,5x2"))]  # the fixture's lengths
    assert [(item, [i for i, _ in rows]) for item, rows in groups] == [
        ("a=/x", [0, 1]), ("a=/x", [2, 3]), ("b", [0, 1]), ("b", [2, 3])]
    code, report, _ = bench(["fwd"], PEER, heads="1x2,2x4")
    assert code == 0 and [bool(row["peers"]) for row in report["rows"]] == [True, True, False, False, False, False]


def test_a_missing_peer_costs_nothing_but_its_column(bench, capsys):
    code, report, _ = bench(["fwd"], CRASH)
    assert code == 0 and len(report["rows"]) == 3 and not any(row["peers"] for row in report["rows"])
    assert "peer fla: ModuleNotFoundError: fla is not here" in capsys.readouterr().out


def test_a_peer_that_hangs_is_ended_and_keeps_its_answers(bench, monkeypatch, capsys):
    monkeypatch.setattr(bench_processes, "_SILENCE_S", 1.5)
    code, report, _ = bench(["fwd"], HANG)
    assert code == 0 and report["rows"][0]["peers"] == {"fla 9.9": 4.0}
    assert "peer fla: ended: it took too long" in capsys.readouterr().out


def test_a_peer_that_compiles_too_long_is_left_out(bench, capsys):
    code, report, _ = bench(["fwd"], SLOW, peer_seconds=1.0)
    assert code == 0 and not any(row["peers"] for row in report["rows"])
    assert "peer fla: took too long to compile" in capsys.readouterr().out


def test_peers_may_compile_ahead(bench, monkeypatch, tmp_path, capsys):
    script, out = tmp_path / "peer.py", tmp_path / "none.json"
    script.write_text(REFUSES)
    monkeypatch.setattr(bench_processes, "_PEER_SCRIPT", script)
    arguments = (["fwd"], "1x2,2x4", "", "all", "", "fla=/nowhere")
    assert bench_gpu.run(*arguments, 20.0, None, 3, out, compile_only=True) == 0 and not out.exists()
    assert "2 processes compiled for 6 rows" in capsys.readouterr().out
    script.write_text(SLOW)
    assert bench_gpu.run(*arguments, 1.0, None, 3, out, compile_only=True) == 1


def test_a_row_that_a_peer_cannot_run_says_why(bench, capsys):
    code, report, _ = bench(["fwd"], REFUSES)
    assert code == 0 and not any(row["peers"] for row in report["rows"])
    assert "peer fla, fwd 1/2 30+3: ValueError: odd" in capsys.readouterr().out


def test_gates_are_an_option(bench, capsys):
    _, report, _ = bench(["fwd"], gates="none,strong")
    assert [row["options"] for row in report["rows"]] == [{"gates": "none"}, {"gates": "strong"}] * 3
    assert "repeat: python -m flash_qla bench --mode fwd --heads 1x2 --seqs 30+3 --gates strong" in capsys.readouterr().out
    none, strong, mixed = (
        bench_inputs.make_inputs({**bench_inputs.rows_of("fwd", "2x8", "1x70", gates=kind)[0]}, device="cpu")["g"]
        for kind in ("none", "strong", "mixed"))
    assert none.abs().max() == 0 and strong.max() < 0 and strong.min() < -16
    assert (mixed.abs().amax((0, 1)) == 0).sum() == 2


def test_the_results_file_is_whole_after_each_row(bench, monkeypatch, tmp_path):
    out, seen = tmp_path / "results" / "gpu.json", []
    right = bench_gpu._measure

    def measure(given, replays):
        seen.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return right(given, replays)

    monkeypatch.setattr(bench_gpu, "_measure", measure)
    bench(["fwd"])
    assert seen == [0, 1, 2]


def test_recorded_times_are_kept_apart(bench, tmp_path, capsys):
    recorded = tmp_path / "recorded.csv"
    recorded.write_text("mode,hq,hv,seqs,other 1.0 ms,third 2.0 ms\nfwd,1,2,30+3,8.0,\nfwd,2,4,30+3,1.0,1.0\n")
    code, report, _ = bench(["fwd"], recorded=recorded)
    assert code == 0
    assert [row["recorded"] for row in report["rows"]] == [{}, {"other 1.0": 8.0}, {}]
    assert not any(row["peers"] for row in report["rows"])
    assert "4.00x of other 1.0, its times recorded earlier (geometric mean of 1 rows" in capsys.readouterr().out


def test_a_file_for_each_mode_and_short_rows_first(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(bench_inputs.SHORT, "fwd", [((1, 2), "5x2")])
    measured, right = [], bench_gpu._measure
    monkeypatch.setattr(bench_gpu, "_measure", lambda given, replays: measured.append(given["name"]) or right(given, replays))
    out = tmp_path / "gpu_{mode}.json"
    assert bench_gpu.run(["fwd", "bwd"], "1x2", "", "all", "", "", 1.0, None, 3, out) == 0
    assert measured == ["5x2", "1x70", "30+3", "70_1seq"]
    forward, backward = (json.loads((tmp_path / f"gpu_{name}.json").read_text()) for name in ("forward", "backward"))
    assert [row["seqlens"] for row in forward["rows"]] == [[70], [30, 3], [5, 5]], "the table's order is not that of measuring"
    assert [row["mode"] for row in backward["rows"]] == ["bwd"]
    assert (tmp_path / "gpu_forward.csv").exists()


def test_short_rows_are_rows():
    for mode, pairs in bench_inputs.SHORT.items():
        rows = bench_inputs.rows_of(mode, "", "", "short")
        assert {((row["hq"], row["hv"]), row["name"]) for row in rows} == set(pairs) and len(set(pairs)) == len(pairs)
    assert bench_inputs.rows_of("fwd", "2x8", "", "short")[0]["hv"] == 8


@pytest.fixture
def stand_ins(monkeypatch):
    """The packages' modules, as thin as they may be: our own functions behind their names, orders and layouts."""

    def add(name, **functions):
        module = types.ModuleType(name)
        vars(module).update(functions)
        for i, part in enumerate(parts := name.split(".")):
            monkeypatch.setitem(sys.modules, ".".join(parts[: i + 1]), module if i + 1 == len(parts) else types.ModuleType(part))

    def fla_forward(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
        g, A, o, _, state = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, scale, initial_state, cu_seqlens)
        return g, o, A, state, initial_state, None

    def fla_backward(q, k, v, g, beta, A, scale, initial_state, do, dht, cu_seqlens):
        return *flash_qla.chunk_gated_delta_rule_bwd(q, k, v, g, beta, A, do, dht, scale, initial_state, cu_seqlens), None, None

    def flashinfer(q, k, v, g, beta, scale, initial_state, cu_seqlens, output_final_state, use_cp):
        o, state = flash_qla.chunk_gated_delta_rule(
            q[None], k[None], v[None], g.log()[None], beta[None], scale, initial_state, output_final_state, cu_seqlens=cu_seqlens,
            state_v_first=True)
        return o[0], state

    def decode(q, k, v, state, A_log, a, dt_bias, b, scale, output, use_qk_l2norm, v_first=False, slots=None):
        gates = dict(A_log=A_log, dt_bias=dt_bias, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
        slots = torch.arange(len(state)) if slots is None else slots
        return flash_qla.gated_delta_rule_decode(q, k, v, a, b, state, slots, scale=scale, state_v_first=v_first, **gates), state

    def decode_pool(q, k, v, state, initial_state, initial_state_indices, **rest):
        return decode(q, k, v, initial_state, **rest, v_first=True, slots=initial_state_indices)

    add("fla.ops.gated_delta_rule", fused_recurrent_gated_delta_rule=flash_qla.fused_recurrent_gated_delta_rule)
    add("fla.ops.gated_delta_rule.chunk", chunk_gated_delta_rule_fwd=fla_forward, chunk_gated_delta_rule_bwd=fla_backward)
    sys.modules["fla.ops.gated_delta_rule"].fused_recurrent_gated_delta_rule = flash_qla.fused_recurrent_gated_delta_rule
    add("flashinfer.gdn_prefill", chunk_gated_delta_rule=flashinfer)
    add("flashinfer.gdn_decode", gated_delta_rule_decode=decode, gated_delta_rule_decode_pretranspose=decode_pool)
    monkeypatch.setattr(bench_peers.importlib.metadata, "version", lambda package: "1.0")


@pytest.mark.parametrize("mode", ["fwd", "bwd", "train", "decode"])
@pytest.mark.parametrize("package", ["fla", "flashqla", "flashinfer"])
def test_tensors_of_peers_are_named_and_laid_out_as_ours(package, mode, bench, stand_ins):
    rows = bench_inputs.rows_of(mode, "1x2", "")
    for row in rows if mode == "decode" else rows[:1]:  # decode: every dtype and layout of the states
        x = bench_inputs.make_inputs(row, device="cpu")
        exact = bench_gpu._exact(row, x)
        peers = [*bench_peers.PEERS[package](row, x)]
        takes_states = row["state_v_first"] or row["state_dtype"] == "float32"
        counts = {"fla": 1, "flashqla": mode != "decode", "flashinfer": {"fwd": 2, "decode": int(takes_states)}.get(mode, 0)}
        assert len(peers) == counts[package]
        for peer in peers:
            peer.run()  # what a run leaves behind must not be what is compared
            of_heads = bench_gpu._of_heads(peer.tensors(peer.run()), exact)["worst"]
            assert set(of_heads) == set(exact) and all(error < 1.5e-2 for error in of_heads.values())


def test_rows_for_peers_and_with_other_gates_are_rows():
    for mode, triples in bench_inputs.PEER_ROWS.items():
        rows = bench_inputs.rows_of(mode, "", "", "peers")
        assert {((row["hq"], row["hv"]), row["name"], row["gates"]) for row in rows} == set(triples)
    assert {row["gates"] for row in bench_inputs.rows_of("fwd", "2x8", "1x32768")} == {"mixed", "none", "strong"}
    assert [row["gates"] for row in bench_inputs.rows_of("fwd", "2x8", "1x32768", gates="none")] == ["none"]


def test_refuses_unknown_modes_and_machines_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    arguments = ("", "", "all", "", "", 1.0, None, 1, None)
    assert bench_gpu.run(["fwd", "sideways"], *arguments) == 2
    assert "--mode must be of fwd, bwd, train, decode (sideways)" in capsys.readouterr().out
    assert bench_gpu.run(["fwd"], *arguments) == 2
    assert "a CUDA GPU must be present" in capsys.readouterr().out


def test_report_of_a_copied_tree_names_its_commit(monkeypatch, tmp_path):
    module = tmp_path / "python" / "flash_qla" / "cli" / "results.py"
    monkeypatch.setattr(results, "__file__", str(module))
    (tmp_path / "COMMIT").write_text("0123abc\n")
    assert results.make_report("p", [], cuda=False)["commit"] == "0123abc"
