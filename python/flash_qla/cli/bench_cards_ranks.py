"""The ranks of the bench over several cards, and how their calls are timed. This file needs torch alone:
bench_cards_peers.py uses it in other processes."""

from __future__ import annotations

import math
import os
import sys
import time
from typing import Any, Callable, Dict, List, Tuple

import torch
import torch.distributed as distributed

if __package__:
    from . import bench_timing
else:  # run by a script, without this package
    import bench_timing  # type: ignore[no-redef]

# Calls that are not timed, in front of those that are: so many at least, and bench_timing.LOAD_S seconds of them.
WARM_CALLS = 3


class Ranks:
    """The processes that torchrun has started, each with a card; without torchrun one."""

    @staticmethod
    def count() -> int:
        return int(os.environ.get("WORLD_SIZE", "1"))

    def __init__(self, cpu: bool) -> None:
        self.size = self.count()
        self.rank = int(os.environ.get("RANK", "0"))
        self.device = torch.device("cpu")
        if not cpu:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        if self.size > 1:
            distributed.init_process_group("gloo" if cpu else "nccl")

    def end(self, code: int) -> int:
        """Ends the group, and with more than one rank the process: gloo's threads let go of the last collective's
        tensors meanwhile, and that aborts an interpreter which has begun to end."""
        if self.size == 1:
            return code
        distributed.barrier()
        distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def worst(self, values: List[float]) -> List[float]:
        """The largest of the ranks' values, one by one."""
        if self.size == 1:
            return values
        found = torch.tensor(values, dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return [float(value) for value in found.tolist()]

    def wait(self) -> None:
        """Until every rank is here. On GPUs the device waits, not the host."""
        if self.size > 1:
            distributed.all_reduce(torch.zeros(1, device=self.device))

    def to_first(self, x: torch.Tensor) -> List[torch.Tensor]:
        """Every rank's tensor of one shape: on rank 0; elsewhere nothing."""
        if self.size == 1:
            return [x]
        found = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else None
        distributed.gather(x.contiguous(), found, dst=0)
        return found or []

    def together(self, pieces: Dict[Any, torch.Tensor]) -> Dict[Any, torch.Tensor]:
        """The ranks' tokens one after another, [1, T of a rank, ..] of each piece, on rank 0; elsewhere nothing."""
        found = {key: self.to_first(x) for key, x in pieces.items()}
        return {key: torch.cat(parts, 1) for key, parts in found.items() if parts}

    def free_bytes(self, alone: bool = False) -> int:
        """Of the fullest card, or of this one; on a CPU no limit is known."""
        if self.device.type == "cpu":
            return 1 << 62
        torch.cuda.empty_cache()
        free = float(torch.cuda.mem_get_info()[0])
        return int(free if alone else -self.worst([-free])[0])

    def peak_bytes(self, function: Callable[[], Any], alone: bool = False) -> int:
        """bench_timing.peak_bytes() of the rank that takes most, or of this one; 0 on a CPU."""
        if self.device.type == "cpu":
            return 0
        peak = float(bench_timing.peak_bytes(function))
        return int(peak if alone else self.worst([peak])[0])

    def times(self, function: Callable[[], Any], runs: int, alone: bool = False) -> List[float]:
        """Milliseconds of `runs` calls behind others that are not timed, every call of all ranks begun together: the
        slowest rank's, one by one. `alone`: this rank's own, of calls that the others do not make."""
        wait = (lambda: None) if alone else self.wait
        worst = (lambda values: values) if alone else self.worst
        begin = time.perf_counter()
        for _ in range(WARM_CALLS):
            function()
        self._synchronise()
        seconds = worst([(time.perf_counter() - begin) / WARM_CALLS])[0]
        for _ in range(math.ceil(bench_timing.LOAD_S / max(seconds, 1e-4))):  # the same number on every rank
            function()
        return worst(self._timed(function, runs, wait))

    def _timed(self, function: Callable[[], Any], runs: int, wait: Callable[[], None]) -> List[float]:
        if self.device.type == "cpu":
            found = []
            for _ in range(runs):
                wait()
                begin = time.perf_counter()
                function()
                found.append(1e3 * (time.perf_counter() - begin))
            return found
        events: List[Tuple[Any, Any]] = []
        for _ in range(runs):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            wait()
            pair[0].record()
            function()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return [first.elapsed_time(second) for first, second in events]

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
