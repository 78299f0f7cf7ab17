"""How the bench times calls, on a device that is made up."""

import math
import types

import pytest
import torch

pytest.importorskip("typer")

from flash_qla.cli import bench_timing

pytestmark = pytest.mark.cpu_only


class Device:
    """torch.cuda's graphs and events on a card that does what is queued, a replay in so many seconds, while the host goes on."""

    def __init__(self, monkeypatch):
        self.now, self.idle = 0.0, []  # when the queue is done; when the host has waited for it
        device = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                self.at = device.now

            def elapsed_time(self, end):
                return 1e3 * (end.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.idle.append(self.now))
        monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: self.now)

    def graph(self, seconds, calls):
        return bench_timing.Graph(types.SimpleNamespace(replay=lambda: self.take(seconds)), calls, None)

    def take(self, seconds):
        self.now += seconds


def test_times_are_taken_under_a_load_that_lasts(monkeypatch):
    device = Device(monkeypatch)
    times = bench_timing.graphs_ms([device.graph(4e-3, 5), device.graph(1e-3, 10)], 7)
    assert times == [[pytest.approx(0.8)] * 7, [pytest.approx(0.1)] * 7]
    # Behind the last wait 0.3 s and more of replays, and the timed ones, with no wait between.
    begin, end = device.idle[-2:]
    assert end - begin - 7 * 5e-3 >= bench_timing.LOAD_S and math.isclose(end - begin - 7 * 5e-3, 0.3, abs_tol=5e-3)


def test_what_is_queued_in_front_of_a_call_is_not_timed(monkeypatch):
    device = Device(monkeypatch)
    monkeypatch.setattr(torch, "empty", lambda *args, **options: types.SimpleNamespace(zero_=lambda: device.take(1e-3)))
    assert bench_timing.flushed_ms(device.graph(2e-5, 1), 4) == [pytest.approx(0.02)] * 4


def test_eager_calls_are_not_waited_for_one_by_one(monkeypatch):
    device = Device(monkeypatch)
    host = [0.0]

    def call():
        host[0] += 30e-6  # what the host takes
        device.take(1e-3)

    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None) or host.__setitem__(0, max(host[0], device.now)))
    monkeypatch.setattr(bench_timing.time, "perf_counter", lambda: host[0])
    device.now = 0.0
    host_us, ms = bench_timing.eager_times(call)
    assert host_us == pytest.approx(30) and ms == pytest.approx(1.0) and len(waits) == 2 * bench_timing.EAGER_ROUNDS
