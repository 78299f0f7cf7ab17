"""`python -m flash_qla bench` without a GPU: rows, what is checked of them, and the files that they come into."""

import json
import re

import pytest
import torch

pytest.importorskip("typer")

from bench_helpers import PEER, bench, clock  # noqa: F401  (fixtures among them)

import flash_qla
from flash_qla.cli import bench_calls, bench_gpu, bench_inputs, bench_options, bench_protocol, bench_timing, results

pytestmark = pytest.mark.cpu_only

TENSORS = {
    "fwd": {"o", "final_state"}, "decode": {"o", "final_state"}, "bwd": {"dq", "dk", "dv", "dbeta", "dg", "dh0"},
    "train": {"o", "final_state", "dq", "dk", "dv", "dbeta", "dg", "dh0"}}  # fmt: skip


def test_every_mode_writes_checked_rows(bench, capsys):
    code, report, lines = bench(["fwd", "bwd", "train", "decode"])
    assert code == 0 and "left_out" not in report
    rows = report["rows"]
    assert [row["mode"] for row in rows] == ["fwd"] * 3 + ["bwd", "train"] + ["decode"] * 4
    assert len(lines) == len(rows) + 1
    for row in rows:
        assert set(row["err"]) == set(row["err_worst_head"]) == TENSORS[row["mode"]]
        assert all(0 <= row["err"][name] <= row["err_worst_head"][name] < 1.5e-2 for name in row["err"])
        assert all(row["err_median_head"][name] <= row["err_worst_head"][name] for name in row["err"])
        assert (row["ms"], row["ms_min"], row["ms_max"]) == (2.0, 1.8, 3.0) and "flushed_ms" not in row
        assert (row["eager_ms"], row["eager_host_us"], row["peak_bytes"]) == (2.25, 30.0, 3_000_000)
        assert row["peers"] == row["peer_peak_bytes"] == {}
        assert row.get("unsplit_ms") == (2.5 if row["mode"] == "fwd" else None)
    assert [tuple(row["options"].values()) for row in rows[-4:]] == [
        ("float32", "[V, K]"), ("float32", "[K, V]"), ("bfloat16", "[V, K]"), ("bfloat16", "[K, V]")]
    # One line for each row says how to repeat it.
    repeats = re.findall(r"repeat: python -m flash_qla bench --mode (\w+) --heads 1x2 --seqs (\S+)", capsys.readouterr().out)
    assert len(repeats) == len(rows) and set(repeats) == {
        ("fwd", "1x70"), ("fwd", "30+3"), ("fwd", "5x2"), ("bwd", "70_1seq"), ("train", "70_1seq"), ("decode", "batch2")}


def test_rows_of_options_check_what_each_option_stores(bench, monkeypatch, capsys):
    code, report, _ = bench(["options"])
    assert code == 0, capsys.readouterr().out
    stored = {row["options"]["option"]: set(row["err"]) - {"o", "final_state"} for row in report["rows"]}
    options = [option for *_, option in bench_inputs.OPTIONS]
    assert list(stored) == list(dict.fromkeys(options)) and len(report["rows"]) == len(options) == 10
    assert {option: names for option, names in stored.items() if names} == {
        "h": {"h"}, "checkpoints": {"checkpoints"}, "listed token": {"checkpoints"}}
    seen = []
    right = flash_qla.chunk_gated_delta_rule
    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", lambda q, *a, **x: seen.append((q, a, x)) or right(q, *a, **x))
    bench(["options"])
    ours = [(q.dtype, x["initial_state"].dtype) for q, _, x in seen if q.dtype != torch.float64]
    assert {(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)} < set(ours)
    changing = seen[-1][1][2]
    assert not changing[:, :35].any() and changing[:, 35:].any()


