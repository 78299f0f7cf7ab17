"""Which path computed what: the calls of each test are recorded, stand beside its result, and are judged at the end.

The native calls of `flash_qla._ffi` are wrapped. After each one the library is asked to explain the same call, which reads
sizes alone and waits for nothing. So every test has user properties in the junit file, one for each operation, path and dtype:

    <property name="calls" value="chunk_forward sm90 bfloat16 3"/>      three calls
    <property name="planned" value="chunk_forward sm90 bfloat16 2"/>    two of them were planned for a sequence split

A test that is marked with a requirement of docs/testing.md has it there, too:

    <property name="requirement" value="7"/>

On a Hopper GPU, where the library chooses the path, a run fails if a requirement has no case on path "sm90" in bf16 or in
fp16 (SM90_NEEDS). Where the run names a path, a test that this path cannot compute is skipped and says so.
"""

from __future__ import annotations

import collections
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from flash_qla import _ffi, build_info

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from record_reliability import subject_of

FORWARD, BACKWARD = "chunk_forward", "chunk_backward"
# What path sm90 must have computed, in both dtypes, before a run on a Hopper GPU is green. Requirement 13 hands
# states from call to call and pools are forward only. Requirements 20 and 22 compute in other processes, and the files that are
# left out are about the token-by-token call (recurrent), other front ends (numpy, transformers, smoke) or nothing on a GPU.
SM90_NEEDS = {
    **{f"requirement {n}": (FORWARD, BACKWARD) for n in (*range(1, 13), *range(14, 20), 21)}, "requirement 13": (FORWARD,),
    "pool": (FORWARD,),
    **{name: (FORWARD, BACKWARD) for name in ("features", "low_level", "check_mode", "context_parallel")}}
SM90_DTYPES = ("bfloat16", "float16")
# The check of device data comes before a path is chosen, and knows no dtype.
BF16_ALONE = ("check_mode",)

# What the library says of a call that the named path does not compute (src/core/c_api.cpp).
REJECTED = re.compile(r"no path computes this call|path \(\w+\) must be one of")
# Where the native calls have their operation's options and q (bindings/ffi/module.cpp); a forward's begin with `recurrent`.
PATH_AT, CP_MODE_AT, FORCED_AT, Q_AT = 1, 8, 9, 12
CP_MODES = ("False", "True", "invariant")
# The layer's (bindings/ffi/layer.cpp): their operation with its options, and where these have x.
LAYER_EXPORTS = {
    "conv": (lambda arguments: ("conv_update" if arguments[0] else "conv_forward", arguments[1:]), 11),
    "conv_backward": (lambda arguments: ("conv_backward", arguments), 10),
    "norm_gated": (lambda arguments: ("norm_gated", arguments), 6),
    "norm_gated_backward": (lambda arguments: ("norm_gated_backward", arguments), 6),
}


class Call(NamedTuple):
    operation: str
    path: str
    dtype: str
    mode: str  # of the sequence split: auto_cp, and "forced"
    planned: bool  # for a sequence split
    named: str | None  # the path that the call was held to


def is_hopper():
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


