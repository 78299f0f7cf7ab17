"""The bench without a GPU: the CPU computes, a clock that stands still times, scripts play the peers."""

import functools
import json
import types

import pytest
import torch

from flash_qla.cli import bench_calls, bench_gpu, bench_inputs, bench_options, bench_processes, bench_timing

# A peer that answers for its first two rows with a tensor that is off by a tenth, complains about the third, and writes
# other things too.
PEER = """
import json, sys, torch
rows = dict(json.loads(sys.stdin.readline()))
assert sys.argv[1] == "fla" and int(sys.argv[2]) in (0, 3)
print("Autotuning ...")
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    i = asked["row"]
    answer = {"peer": "fla", "error": "RuntimeError: no such shape"}
    if i < 2:
        answer = {"peer": "fla 9.9", "ms": [5.0 + i + asked["turn"]] * int(sys.argv[2])}
        if asked["turn"] == 0:
            answer["peak_bytes"] = 7_000_000
        if asked["last"]:
            answer["tensors"] = f"{sys.argv[3]}/{i}.pt"
            state = torch.full((len(rows[i]["seqlens"]), rows[i]["hv"], 128, 128), float("nan") if i == 1 else 0.0)
            torch.save({"final_state": state}, answer["tensors"])
    print(json.dumps({"row": i, **answer}))
    print(json.dumps({"row": i, "done": True}), flush=True)
"""


class Clock:
    """Graphs without a GPU: a replay calls, and the times are given."""

    ms = [2.0, 2.5]  # of the default call, and without a split
    calls = 3

    def capture(self, function):
        def graph(calls):
            left = {}

            def replay():
                for _ in range(calls):
                    left.update(function())

            return bench_timing.Graph(types.SimpleNamespace(replay=replay), calls, left)

        return graph(1), graph(self.calls)

    def graphs_ms(self, graphs, replays, before=None):
        for graph in graphs:
            graph.graph.replay()
        return [[ms * share for share in (1.0, 0.9, 1.5)] for ms in self.ms[: len(graphs)]]

    def flushed_ms(self, single, replays):
        assert single.calls == 1
        single.graph.replay()
        return [0.1, 0.2, 0.4]

    def eager_times(self, function):
        function()
        return 30.0, 2.25

    def peak_bytes(self, function):
        return 3_000_000


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for name in ("capture", "graphs_ms", "flushed_ms", "eager_times", "peak_bytes"):
        monkeypatch.setattr(bench_timing, name, getattr(clock, name))
    return clock


@pytest.fixture
def bench(monkeypatch, tmp_path, clock):
    """Runs the command on rows of a few tokens; returns (exit code, report, CSV lines)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X900")
    monkeypatch.setattr(bench_gpu, "_sm_count", lambda: 100)
    monkeypatch.setattr(bench_calls, "ORACLES", {"cuda": "reference"})
    monkeypatch.setattr(bench_gpu, "make_inputs", functools.partial(bench_inputs.make_inputs, device="cpu"))
    monkeypatch.setattr(bench_inputs, "FORWARD_LENGTHS", {"1x70": [70], "30+3": [30, 3], "5x2": [5, 5]})
    monkeypatch.setattr(bench_inputs, "BACKWARD_LENGTHS", {"70_1seq": [70]})
    monkeypatch.setattr(bench_inputs, "DECODE_LENGTHS", {"batch2": [1, 1]})
    of_options = [((1, 2), "5x2" if "dense" in option else "1x70", gates, option) for *_, gates, option in bench_inputs.OPTIONS]
    monkeypatch.setattr(bench_inputs, "OPTIONS", of_options)
    monkeypatch.setattr(bench_options, "_CHECKPOINT_EVERY", 64)

    def run(modes, peer=None, out="gpu.json", **options):
        out = tmp_path / "results" / out
        if peer is not None:
            script = tmp_path / "peer.py"
            script.write_text(peer)
            monkeypatch.setattr(bench_processes, "_PEER_SCRIPT", script)
            options["peers"] = ["fla=/nowhere"]
        options = {"heads": "1x2", "peer_seconds": 20.0, "runs": 3, **options}
        code = bench_gpu.run(bench_gpu.Options(modes=modes, out=out, **options))
        report = json.loads(out.read_text()) if out.exists() else None
        lines = out.with_suffix(".csv").read_text().splitlines() if out.with_suffix(".csv").exists() else []
        return code, report, lines

    return run