@pytest.mark.parametrize("option, stored", [("h", "h"), ("checkpoints", "checkpoints"), ("listed token", "checkpoints")])
def test_what_an_option_stores_is_held_to_the_oracle(option, stored, bench, monkeypatch, capsys):
    def call(given, x):
        made = right(given, x)
        if given["option"] != option or x["q"].dtype == torch.float64:
            return made
        return bench_options.Call("", lambda: {name: t * 1.1 if name == stored else t for name, t in made.run().items()})

    right = bench_calls.option_call
    monkeypatch.setattr(bench_calls, "option_call", call)
    assert bench(["options"])[0] == 1
    assert re.findall("FAIL .*", capsys.readouterr().out) == [
        line for line in [f"FAIL options 1/2 70: {stored}: relative L2 1.0e-01, bound 5.0e-03  repeat: "
                          "python -m flash_qla bench --mode options --heads 1x2 --seqs 1x70"]]


def test_a_file_says_how_and_of_which_commit_it_was_measured(bench, tmp_path, capsys):
    _, report, _ = bench(["fwd"], out="{machine}_{mode}.json")
    report = json.loads((tmp_path / "results" / "x900_forward.json").read_text())
    assert report["machine"] == "NVIDIA X900" and report["commit"] == flash_qla.build_info()["commit"]
    assert report["protocol"] == bench_protocol.protocol(report["method"])
    for words in ("L2 cache is not flushed", "card's clocks are not fixed", "behind 0.3 s", "3 replays", "fp64 oracle"):
        assert words in report["protocol"]
    assert f"commit: {report['commit']}\n" in capsys.readouterr().out


def test_each_row_of_a_file_has_a_line(bench, tmp_path):
    _, report, _ = bench(["fwd"])
    lines = (tmp_path / "results" / "gpu.json").read_text().splitlines()
    rows = [json.loads(line.rstrip(",")) for line in lines if line.startswith('  {"mode"')]
    assert rows == report["rows"] and len(lines) == len(rows) + len(report) + 3


def test_short_rows_are_timed_with_a_flushed_cache_too(bench, clock):
    clock.ms = [0.02, 0.03]
    _, report, _ = bench(["fwd", "decode"])
    assert {(row["flushed_ms"], row["flushed_ms_min"], row["flushed_ms_max"]) for row in report["rows"]} == {(0.2, 0.1, 0.4)}


def wrong_where(monkeypatch, broken):
    """_inference() whose o is a tenth off where broken(auto_cp, x, number of the call) says so; the oracle's is right."""
    right, calls = bench_calls._inference, []

    def wrong(x, auto_cp=True):
        found = right(x, auto_cp)
        if flash_qla._options.chosen_path() is None:
            calls.append(None)
            if broken(auto_cp, x, len(calls)):
                found["o"] = found["o"] * 1.1
        return found

    monkeypatch.setattr(bench_calls, "_inference", wrong)


def test_a_row_whose_check_fails_is_not_written(bench, monkeypatch, capsys):
    wrong_where(monkeypatch, lambda auto_cp, x, number: x["q"].shape[1] == 33)
    code, report, _ = bench(["fwd"])
    assert code == 1
    assert [row["seqlens"] for row in report["rows"]] == [[70], [5, 5]] and report["left_out"] == ["fwd 1/2 30+3"]
    assert re.search(r"FAIL fwd 1/2 30\+3: o: relative L2 .* repeat: python -m flash_qla bench", capsys.readouterr().out)


def test_what_is_not_split_is_checked_before_it_is_timed(bench, monkeypatch, capsys):
    wrong_where(monkeypatch, lambda auto_cp, x, number: not auto_cp)
    monkeypatch.setattr(bench_timing, "graphs_ms", None)  # nothing is timed
    assert bench(["fwd"])[:2] == (1, None)
    assert "FAIL fwd 1/2 70: auto_cp=False o: relative L2 1.0e-01" in capsys.readouterr().out


def test_what_the_timed_graph_has_left_is_checked(bench, monkeypatch, capsys):
    """Right before the times, wrong from the third call on."""
    wrong_where(monkeypatch, lambda auto_cp, x, number: auto_cp and number > 2)
    assert bench(["fwd"], seqs="1x70")[:2] == (1, None)
    assert "FAIL fwd 1/2 70: what the timed graph left: o: relative L2 1.0e-01" in capsys.readouterr().out


