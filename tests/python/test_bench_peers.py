"""Other packages beside ours in `python -m flash_qla bench`, without a GPU: scripts and our own functions play them."""

import functools
import io
import json
import sys
import types

import pytest
import torch

pytest.importorskip("typer")

from bench_helpers import PEER, bench, clock  # noqa: F401  (fixtures among them)

import flash_qla
from flash_qla.cli import bench_gpu, bench_inputs, bench_peers, bench_processes, bench_protocol

pytestmark = pytest.mark.cpu_only

READY = "import json, sys, time\nrows = json.loads(sys.stdin.readline())\nprint(json.dumps({'ready': True}), flush=True)\nsys.stdin.readline()\n"
CRASH = "raise ModuleNotFoundError('fla is not here')"
SLOW = "import time\ntime.sleep(60)"
HANG = READY + """print(json.dumps({"row": 0, "peer": "fla 9.9", "ms": [4.0], "peak_bytes": 1}), flush=True)\ntime.sleep(60)"""
DIES = READY + "sys.exit('the device is gone')"
REFUSES = """import json, sys\nrows = json.loads(sys.stdin.readline())
print(json.dumps({"row": 1, "peer": "fla", "error": "ValueError: odd"}), flush=True)
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    i = json.loads(line)["row"]
    assert i != 1
    print(json.dumps({"row": i, "done": True}), flush=True)"""


def test_peers_take_turns_with_ours_and_stand_beside_them(bench, capsys):
    code, report, lines = bench(["fwd"], PEER)
    assert code == 0
    rows = report["rows"]
    # In three turns the peer takes 5, 6 and 7 ms for the first row.
    assert [row["peers"] for row in rows] == [{"fla 9.9": 6.0}, {"fla 9.9": 7.0}, {}]
    assert rows[0]["peer_ms_min"] == {"fla 9.9": 5.0} and rows[0]["peer_ms_max"] == {"fla 9.9": 7.0}
    assert lines[0].endswith("fla 9.9 ms")
    assert [row["peer_peak_bytes"] for row in rows] == [{"fla 9.9": 7_000_000}, {"fla 9.9": 7_000_000}, {}]
    assert report["method"]["turns"] == 3 and "in 3 turns with ours row by row" in report["protocol"]
    printed = capsys.readouterr().out
    assert printed.count("peer fla, fwd 1/2 5x2: RuntimeError: no such shape") == 1
    assert "fwd: 3.24x of fla 9.9 (geometric mean of 2 rows, least 3.00x)" in printed
    assert "fwd: 1.25x of the same calls without a sequence split (geometric mean of 3 rows, least 1.25x)" in printed


def test_what_is_special_about_a_package_stands_in_the_protocol(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "b" / bench_processes.NOTE).write_text("compiled ahead\n")
    packages = bench_processes.notes([f"fla={tmp_path / 'a'}:{tmp_path / 'b'}", "flashinfer"])
    assert packages == {"fla": "compiled ahead", "flashinfer": ""}
    sentence = bench_protocol.protocol({"device": "cuda", "judged": packages})
    assert "(fla: compiled ahead)" in sentence and "FLA_FLASH_QLA=0" in sentence


def test_peers_are_compared_with_the_same_oracle(bench):
    _, report, _ = bench(["fwd"], PEER)
    first, second, third = report["rows"]
    assert first["peer_err_median_head"] == first["peer_err_worst_head"] == {"fla 9.9": {"final_state": 1.0}}  # zeros
    assert second["peer_err_worst_head"] == {"fla 9.9": {"final_state": None}}  # NaN where the oracle has none
    assert third["peer_err_worst_head"] == {}


def test_a_process_of_a_peer_has_the_rows_that_need_the_same_kernels(bench, monkeypatch):
    groups = [*bench_processes._groups(["a=/x", "b"], bench_inputs.rows_of("fwd", "1x2,2x4", "1x70,5x2"))]  # the fixture's lengths
    assert [(item, [i for i, _ in rows]) for item, rows in groups] == [
        ("a=/x", [0, 1]), ("a=/x", [2, 3]), ("b", [0, 1]), ("b", [2, 3])]
    portable = [row for mode in ("portable_forward", "portable_backward") for row in bench_inputs.rows_of(mode, "8x8", "")]
    assert [{(row["mode"], row["K"], row["V"]) for _, row in rows} for _, rows in bench_processes._groups(["a"], portable)] == [
        {(mode, K, V)} for mode in ("portable_forward", "portable_backward") for K, V in [(64, 64), (96, 96), (128, 256), (256, 256)]]
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
    assert capsys.readouterr().out.count("peer fla: ended: it took too long") == 1, "it is asked for no other row"


