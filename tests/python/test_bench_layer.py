"""`bench --mode layer`, on the CPU at small sizes: what it records, what it refuses, and what becomes of the other rows
where one fails, ends its process or hangs."""

import dataclasses
import json
import subprocess
import sys
import time
import types

import helpers
import pytest
import torch

import flash_qla
from flash_qla.cli import bench_layer, bench_layer_fla, bench_layer_measure, bench_layer_rows, bench_protocol, bench_timing, results

pytestmark = pytest.mark.cpu_only

TINY = dataclasses.replace(bench_layer.SMALL, tokens=70, hidden=128, prompt=5, decoded=2, batches=(1, 64))
TENSORS = {
    "conv_forward": {"y", "g", "beta"}, "conv_backward": {"dx", "dweight"}, "norm_forward": {"y"},
    "norm_backward": {"dx", "dz", "dweight"}, "decode_1_us": {"y", "conv_state", "state"}, "decode_64_us": {"y", "conv_state", "state"},
    "eager_step_host_us": {"o", "dq", "dk", "dv", "dg", "dbeta"}, "layer_forward": {"o"}, "layer_training": {"o", "gradients"},
    "model_prefill": {"logits"}, "model_training": {"gradients"}, "model_decode": {"logits"},
}  # fmt: skip
OPERATIONS = ["conv_forward", "conv_backward", "norm_forward", "norm_backward", "decode_1_us", "eager_step_host_us"]


@pytest.fixture(autouse=True)
def one_thread():
    """So little work that a team of threads mostly waits for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(tmp_path, **options):
    given = dict(cpu=True, runs=2, sizes=TINY, out=tmp_path / "{machine}_{mode}.json", seconds=300.0)
    return bench_layer.run(bench_layer.Options(**{**given, **options}))


def report_of(tmp_path):
    file, = tmp_path.glob("*_layer.json")
    report = json.loads(file.read_text())
    assert file.read_text() == results.file_text(report)
    return report


def test_what_is_recorded(tmp_path, capsys):
    pytest.importorskip("transformers.models.qwen3_5")
    assert run(tmp_path) == 0, capsys.readouterr().out
    report = report_of(tmp_path)
    assert [row["name"] for row in report["rows"]] == bench_layer_rows.names(TINY) == list(TENSORS)
    assert report["protocol"] == bench_protocol.protocol(report["method"]) and "70 tokens" in report["protocol"]
    assert "failures" not in report and "left_out" not in report
    for row in report["rows"]:
        name = row["name"]
        assert 0 < row["value_min"] <= row["value"] <= row["value_max"] or name == "eager_step_host_us"
        assert row["unit"] == ("us" if name.endswith("_us") else "ms a token" if name == "model_decode" else "ms")
        assert set(row["err"]) == TENSORS[name]
        assert (row.get("missing") == {"fla": "not asked for (--peers fla)"}) == (not name.startswith("model_"))
        if name.startswith(("layer_", "model_")):
            assert row["peers"]["transformers"] > 0
            for tensor, error in row["err"].items():
                assert 1e-4 < error <= 1.1 * row["peer_err"]["transformers"][tensor] < 5e-2
        else:
            assert row["peers"] == {} and all(0 <= error < 8e-3 for error in row["err"].values())
            assert max(row["err"].values()) > 1e-4, "the exact result is another computation, in float64"


def test_rows_of_a_second_run_come_into_the_file(tmp_path):
    assert run(tmp_path, only=["norm_backward", "norm_forward"]) == 0
    first = report_of(tmp_path)["rows"]
    assert run(tmp_path, only=["conv_forward", "norm_forward"], merge=True) == 0
    second = report_of(tmp_path)["rows"]
    assert [row["name"] for row in second] == ["conv_forward", "norm_forward", "norm_backward"]
    assert second[2] == first[1] and second[1] != first[0]


def test_other_sizes_do_not_come_into_a_file(tmp_path, capsys):
    assert run(tmp_path, only=["norm_forward"]) == 0
    before = report_of(tmp_path)
    assert run(tmp_path, only=["norm_forward"], sizes=dataclasses.replace(TINY, tokens=71), merge=True) == 2
    assert "must be measured with the same method" in capsys.readouterr().out
    assert report_of(tmp_path) == before


@pytest.mark.parametrize("changes, sentence", [
    (dict(only=["conv_forward", "conv"]), "--rows must be of conv_forward, conv_backward, norm_forward"),
    (dict(peers=["vllm"]), "--peers must be fla with --mode layer; Transformers is always compared (vllm)"),
    (dict(peers=["fla"]), "--peers needs a GPU (--cpu was given)"),
    (dict(merge=True, out=None), "--merge needs --out (no file was named)"),
    (dict(cpu=False), "a CUDA GPU must be present (none was found); --cpu measures a small version"),
])  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, capsys, changes, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(tmp_path, **changes) == 2
    assert sentence in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_row_that_is_wrong_fails_alone(tmp_path, monkeypatch, capsys):
    right = flash_qla.rms_norm_gated
    monkeypatch.setattr(flash_qla, "rms_norm_gated", lambda *x: right(*x) * 1.02)
    assert run(tmp_path, only=OPERATIONS) == 1
    report = report_of(tmp_path)
    assert set(report["failures"]) == {"decode_1_us"} and "y: relative L2" in report["failures"]["decode_1_us"]
    assert [row["name"] for row in report["rows"]] == [name for name in OPERATIONS if name != "decode_1_us"]
    assert "FAIL decode_1_us: ValueError: y: relative L2" in capsys.readouterr().out
    monkeypatch.undo()
    assert run(tmp_path, only=["decode_1_us"], merge=True) == 0
    report = report_of(tmp_path)
    assert "failures" not in report and [row["name"] for row in report["rows"]] == OPERATIONS


def test_a_layer_whose_error_exceeds_that_of_transformers_fails(tmp_path, monkeypatch):
    module = pytest.importorskip("flash_qla.integrations._transformers_layers")
    right = module.gated_delta_net
    monkeypatch.setattr(module, "gated_delta_net", lambda *x, **options: right(*x, **options) * 1.01)
    assert run(tmp_path, only=["layer_forward", "norm_forward"]) == 1
    report = report_of(tmp_path)
    assert "o: relative L2 1.1e-02, bound " in report["failures"]["layer_forward"] and len(report["rows"]) == 1


def test_without_transformers_the_operations_are_measured():
    """In a process of its own: this one has imported it."""
    only = ["conv_forward", "norm_forward", "layer_forward", "model_decode"]
    done = helpers.in_subprocess(f"""