@pytest.mark.parametrize("mode", ["fwd", "bwd", "train", "decode"])
def test_a_row_whose_graph_cannot_be_checked_is_refused(mode, bench, clock, monkeypatch, capsys):
    def capture(function):
        single, graph = clock.capture(function)
        return single, bench_timing.Graph(graph.graph, graph.calls, {})

    monkeypatch.setattr(bench_timing, "capture", capture)
    assert bench([mode])[:2] == (1, None)
    assert re.search("what the timed graph left: .* must be checked \\(not there\\)", capsys.readouterr().out)


def test_a_decode_graph_is_held_to_as_many_steps_as_it_has(bench, monkeypatch, capsys):
    """A state that every step leaves wrong by little adds up, and one that is never written again is found."""
    right = flash_qla.gated_delta_rule_decode

    def once(q, k, v, g, beta, pool, *args, **options):
        before, o = pool.clone(), right(q, k, v, g, beta, pool, *args, **options)
        if flash_qla._options.chosen_path() is None:
            calls.append(None)
            if len(calls) > 2:
                pool.copy_(before)
        return o

    calls = []
    monkeypatch.setattr(flash_qla, "gated_delta_rule_decode", once)
    assert bench(["decode"])[0] == 1
    assert re.search("FAIL decode 1/2 batch 2: what the timed graph left: (o|final_state)", capsys.readouterr().out)


def test_a_decode_graph_leaves_the_bits_of_its_calls_one_by_one(bench, clock, monkeypatch, capsys):
    """A graph of three calls that makes two of them: its results are right for two steps, and found wrong."""

    def capture(function):
        single, _ = clock.capture(function)
        graph = type(single)(single.graph, clock.calls, single.results)
        graph.graph.replay = lambda once=single.graph.replay: (once(), once())
        return clock.capture(function)[0], graph

    monkeypatch.setattr(bench_timing, "capture", capture)
    assert bench(["decode"])[0] == 1
    assert "what the timed graph left: o, final_state must have the bits of 3 single calls" in capsys.readouterr().out


def test_a_training_step_goes_through_autograd_where_it_is_eager(bench, monkeypatch, capsys):
    right = bench_calls._autograd_step
    monkeypatch.setattr(bench_calls, "_autograd_step", lambda x: {**right(x), "dg": right(x)["dg"] * 1.1})
    assert bench(["train"])[:2] == (1, None)
    assert "FAIL train 1/2 70: eager dg: relative L2 1.0e-01" in capsys.readouterr().out


def test_a_row_that_raises_leaves_the_others(bench, clock, monkeypatch):
    calls = []

    def sometimes(graphs, replays):
        calls.append(None)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return clock.graphs_ms(graphs, replays)

    monkeypatch.setattr(bench_timing, "graphs_ms", sometimes)
    code, report, _ = bench(["fwd"])
    assert code == 1 and [row["seqlens"] for row in report["rows"]] == [[70], [5, 5]]


def test_a_run_that_is_cut_writes_what_it_has_and_says_so(bench, monkeypatch, capsys):
    right, now = bench_gpu._measure, [0.0]

    def measure(*args):
        now[0] += 10.0
        return right(*args)

    monkeypatch.setattr(bench_gpu, "_measure", measure)
    monkeypatch.setattr(bench_gpu.time, "monotonic", lambda: now[0])
    code, report, _ = bench(["fwd"], seconds=15.0)
    assert code == 0 and [row["seqlens"] for row in report["rows"]] == [[70], [30, 3]]
    assert report["left_out"] == ["fwd 1/2 5x2"]
    assert "cut after 15 s: 1 of 3 rows not measured" in capsys.readouterr().out


def test_what_a_tensor_of_zeros_is_off_by_is_no_relative_error(bench, monkeypatch):
    right = bench_gpu.make_inputs
    monkeypatch.setattr(bench_gpu, "make_inputs", lambda row: {**right(row), "dht": torch.zeros(1, 2, 128, 128), "do": right(row)["do"] * 0})
    _, report, _ = bench(["bwd"])
    row = report["rows"][0]
    assert set(row["err"].values()) == set(row["err_median_head"].values()) == set(row["err_worst_head"].values()) == {None}


