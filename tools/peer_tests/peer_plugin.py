"""pytest plug-in of tools/peer_tests.sh: binds the test files of FlashQLA or FLA to this library, counts its calls, and keeps
the record.

What is bound, before any test file is imported (--peer-binding):

    low_level   FlashQLA's tests: `tilelang` is a stand-in that knows the GPU's compute capability and nothing else, and
                chunk_gated_delta_rule_fwd has enable_fwd_cp_cache=False, for these tests unpack six values without asking
    functions   FLA's tests of its functions: chunk_gated_delta_rule and fused_recurrent_gated_delta_rule of
                fla.ops.gated_delta_rule are this library's. fla's own, if they are called in spite of that, fail the run
    backend     FLA's functions as they are, this library registered with fla as for every user
    layers      the same, but any path of this library counts as fast: the layers of these tests have head dimensions that
                would be left to fla
    cards       FLA's tests of context parallelism: chunk_gated_delta_rule and build_cp_context are this library's, in every
                process that a test starts (peer_cards.py)

Each test's calls of this library are counted by operation, path and dtype. A run in which there are none fails.
"""

import functools
import importlib
import json
import sys
import types
import warnings
from collections import Counter
from pathlib import Path

import pytest

BINDINGS = ("low_level", "functions", "backend", "layers", "cards")
OPERATIONS = (
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_fwd",
    "chunk_gated_delta_rule_bwd",
    "fused_recurrent_gated_delta_rule",
)

calls = Counter()  # of the test that runs: "operation path dtype", and THEIRS
THEIRS = "fla's own kernels"


def pytest_addoption(parser):
    group = parser.getgroup("peer tests")
    group.addoption("--peer-binding", choices=BINDINGS, required=True)
    group.addoption("--peer-commit", default="unknown")
    group.addoption("--peer-out", type=Path, required=True, help="JSON file; a run takes the place of an earlier one of its binding")
    group.addoption("--peer-device", default="cuda", help="cpu: tests on CPU tensors, where their files let that be chosen")


@pytest.hookimpl(tryfirst=True)  # before their conftest.py is imported
def pytest_load_initial_conftests(early_config):
    import flash_qla

    if not hasattr(flash_qla, "build_info"):
        raise pytest.UsageError(f"{flash_qla.__file__} is another package called flash_qla: put this library's first on PYTHONPATH")
    bind = {"low_level": bind_low_level, "functions": bind_functions, "backend": bind_backend, "layers": bind_layers,
            "cards": bind_cards}  # fmt: skip
    count_calls(flash_qla)
    bind[early_config.known_args_namespace.peer_binding](flash_qla)


def pytest_configure(config):
    import flash_qla

    config.pluginmanager.register(Calls())
    if not hasattr(config, "workerinput"):  # not in a worker of pytest-xdist
        config.pluginmanager.register(Record(config, flash_qla.build_info()))


# What is bound.


def count_calls(flash_qla):
    """Puts a counting function in the place of each operation, wherever it is looked up."""
    for name in OPERATIONS:
        original = getattr(flash_qla, name)
        for holder in ("flash_qla", "flash_qla.ops.gated_delta_rule", "flash_qla.ops.gated_delta_rule.chunk"):
            module = importlib.import_module(holder)
            if hasattr(module, name):
                setattr(module, name, counting(flash_qla, name, original))


def counting(flash_qla, name, original):
    @functools.wraps(original)
    def counted(*args, **kwargs):
        if not flash_qla._ffi.is_explaining():  # explain() makes the call as well, without computing it
            q = args[0] if args else kwargs["q"]
            calls[f"{name} {path_of(flash_qla, name, args, kwargs)} {str(q.dtype).removeprefix('torch.')}"] += 1
        return original(*args, **kwargs)

    return counted


def path_of(flash_qla, name, args, kwargs):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return flash_qla.explain(*args, op=name, **kwargs).splitlines()[0].removeprefix("path: ")
    except Exception:  # the call itself raises it again, and the test decides what that means
        return "refused"


def bind_low_level(flash_qla):
    def compute_version(target=None):
        import torch

        return "{}.{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "none"

    names = ("tilelang", "tilelang.contrib", "tilelang.contrib.nvcc")
    stand_ins = [types.ModuleType(name) for name in names]
    stand_ins[0].contrib, stand_ins[1].nvcc = stand_ins[1:]
    stand_ins[2].get_target_compute_version = compute_version
    sys.modules.update(zip(names, stand_ins))
    partial = functools.partial(flash_qla.chunk_gated_delta_rule_fwd, enable_fwd_cp_cache=False)
    flash_qla.chunk_gated_delta_rule_fwd = partial


def bind_functions(flash_qla):
    operation = importlib.import_module("fla.ops.gated_delta_rule")
    if not importlib.import_module(registry_name())._DISPATCH_DISABLED:
        raise pytest.UsageError("--peer-binding functions: set FLA_DISABLE_BACKEND_DISPATCH=1")
    for module, name in (("chunk", "ChunkGatedDeltaRuleFunction"), ("fused_recurrent", "FusedRecurrentFunction")):
        function = getattr(importlib.import_module(f"fla.ops.gated_delta_rule.{module}"), name)
        function.forward = staticmethod(counting_theirs(function.forward))
    for name in ("chunk_gated_delta_rule", "fused_recurrent_gated_delta_rule"):
        setattr(operation, name, getattr(flash_qla, name))


