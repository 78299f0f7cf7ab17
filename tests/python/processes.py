"""Processes with one torch.distributed group (gloo, or NCCL with a GPU for each), to which tests give functions to run on every rank.

They are started once for all tests of a module: each takes seconds to import torch. Groups of fewer ranks are made of the first
ones. A function is named by its module and name, and gets a Rank and the arguments; what it returns goes back through a pipe.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path

import helpers
import pytest
import torch

# Seconds after which a rank that waits for another gives up: the group's own time-out, and how long tests wait for an answer.
GROUP_TIMEOUT = 20
ANSWER_TIMEOUT = 3 * GROUP_TIMEOUT
START_TIMEOUT = 120  # for all of them to be there, where other tests fill the machine


@dataclasses.dataclass
class Rank:
    """A process among `size`, and their group."""

    rank: int
    size: int
    group: object


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


class RemoteError(Exception):
    """An exception of a rank: its type's name, message and traceback as text."""

    def __init__(self, kind, message, trace):
        super().__init__(f"{kind}: {message}\n{trace}")
        self.kind, self.message = kind, message


def _serve(rank, size, port, pipe, timeout, backend):
    sys.path.insert(0, str(Path(__file__).parent))
    import torch.distributed as distributed

    torch.set_num_threads(1)
    if backend == "nccl":
        # PyTorch's watchdog sees the group's time-out, and sleeps four times this long for reports of other ranks before it ends the
        # process: a minute by default.
        os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"
        torch.cuda.set_device(rank)
        helpers.settings.device = "cuda"
    # The group's time-out is short for the tests of ranks that fail; processes of a busy machine take longer to get here.
    store = distributed.TCPStore("localhost", port, size, rank == 0, datetime.timedelta(seconds=START_TIMEOUT))
    store.set_timeout(datetime.timedelta(seconds=timeout))
    distributed.init_process_group(backend, rank=rank, world_size=size, store=store, timeout=datetime.timedelta(seconds=timeout))
    groups = {size: distributed.group.WORLD}
    for fewer in range(2, size):
        groups[fewer] = distributed.new_group(list(range(fewer)), timeout=datetime.timedelta(seconds=timeout))
    pipe.send(("ready", None))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            os._exit(0)  # a group whose other ranks are gone has nothing to clean up
        if task is None:
            os._exit(0)
        module, name, world, arguments = task
        try:
            function = getattr(importlib.import_module(module), name)
            answer = ("ok", function(Rank(rank, world, groups[world]), *arguments))
        except BaseException as error:  # whatever it is, the test is to know
            answer = ("error", (type(error).__name__, str(error), traceback.format_exc()))
        pipe.send(answer)


class Processes:
    """`size` ranks, or as many as there are GPUs with --device cuda. Use as a context."""

    def __init__(self, size, timeout=GROUP_TIMEOUT):
        self.backend = "gloo"
        if helpers.settings.device == "cuda":
            found = torch.cuda.device_count()
            if found < 2:
                pytest.skip(f"needs 2 GPUs (found {found})")
            size, self.backend = min(size, found), "nccl"
        self.size, backend = size, self.backend
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self.pipes, self.processes = [], []
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, port, there, timeout, backend), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)
        for rank in range(size):
            assert self._answer(rank, START_TIMEOUT)[0] == "ready"

    def __enter__(self):
        return self

    def kill(self):
        """Ends the processes without a farewell: for groups of which a rank is gone."""
        for process in self.processes:
            process.kill()

    def __exit__(self, *error):
        for pipe in self.pipes:
            try:
                pipe.send(None)
            except OSError:
                pass
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def _answer(self, rank, timeout):
        if not self.pipes[rank].poll(timeout):
            raise TimeoutError(f"rank {rank} gave no answer in {timeout} s")
        return self.pipes[rank].recv()

    def run(self, function, world, *arguments):
        """Calls a function of a module on the first `world` ranks. Returns what each gave; raises the first error. Skips the test
        where there are not as many."""
        if world > self.size:
            pytest.skip(f"needs {world} GPUs (found {self.size})")
        answers = self.answers(function, world, *arguments)
        for kind, value in answers:
            if kind == "error":
                raise RemoteError(*value)
        return [value for _, value in answers]

    def answers(self, function, world, *arguments, ranks=None):
        """The same, with ("ok", value), ("error", (type, message, traceback)) or ("gone", None) of each rank."""
        ranks = range(world) if ranks is None else ranks
        for rank in ranks:
            self.pipes[rank].send((function.__module__, function.__qualname__, world, arguments))
        found = []
        for rank in ranks:
            try:
                found.append(self._answer(rank, ANSWER_TIMEOUT))
            except EOFError:
                found.append(("gone", None))
        return found