def test_errors_alone_need_no_times(bench, monkeypatch):
    monkeypatch.setattr(bench_timing, "capture", None)
    code, report, lines = bench(["fwd", "bwd"], PEER, errors_only=True)
    assert code == 0 and len(lines) == 5 and not any("ms" in row for row in report["rows"])
    first = report["rows"][0]
    assert first["err_worst_head"]["o"] > 0 and first["peak_bytes"] == 3_000_000 and first["peers"] == {}
    assert first["peer_peak_bytes"] == {"fla 9.9": 7_000_000} and first["peer_err_worst_head"] == {"fla 9.9": {"final_state": 1.0}}
    assert "nothing was timed" in report["protocol"] and report["method"]["judged"] == {"fla": ""}


def test_rows_of_a_second_call_come_into_the_file(bench):
    _, first, _ = bench(["fwd"], seqs="1x70,30+3")
    _, cut, _ = bench(["fwd"], seqs="5x2", merge=True)
    assert [row["seqlens"] for row in cut["rows"]] == [[70], [30, 3], [5, 5]] and cut["protocol"] == first["protocol"]
    _, judged, _ = bench(["fwd"], PEER, errors_only=True, merge=True)
    assert [row["ms"] for row in judged["rows"]] == [2.0] * 3, "times stay where errors alone come in"
    assert judged["rows"][0]["peer_err_worst_head"] == {"fla 9.9": {"final_state": 1.0}}
    assert "errors and memory alone of fla" in judged["protocol"] and "3 replays" in judged["protocol"]
    assert judged["protocol"] == bench_protocol.protocol(judged["method"])


@pytest.mark.parametrize("what, value", [("commit", "0123456789ab"), ("machine", "NVIDIA X901")])
def test_rows_of_another_commit_or_machine_do_not(what, value, bench, tmp_path, capsys):
    bench(["fwd"], seqs="1x70")
    path = tmp_path / "results" / "gpu.json"
    report = {**json.loads(path.read_text()), what: value}
    path.write_text(results.file_text(report))
    code, unchanged, _ = bench(["fwd"], seqs="5x2", merge=True)
    assert code == 2 and unchanged == report
    assert f"must be of the same {what} ({value}, and now" in capsys.readouterr().out.replace("\n", " ")


def test_rows_of_another_method_do_not(bench, capsys):
    bench(["fwd"], seqs="1x70")
    code, report, _ = bench(["fwd"], seqs="5x2", merge=True, runs=5)
    assert code == 2 and len(report["rows"]) == 1
    assert "must be measured with the same replays (3, and now 5)" in capsys.readouterr().out.replace("\n", " ")


def test_rows_that_a_merged_run_has_measured_are_no_longer_missing():
    method = {"device": "cuda", "recorded": False}
    row = {"mode": "fwd", "hq": 1, "hv": 2, "seqlens": [70], "options": {}}
    old = {"method": method, "left_out": ["fwd 1/2 70", "fwd 1/2 5"], "rows": []}
    assert results.merge(old, {"method": method, "rows": [row]})["left_out"] == ["fwd 1/2 5"]


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

    def measure(*args):
        report = json.loads(out.read_text()) if out.exists() else {"rows": [], "left_out": [1, 2, 3]}
        seen.append((len(report["rows"]), len(report["left_out"])))
        return right(*args)

    monkeypatch.setattr(bench_gpu, "_measure", measure)
    bench(["fwd"])
    assert seen == [(0, 3), (1, 2), (2, 1)], "and says which rows it lacks"