class Paths:
    """The plugin, or the record of a program. `calls` are those of the test that runs."""

    def __init__(self, device, path="auto", config=None):
        self.device, self.named, self.config = device, None if path == "auto" else path, config
        self.calls, self.rejections = [], []
        self.cases = collections.defaultdict(collections.Counter)  # by subject: tests that passed or failed, by (operation, path, dtype)
        self.computed, self.partial, self.rejected = {}, set(), 0  # computed: subjects of tests

    # --- recording ---

    def watch(self):
        """Puts the record between the library and its native calls."""
        _ffi.load()
        _ffi._forward = self._watched(_ffi._forward, lambda arguments: ("recurrent" if arguments[0] else FORWARD, arguments[1:]))
        _ffi._backward = self._watched(_ffi._backward, lambda arguments: (BACKWARD, arguments))
        for name, (operation, x_at) in LAYER_EXPORTS.items():
            _ffi._exports[name] = self._watched(_ffi.load()[name], operation, x_at)
        operations = (("part_forward", FORWARD), ("part_backward", BACKWARD), ("verify", "verify"))  # part_: with states of ranks' parts
        for name, operation in operations:
            _ffi._exports[name] = self._watched(_ffi.load()[name], lambda arguments, operation=operation: (operation, arguments))
        _ffi.workspace_size = self._watched_question(_ffi.workspace_size)

    def _watched(self, function, operation_and_options, layer_x_at=None):
        def call(action, *arguments):
            operation, options = operation_and_options(arguments)
            try:
                result = function(action, *arguments)
            except Exception as error:
                self._note_rejection(options[PATH_AT], error)
                raise
            if action == _ffi._RUN and not result:  # the call was made, and is not one that asks for its scratch
                text = function(_ffi._EXPLAIN, *arguments[:-1], None)
                cut = layer_x_at is None
                mode = CP_MODES[options[CP_MODE_AT]] + (" forced" if options[FORCED_AT] else "") if cut else "False"
                dtype = str(options[Q_AT if cut else layer_x_at].dtype).removeprefix("torch.")
                self.calls.append(Call(
                    operation, text.splitlines()[0].removeprefix("path: "), dtype, mode,
                    "sequence split: planned" in text, options[PATH_AT]))
            return result

        return call

    def _watched_question(self, function):
        def ask(*arguments):
            try:
                return function(*arguments)
            except Exception as error:
                self._note_rejection(arguments[PATH_AT], error)
                raise

        return ask

    def _note_rejection(self, path, error):
        if self.named is not None and path == self.named and REJECTED.search(str(error)):
            self.rejections.append(str(error))

    def properties(self):
        """The (name, value) pairs of the test that runs."""
        found = []
        for name, calls in (("calls", self.calls), ("planned", [c for c in self.calls if c.planned])):
            counted = collections.Counter((c.operation, c.path, c.dtype) for c in calls)
            found += [(name, " ".join((*key, str(count)))) for key, count in sorted(counted.items())]
        return found

    # --- tests that name a path ---

    def missing(self, path):
        """Why this run has no calls on `path`, or None."""
        if self.named not in (None, path):
            return f"about path {path}: this run is held to path {self.named}"
        if self.device == "cpu":
            return None if path in ("cpu", "reference") else f"about path {path}: needs --device cuda"
        if path not in build_info()[FORWARD].split():
            return f"about path {path}: not in this build"
        return f"about path {path}: needs a GPU of compute capability 9.0" if path == "sm90" and not is_hopper() else None

    def judge(self, path, operations=(FORWARD, BACKWARD), planned=False):
        """Fails a test about `path` of which another path has computed something; calls that name their own path are free."""
        judged = [c for c in self.calls if c.named == self.named and c.operation in operations]
        if not judged:
            pytest.fail(f"about path {path}, but it made no call that a path could be chosen for", pytrace=False)
        others = {f"{c.operation} in {c.dtype} by {c.path}" for c in judged if c.path != path}
        if others:
            pytest.fail(f"about path {path}, but computed: {', '.join(sorted(others))}", pytrace=False)
        whole = {c.mode for c in judged if c.operation == FORWARD and c.mode != "False" and not c.planned}
        if planned and whole:
            pytest.fail(f"about sequences that are cut, but not planned with auto_cp={', '.join(sorted(whole))}", pytrace=False)

    def _skip_if_rejected(self):
        """What failed behind a call that the named path rejects is a skip: also where the test caught the error itself."""
        if self.rejections:
            raise pytest.skip.Exception(f"path {self.named} does not compute this: {self.rejections[0]}") from None

    # --- hooks ---

    def pytest_collection_modifyitems(self, items):
        for item in items:
            item.user_properties += requirement_of(item)
            marker = item.get_closest_marker("path")
            reason = marker and self.missing(marker.args[0])
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))

    def pytest_deselected(self, items):
        self.partial |= {subject_of_test(item.nodeid, requirement_of(item)) for item in items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.calls, self.rejections = [], []
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item):
        try:
            return (yield)
        except (Exception, pytest.fail.Exception):
            self._skip_if_rejected()
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        try:
            result = yield
        except (Exception, pytest.fail.Exception):
            self._skip_if_rejected()
            raise
        finally:
            item.user_properties += self.properties()
        marker = item.get_closest_marker("path")
        if marker is not None:
            self.judge(*marker.args, **marker.kwargs)
        return result

    # --- the table, where reports arrive: in the one process, or in the one that has started the workers ---

    def pytest_runtest_logreport(self, report):
        if report.skipped and self.named and f"path {self.named} does not compute this" in str(report.longrepr):
            self.rejected += 1
        if report.when == "call" and not report.skipped:
            self.computed[report.nodeid] = subject_of_test(report.nodeid, report.user_properties)
        if report.when == "teardown" and report.nodeid in self.computed:
            for name, value in report.user_properties:
                if name == "calls":
                    self.cases[self.computed[report.nodeid]][tuple(value.split()[:3])] += 1

    def lacking(self):
        """Sentences on what path sm90 should have computed in this run and has not."""
        if self.device != "cuda" or self.named is not None or not is_hopper():
            return []
        if any("::" in argument for argument in self.config.args):  # single tests: no subject is whole
            return []
        whole = {*self.computed.values()} - self.partial
        if not self.partial and all(Path(argument).is_dir() for argument in self.config.args):
            whole = set(SM90_NEEDS)
        return [
            f"{subject}: no case of {operation} on path sm90 in {dtype}" for subject in SM90_NEEDS if subject in whole
            for operation in SM90_NEEDS[subject] for dtype in SM90_DTYPES[:1 if subject in BF16_ALONE else None]
            if not self.cases[subject][operation, "sm90", dtype]]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session, exitstatus):
        if hasattr(self.config, "workeroutput"):  # a worker of pytest-xdist: who started it judges
            self.config.workeroutput["partial"] = sorted(self.partial)
        elif exitstatus == pytest.ExitCode.OK and self.lacking():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        self.partial.update(getattr(node, "workeroutput", {}).get("partial", ()))

    def pytest_terminal_summary(self, terminalreporter):
        if self.named:
            terminalreporter.section("calls that the path rejects")
            terminalreporter.line(f"path {self.named}: {self.rejected} tests skipped for calls that it does not compute")
        if self.device == "cuda" and self.cases:
            terminalreporter.section("cases by requirement, path and dtype")
            for subject in sorted(self.cases, key=lambda name: (not name.startswith("requirement"), len(name), name)):
                for operation in sorted({key[0] for key in self.cases[subject]}):
                    counted = sorted((path, dtype, n) for (of, path, dtype), n in self.cases[subject].items() if of == operation)
                    row = ", ".join(f"{path} {dtype} {n}" for path, dtype, n in counted)
                    terminalreporter.line(f"{subject:<16} {operation:<15} {row}")
        for sentence in self.lacking():
            terminalreporter.line(f"FAILED {sentence}", red=True)


def requirement_of(item):
    """The marker `requirement` of a test as a property, or nothing."""
    marker = item.get_closest_marker("requirement")
    return [("requirement", str(marker.args[0]))] if marker else []


def subject_of_test(nodeid, properties):
    file, _, name = nodeid.partition("::")
    return subject_of(Path(file).stem, name.rpartition("::")[2], properties)