import pathlib, sys, tempfile
sys.modules["transformers"] = None
from flash_qla.cli import bench_layer, results
out = pathlib.Path(tempfile.mkdtemp()) / "cpu.json"
code = bench_layer.run(bench_layer.Options(cpu=True, runs=1, sizes=bench_layer.SMALL, out=out, only={only!r}))
report = results.load(out)
assert code == 1 and [row["name"] for row in report["rows"]] == {only[:2]!r}, report
assert list(report["failures"]) == {only[2:]!r}
assert all(why.startswith("ModuleNotFoundError") and "transformers" in why for why in report["failures"].values()), report
""", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr


def case_of(name):
    bench = bench_layer_rows.Bench(TINY, "cpu")
    cases = [case for names, make in bench_layer_rows.groups(TINY).values() if name in names for case in make(bench)]
    return next(case for case in cases if case.name == name)


def rows(name, monkeypatch=None):
    return [*bench_layer_measure.rows_of(case_of(name), 1, TINY.chain, "cpu", ["fla"])]


@pytest.mark.skipif("fla" in sys.modules, reason="fla is there")
def test_without_fla_a_row_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla", None)
    first, second = rows("norm_forward")
    assert second["value"] == first["value"] and "fla" not in second["peers"]
    assert second["missing"]["fla"].startswith("ModuleNotFoundError: ")


@pytest.fixture
def fla(monkeypatch):
    """What the rows call of fla, as this library computes it, with fla's parameters."""
    from flash_qla.integrations import _fla_layer

    conv, norm = (_fla_layer.ENTRIES["fla.modules.causal_conv1d", f"causal_conv1d_{name}"][0] for name in ("fwd", "bwd")), {}
    forward, backward = conv
    for name in ("fwd", "bwd"):
        norm[name] = _fla_layer.ENTRIES["fla.modules.norm.fused_norm_gate", f"layer_norm_gated_{name}"][0]

    def chunk(q, k, v, g, beta, cu_seqlens):
        return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu_seqlens)

    def recurrent(q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, use_gate_in_kernel, A_log, dt_bias,
                  use_beta_sigmoid_in_kernel):
        assert output_final_state and use_qk_l2norm_in_kernel and use_gate_in_kernel and use_beta_sigmoid_in_kernel
        assert all(t.is_contiguous() for t in (q, k, v)) and initial_state.dtype == torch.float32
        return v, initial_state

    class GatedDeltaNet(torch.nn.Linear):
        def __init__(self, hidden_size, expand_v, head_dim, num_heads, num_v_heads):
            assert (expand_v, head_dim, num_heads, num_v_heads) == (1, 128, 1, 2)
            super().__init__(hidden_size, hidden_size)

        def forward(self, x):
            return super().forward(x), None, None

    def update(x, cache, residual=None, weight=None, bias=None, activation=None):
        return flash_qla.causal_conv1d_decode(x, weight, bias, cache, torch.arange(len(x))), cache

    modules = {
        "modules.causal_conv1d": dict(causal_conv1d_fwd=forward, causal_conv1d_bwd=backward, causal_conv1d_update=update),
        "modules.norm.l2norm": dict(l2norm_fwd=lambda x: x.view(-1, x.shape[-1])),
        "modules.norm.fused_norm_gate": dict(layer_norm_gated_fwd=norm["fwd"], layer_norm_gated_bwd=norm["bwd"]),
        "ops.gated_delta_rule": dict(chunk_gated_delta_rule=chunk, fused_recurrent_gated_delta_rule=recurrent),
        "layers.gated_deltanet": dict(GatedDeltaNet=GatedDeltaNet),
    }
    monkeypatch.setattr(bench_layer_fla, "_module", lambda name: types.SimpleNamespace(**modules[name]))