def test_recorded_times_are_kept_apart(bench, tmp_path, capsys):
    recorded = tmp_path / "x900_recorded.csv"
    recorded.write_text("mode,hq,hv,seqs,other 1.0 ms,third 2.0 ms\nfwd,1,2,30+3,8.0,\nfwd,2,4,30+3,1.0,1.0\n")
    code, report, _ = bench(["fwd"], recorded=recorded)
    assert code == 0
    assert [row["recorded"] for row in report["rows"]] == [{}, {"other 1.0": 8.0}, {}]
    assert not any(row["peers"] for row in report["rows"])
    assert "4.00x of other 1.0, its times recorded earlier (geometric mean of 1 rows" in capsys.readouterr().out


def test_a_file_for_each_mode_and_short_rows_first(bench, monkeypatch, tmp_path):
    monkeypatch.setitem(bench_inputs.SHORT, "fwd", [((1, 2), "5x2")])
    measured, right = [], bench_gpu._measure
    monkeypatch.setattr(bench_gpu, "_measure", lambda given, *args: measured.append(given["name"]) or right(given, *args))
    assert bench(["fwd", "bwd"], out="gpu_{mode}.json")[0] == 0
    assert measured == ["5x2", "1x70", "30+3", "70_1seq"]
    forward, backward = (json.loads((tmp_path / "results" / f"gpu_{name}.json").read_text()) for name in ("forward", "backward"))
    assert [row["seqlens"] for row in forward["rows"]] == [[70], [30, 3], [5, 5]], "the table's order is not that of measuring"
    assert [row["mode"] for row in backward["rows"]] == ["bwd"]
    assert (tmp_path / "results" / "gpu_forward.csv").exists()


def test_rows_of_other_head_dimensions_name_their_path(bench, monkeypatch):
    monkeypatch.setattr(bench_inputs, "PORTABLE", [((1, 2), 16, 8)])
    monkeypatch.setattr(bench_inputs, "PORTABLE_LENGTHS", {"1x70": [70], "30x2": [30, 30]})
    monkeypatch.setattr(bench_inputs, "PORTABLE_PATH", "cpu")
    named = []
    right = flash_qla.use_path
    monkeypatch.setattr(flash_qla, "use_path", lambda name: named.append(name) or right(name))
    for mode in ("portable_forward", "portable_backward"):
        code, report, _ = bench([mode])
        assert code == 0 and [row["seqlens"] for row in report["rows"]] == [[70], [30, 30]]
        assert all(row["mode"] == mode and row["options"] == {"K": "16", "V": "8", "path": "cpu"} for row in report["rows"])
        assert all(row["roofline"] is None and max(row["err"].values()) < 1e-2 for row in report["rows"])
    assert {"cpu", "reference"} == set(named)


def test_rows_of_other_head_dimensions_are_those_of_the_tables():
    rows = bench_inputs.rows_of("portable_forward", "", "")
    assert len(rows) == 14 and {(row["hq"], row["hv"], row["K"], row["V"]) for row in rows} == {
        (16, 32, 128, 128), (8, 8, 64, 64), (8, 16, 64, 128), (8, 8, 96, 96), (30, 30, 96, 192), (8, 8, 128, 256), (8, 8, 256, 256)}
    assert [row["V"] for row in bench_inputs.rows_of("portable_backward", "8x16", "1x8192")] == [128]
    assert len(bench_inputs.rows_of("portable_forward", "", "", "short")) == 7


def test_short_rows_are_rows():
    for mode, pairs in bench_inputs.SHORT.items():
        rows = bench_inputs.rows_of(mode, "", "", "short")
        assert {((row["hq"], row["hv"]), row["name"]) for row in rows} == set(pairs) and len(set(pairs)) == len(pairs)
    assert bench_inputs.rows_of("fwd", "2x8", "", "short")[0]["hv"] == 8


