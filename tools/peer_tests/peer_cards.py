"""Binds FLA's tests of context parallelism, whose ranks are processes that import the test file anew: each rank first puts this
library's functions in the place of fla's, and leaves what it has called in a file for the process that runs the tests."""

import functools
import importlib
import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import peer_plugin

FUNCTIONS = {"fla.ops.cp": ("build_cp_context",), "fla.ops.gated_delta_rule": ("chunk_gated_delta_rule",)}


def bind():
    """This library's functions where the test file imports fla's from."""
    import flash_qla

    peer_plugin.count_calls(flash_qla)
    for holder, names in FUNCTIONS.items():
        module = importlib.import_module(holder)
        for name in names:
            setattr(module, name, getattr(flash_qla, name))


def rank_of_a_test(rank, folder, module, worker, *arguments):
    """What a started process runs in place of the worker."""
    bind()
    try:
        getattr(importlib.import_module(module), worker)(rank, *arguments)
    finally:
        (Path(folder) / f"rank_{rank}.json").write_text(json.dumps(peer_plugin.calls))


def bind_processes():
    """Processes that a test starts are bound ranks; their calls count as the test's."""
    import torch.multiprocessing

    original = torch.multiprocessing.start_processes

    @functools.wraps(original)
    def start_processes(worker, args=(), **options):
        with tempfile.TemporaryDirectory() as folder:
            try:
                return original(rank_of_a_test, args=(folder, worker.__module__, worker.__name__, *args), **options)
            finally:
                for path in Path(folder).iterdir():
                    peer_plugin.calls.update(Counter(json.loads(path.read_text())))

    torch.multiprocessing.start_processes = start_processes
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # no multicast: some virtual machines refuse it when a group is made