@pytest.mark.parametrize("name", [*OPERATIONS, "layer_forward", "layer_training"])
def test_calls_of_fla(name, fla):
    if name.startswith("layer_"):
        pytest.importorskip("transformers.models.qwen3_5")
    first, second = rows(name)
    assert first["missing"] == {"fla": bench_layer_measure.UNDER_WAY} and "missing" not in second
    assert "fla" not in first["peers"] and "fla" in second["peers"]
    compared = {"conv_backward", "norm_forward", "norm_backward", "eager_step_host_us"}
    assert ("fla" in second.get("peer_err", {})) == (name in compared)
    if name in compared:
        assert set(second["peer_err"]["fla"]) == TENSORS[name] and all(e < 8e-3 for e in second["peer_err"]["fla"].values())


def test_a_peer_that_cannot_be_captured_is_missing(monkeypatch):
    """On a GPU the times are those of CUDA graphs."""
    way = bench_layer_measure._Way
    calls = {"": way(lambda: {}), "transformers": way(lambda: 1 / 0), "fla": way(lambda: {})}
    monkeypatch.setattr(bench_timing, "capture", lambda call: (None, call()))
    monkeypatch.setattr(bench_timing, "graphs_ms", lambda graphs, replays: [[float(i)] * replays for i in range(len(graphs))])
    missing = {}
    times = bench_layer_measure._times(case_of("norm_forward"), calls, 2, TINY.chain, "cuda", missing)
    assert times == {"": [0.0, 0.0], "fla": [1.0, 1.0]} and missing == {"transformers": "ZeroDivisionError: division by zero"}
    with pytest.raises(ZeroDivisionError):
        bench_layer_measure._times(case_of("norm_forward"), {"": calls["transformers"]}, 2, TINY.chain, "cuda", missing)