def test_rows_for_peers_and_with_other_gates_are_rows():
    for mode, triples in bench_inputs.PEER_ROWS.items():
        rows = bench_inputs.rows_of(mode, "", "", "peers")
        assert {((row["hq"], row["hv"]), row["name"], row["gates"]) for row in rows} == set(triples)
    assert {row["gates"] for row in bench_inputs.rows_of("fwd", "2x8", "1x32768")} == {"mixed", "none", "strong"}
    assert [row["gates"] for row in bench_inputs.rows_of("fwd", "2x8", "1x32768", gates="none")] == ["none"]
    # A cut that is not worth it where nothing decays.
    assert {row["gates"] for row in bench_inputs.rows_of("fwd", "4x16", "1x4096")} == {"mixed", "none"}
    weakest = [("4x16", "1024+7168"), ("16x16", "1024+7168"), ("32x32", "8192x4"), ("16x16", "4096x8"), ("16x32", "8192x4")]
    assert all(bench_inputs.rows_of("fwd", heads, name, "peers") for heads, name in weakest)


def test_refuses_unknown_modes_and_machines_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for options, sentence in (
        (
            dict(modes=["fwd", "sideways"]),
            "--mode must be of fwd, bwd, train, decode, options, portable_forward, portable_backward, prefill, steps, verify,"
            " serving (sideways)",
        ),
        (dict(modes=["fwd"], gates="mixed,odd"), "--gates must be of mixed, none, strong, changing (odd)"),
        (dict(modes=["fwd", "steps"]), "--mode must have serving modes alone or none of them (fwd,steps)"),
        (dict(modes=["fwd"], merge=True), "--merge needs --out (no file was named)"),
        (dict(modes=["fwd"]), "a CUDA GPU must be present"),
    ):
        assert bench_gpu.run(bench_gpu.Options(**options)) == 2
        assert sentence in capsys.readouterr().out


def test_refuses_recorded_times_of_another_machine(bench, capsys, tmp_path):
    assert bench(["fwd"], recorded=tmp_path / "x901_recorded.csv")[:2] == (2, None)
    assert "bench: --recorded must be of this machine, x900_*.csv (x901_recorded.csv)" in capsys.readouterr().out


def test_refuses_rows_that_no_table_has(bench, capsys):
    assert bench(["fwd"], seqs="9999x9")[:2] == (2, None)
    assert "bench: --heads, --seqs and --gates must leave a row of the table (none is left)" in capsys.readouterr().out


@pytest.fixture
def bench_cpu(monkeypatch, tmp_path):
    """`bench --cpu` on a few tokens, beside a peer that computes nothing; returns (exit code, report)."""
    module = pytest.importorskip("flash_qla.cli.bench_cpu")
    monkeypatch.setattr(module, "TOKENS", 70)
    monkeypatch.setattr(module, "HEADS", 2)
    monkeypatch.setattr(module, "_transformers_function", lambda: ("peer 1.0", lambda *x: (sum(t.sum() for t in x) + x[2], None)))

    def run(runs=2):
        out = tmp_path / "cpu.json"
        code = module.run(runs, out)
        return code, json.loads(out.read_text()) if out.exists() else None

    return run


def test_rows_of_the_cpu_are_checked_and_have_their_spread(bench_cpu):
    code, report = bench_cpu()
    assert code == 0 and [row["mode"] for row in report["rows"]] == ["fwd", "train"]
    for row in report["rows"]:
        assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"] and max(row["err"].values()) < 1e-5
        assert row["peer_ms_min"]["peer 1.0"] <= row["peers"]["peer 1.0"] <= row["peer_ms_max"]["peer 1.0"]
    assert report["commit"] == flash_qla.build_info()["commit"]
    assert report["protocol"] == bench_protocol.protocol(report["method"]) and "2 runs" in report["protocol"]


def test_what_was_timed_last_on_the_cpu_is_checked(bench_cpu, monkeypatch, capsys):
    right, calls = flash_qla.chunk_gated_delta_rule, []

    def last_is_wrong(*inputs):
        o, final_state = right(*inputs)
        if flash_qla._options.chosen_path() is not None:
            return o, final_state
        calls.append(None)
        return (o * 1.1 if len(calls) == 4 else o), final_state  # behind one that is checked, one that warms up, one timed

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", last_is_wrong)
    code, report = bench_cpu()
    assert code == 1 and [row["mode"] for row in report["rows"]] == ["train"]
    assert "FAIL fwd: o: relative L2 1.0e-01" in capsys.readouterr().out