def test_a_peer_that_ends_in_its_turn_says_why(bench, capsys):
    code, report, _ = bench(["fwd"], DIES)
    assert code == 0 and len(report["rows"]) == 3
    assert capsys.readouterr().out.count("peer fla: the device is gone") == 1


def test_a_peer_that_compiles_too_long_is_left_out(bench, capsys):
    code, report, _ = bench(["fwd"], SLOW, peer_seconds=1.0)
    assert code == 0 and not any(row["peers"] for row in report["rows"])
    assert "peer fla: took too long to compile" in capsys.readouterr().out


def test_peers_may_compile_ahead(bench, capsys):
    assert bench(["fwd"], REFUSES, heads="1x2,2x4", compile_only=True)[:2] == (0, None)
    assert "2 processes compiled for 6 rows" in capsys.readouterr().out
    assert bench(["fwd"], SLOW, heads="1x2,2x4", compile_only=True, peer_seconds=1.0)[0] == 1


def test_a_row_that_a_peer_cannot_run_says_why(bench, capsys):
    code, report, _ = bench(["fwd"], REFUSES)
    assert code == 0 and not any(row["peers"] for row in report["rows"])
    assert "peer fla, fwd 1/2 30+3: ValueError: odd" in capsys.readouterr().out


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
        judge = bench_gpu._Judge(row, x)
        peers = [*bench_peers.PEERS[package](row, x)]
        takes_states = row["state_v_first"] or row["state_dtype"] == "float32"
        counts = {"fla": 1, "flashqla": mode != "decode", "flashinfer": {"fwd": 2, "decode": int(takes_states)}.get(mode, 0)}
        assert len(peers) == counts[package]
        for peer in peers:
            peer.run()  # what a run leaves behind must not be what is compared
            of_heads = judge.heads(peer.tensors(peer.run()))["worst"]
            assert set(of_heads) == set(judge.tensors) and all(error < 1.5e-2 for error in of_heads.values())


def test_a_process_of_a_peer_answers_in_turns(monkeypatch, tmp_path, capsys, clock):
    """bench_peers.py itself, with a package that returns what it is given and cannot run the second row."""

    def package(row, x):
        if row["name"] == "30+3":
            raise RuntimeError("no such shape")
        for name in ("a 1", "b 1"):
            yield bench_peers.Peer(name, lambda: {"o": x["v"]}, lambda results: results)

    monkeypatch.setitem(bench_peers.PEERS, "fla", package)
    monkeypatch.setattr(bench_peers, "make_inputs", functools.partial(bench_inputs.make_inputs, device="cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sys, "argv", ["bench_peers.py", "fla", "3", str(tmp_path)])
    rows = [{**bench_inputs.rows_of("fwd", "1x2", "1x2048", gates="mixed")[0], "name": n, "seqlens": [5]} for n in ("5", "30+3")]
    turns = [{"row": 0, "turn": turn, "last": turn == 1} for turn in range(2)]
    lines = [[*enumerate(rows)], *turns, {"row": 1, "turn": 0, "last": True}]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(json.dumps(line) + "\n" for line in lines)))
    bench_peers.main()
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    refused = {"row": 1, "peer": "fla", "error": "RuntimeError: no such shape"}
    assert said[:2] == [refused, {"ready": True}] and said[-2:] == [refused, {"row": 1, "done": True}]
    first, second, ended, *last = said[2:-2]
    assert [(a["peer"], a["ms"], a["peak_bytes"]) for a in (first, second)] == [
        ("a 1", [2.0, 1.8, 3.0], 3_000_000), ("b 1", [2.5, 2.25, 3.75], 3_000_000)]
    assert "tensors" not in first and ended == {"row": 0, "done": True} == last[-1]
    assert all("peak_bytes" not in a and torch.load(a["tensors"])["o"].shape == (1, 5, 2, 128) for a in last[:-1])