def test_a_row_that_would_begin_too_late_is_left_out(tmp_path, capsys):
    assert run(tmp_path, only=["conv_forward", "norm_forward"], seconds=-1.0) == 0
    assert report_of(tmp_path)["left_out"] == ["conv_forward", "norm_forward"]
    assert "norm_forward: left out" in capsys.readouterr().out


# A process that measures by a plan: a row, a failure, an end or a pause for each name.
WORK = """
import json, os, sys, time
from flash_qla.cli import bench_layer, results
given, plan = json.loads(sys.argv[1]), json.load(open(PLAN))
rows, failures = [], {}
for name in given["rows"]:
    what = plan.pop(name, "row")
    json.dump(plan, open(PLAN, "w"))
    if what in ("row", "beside fla"):
        rows.append({"name": name, "value": 1.0, "peers": {}, "missing": {"fla": "under way" if what == "beside fla" else "none"}})
    elif what == "device lost":
        failures[name] = "RuntimeError: an illegal memory access"
    results.save(__import__("pathlib").Path(given["path"]), {"rows": rows, "failures": failures, "left_out": []})
    if what == "device lost":
        break
    if what in ("end", "beside fla"):
        os._exit(7)
    if what == "pause":
        time.sleep(60)
"""


@pytest.mark.parametrize("plan, failures", [
    ({}, {}),
    ({"norm_forward": "end"}, {"norm_forward": "its process ended with exit code 7"}),
    ({"conv_forward": "end", "conv_backward": "end"}, dict.fromkeys(["conv_forward", "conv_backward"], "its process ended with exit code 7")),
    ({"norm_backward": "pause"}, {"norm_backward": "its process said nothing for 10 s and was ended"}),
    ({"norm_forward": "device lost"}, {"norm_forward": "RuntimeError: an illegal memory access"}),
], ids=["well", "end", "two ends", "hangs", "device"])  # fmt: skip
def test_rows_behind_one_that_ends_its_process(tmp_path, monkeypatch, plan, failures):
    (tmp_path / "plan").write_text(json.dumps(plan))
    monkeypatch.setattr(bench_layer, "_WORK", f"PLAN = {str(tmp_path / 'plan')!r}\n{WORK}")
    monkeypatch.setattr(bench_layer, "_SILENCE_S", 10.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X900")
    wanted = OPERATIONS[:4]
    assert run(tmp_path, cpu=False, sizes=bench_layer.Sizes(), only=wanted) == (1 if failures else 0)
    report = report_of(tmp_path)
    assert (tmp_path / "x900_layer.json").exists() and report.get("failures", {}) == failures
    assert [row["name"] for row in report["rows"]] == [name for name in wanted if name not in failures]


def test_an_interrupt_keeps_the_rows_and_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "plan").write_text(json.dumps({"conv_backward": "pause"}))
    monkeypatch.setattr(bench_layer, "_WORK", f"PLAN = {str(tmp_path / 'plan')!r}\n{WORK}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X900")
    started, wait = [], subprocess.Popen.wait

    def interrupted(process, timeout=None):
        started.append(process)
        if json.loads((tmp_path / "plan").read_text()) == {}:  # the row that pauses has begun
            time.sleep(0.5)
            if None not in started:
                started.append(None)
                raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, cpu=False, sizes=bench_layer.Sizes(), only=OPERATIONS[:3])
    assert "conv_forward" in [row["name"] for row in report_of(tmp_path)["rows"]] and started[0].poll() is not None


def test_times_stay_where_fla_ends_the_process(tmp_path, monkeypatch):
    (tmp_path / "plan").write_text(json.dumps({"conv_forward": "beside fla"}))
    monkeypatch.setattr(bench_layer, "_WORK", f"PLAN = {str(tmp_path / 'plan')!r}\n{WORK}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X900")
    assert run(tmp_path, cpu=False, sizes=bench_layer.Sizes(), only=OPERATIONS[:2], peers=["fla"]) == 0
    first, second = report_of(tmp_path)["rows"]
    assert first["value"] == 1.0 and first["missing"] == {"fla": "its process ended with exit code 7"}
    assert second["missing"] == {"fla": "none"}