def counting_theirs(original):
    def counted(*args, **kwargs):
        calls[THEIRS] += 1
        return original(*args, **kwargs)

    return counted


def registry_name():
    for name in ("fla.backends", "fla.ops.backends"):
        try:
            importlib.import_module(name)
            return name
        except ModuleNotFoundError:
            continue
    raise pytest.UsageError("fla 0.5.2 or newer must be importable: put it on PYTHONPATH")


def bind_backend(flash_qla):
    from flash_qla.integrations import fla as integration

    integration.register()


def bind_layers(flash_qla):
    from flash_qla import _paths

    _paths.FAST_PATHS = (*_paths.FAST_PATHS, "cuda_generic", "cpu")
    bind_backend(flash_qla)


def bind_cards(flash_qla):
    import peer_cards

    peer_cards.bind_processes()


# What is counted.


class Calls:
    """Each test's calls, as a property of its report: so they reach the process that keeps the record."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        calls.clear()
        try:
            return (yield)
        finally:
            item.user_properties.append(("calls", json.dumps(calls)))

    @pytest.hookimpl(trylast=True)  # after their conftest.py has marked what to skip
    def pytest_collection_modifyitems(self, config, items):
        if config.getoption("--peer-device") != "cpu":
            return
        for item in items:
            for name in ("DEVICE", "device"):  # what FlashQLA's and FLA's files put their tensors on
                if hasattr(item.module, name):
                    setattr(item.module, name, "cpu")
            item.own_markers = [mark for mark in item.own_markers if mark.name != "skip" or "GPU" not in str(mark.kwargs)]
        import torch

        for plugin in config.pluginmanager.get_plugins():  # FLA's conftest.py waits for its device after each test
            if hasattr(plugin, "device_torch_lib"):
                plugin.device_torch_lib = torch.cpu


def reason_of(report):
    """The line of a failure that says what was wrong."""
    lines = report.longreprtext.strip().splitlines() or [report.when]
    return next((line.removeprefix("E").strip() for line in lines if line.startswith("E ")), lines[-1])


class Record:
    """Results by file, written as JSON and printed."""

    def __init__(self, config, build):
        self.binding, self.out = config.getoption("--peer-binding"), config.getoption("--peer-out")
        self.head = {"commit": build.get("commit", "unknown"), "version": build["version"], "gpu": build.get("gpu_0", "none"),
                     "peer_commit": config.getoption("--peer-commit")}
        self.files, self.calls, self.skipped = {}, Counter(), Counter()
        self.failed, self.silent = {}, []

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.outcome == "passed":
            return
        if report.when == "teardown" and report.nodeid in self.failed:
            return
        file = report.nodeid.split("::")[0]
        counts = self.files.setdefault(file, {"passed": 0, "failed": 0, "skipped": 0})
        counts[report.outcome] += 1
        if report.outcome == "failed":
            self.failed[report.nodeid] = reason_of(report)
        elif report.outcome == "skipped":
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        for name, value in report.user_properties:
            if name == "calls":
                made = Counter(json.loads(value))
                self.calls += made
                if report.outcome != "skipped" and not any(key != THEIRS for key in made):
                    self.silent.append(report.nodeid)

    def pytest_collectreport(self, report):
        if report.failed:
            self.failed[report.nodeid] = reason_of(report)

    def wrong(self):
        """Why the run does not count, whatever its tests say."""
        ran = any(counts["passed"] + counts["failed"] for counts in self.files.values())
        if self.binding == "cards" and self.files and not ran:  # each test was for more cards than there are
            return None
        if not sum(count for key, count in self.calls.items() if key != THEIRS):
            return "this library was not called"
        if self.binding == "functions" and self.calls[THEIRS]:
            return f"fla's own kernels were called {self.calls[THEIRS]} times"
        return None

    def pytest_sessionfinish(self, session):
        if session.config.option.collectonly:
            return
        if self.wrong() and session.exitstatus == 0:
            session.exitstatus = 1
        run = {"binding": self.binding, **self.head, "files": self.files, "calls": dict(sorted(self.calls.items())),
               "failed": self.failed, "skipped": dict(self.skipped),
               "without_calls": self.silent, "wrong": self.wrong()}
        runs = json.loads(self.out.read_text()) if self.out.exists() else []
        self.out.parent.mkdir(parents=True, exist_ok=True)
        runs = [earlier for earlier in runs if earlier["binding"] != self.binding]
        self.out.write_text(json.dumps([*runs, run], indent=1) + "\n")

    def pytest_terminal_summary(self, terminalreporter, config):
        if config.option.collectonly:
            return
        write = terminalreporter.write_line
        terminalreporter.section(f"peer tests, bound as {self.binding}")
        for file, counts in self.files.items():
            write(f"{file}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
        for key, count in sorted(self.calls.items()):
            write(f"  {count:6} calls  {key}")
        write(f"  {len(self.silent)} tests ran without a call of this library")
        if self.wrong():
            write(f"NOT COUNTED: {self.wrong()}")
