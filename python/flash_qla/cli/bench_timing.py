"""How a call on a GPU is timed, ours and other packages' alike. This file needs torch alone: bench_peers.py uses it in
another process."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any, Callable, List, Sequence, Tuple

import torch

# A card that has computed for a while is slower than one that begins: rows of 32,768 tokens by 10 to 15 % in a loop of
# 100 calls on an H200. Every row is timed behind this many seconds of its own replays.
LOAD_S = 0.3
# The host takes some 15 us to start a graph and two events: one that takes as long as this hides that.
GRAPH_MS = 0.5
FEWEST_CALLS, MOST_CALLS = 5, 200
# Several times the L2 cache (50 MB on Hopper).
FLUSH_BYTES = 256 << 20
# Of an eager call: few enough that the queue to the device never fills, which would make the host wait.
EAGER_CALLS, EAGER_ROUNDS = 10, 5


def peak_bytes(function: Callable[[], Any]) -> int:
    """Bytes on the GPU that a call takes at its highest beside its inputs: results, what is kept for later, scratch."""
    function()  # whatever is made once, at first calls
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return peak


def eager_times(function: Callable[[], Any]) -> Tuple[float, float]:
    """Of a call without a graph, many of them one after another: microseconds until it has returned to the host, and
    milliseconds that it takes all in all."""
    host_us, ms = [], []
    for _ in range(EAGER_ROUNDS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(EAGER_CALLS):
            function()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        host_us.append(1e6 * (returned - begin) / EAGER_CALLS)
        ms.append(1e3 * (time.perf_counter() - begin) / EAGER_CALLS)
    return statistics.median(host_us), statistics.median(ms)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A CUDA graph of so many calls. `results`: what the last one has returned, in memory that every replay writes."""

    graph: Any
    calls: int
    results: Any


def capture(function: Callable[[], Any]) -> Tuple[Graph, Graph]:
    """Graphs of a single call, and of so many that the host is never waited for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles and plans whatever is made at first calls
            function()
    torch.cuda.synchronize()
    single = _capture(function, 1)
    ms = _milliseconds([single] * 20) / 20
    return single, _capture(function, min(max(math.ceil(GRAPH_MS / ms), FEWEST_CALLS), MOST_CALLS))


def graphs_ms(graphs: Sequence[Graph], replays: int, before: Callable[[], Any] = lambda: None) -> List[List[float]]:
    """Milliseconds of a call in each of `replays` replays of each graph. They take turns, so that all see the same
    state of the GPU; before() is queued in front of each. All is in one queue: LOAD_S of replays that are not timed,
    then those that are, without a gap."""
    rounds = math.ceil(1e3 * LOAD_S / _milliseconds(graphs, before))
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)] for _ in graphs]
    for _ in range(rounds):
        for graph in graphs:
            before()
            graph.graph.replay()
    for i in range(replays):
        for graph, of_graph in zip(graphs, events):
            before()
            of_graph[i][0].record()
            graph.graph.replay()
            of_graph[i][1].record()
    torch.cuda.synchronize()
    return [
        [begin.elapsed_time(end) / graph.calls for begin, end in of_graph] for graph, of_graph in zip(graphs, events)
    ]


def flushed_ms(single: Graph, replays: int) -> List[float]:
    """Milliseconds of calls that find nothing of their inputs in the L2 cache."""
    other = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    return graphs_ms([single], replays, other.zero_)[0]


def _capture(function: Callable[[], Any], calls: int) -> Graph:
    graph, results = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for _ in range(calls):
            results = function()
    return Graph(graph, calls, results)


def _milliseconds(graphs: Sequence[Graph], before: Callable[[], Any] = lambda: None) -> float:
    """Of all of these one after another, the second time."""
    for _ in range(2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for graph in graphs:
            before()
            graph.graph.replay()
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)
