"""The record of paths (paths_plugin.py): what it notes, what it says in the junit file, and when a run fails by it."""

from types import SimpleNamespace

import helpers
import paths_plugin
import pytest
import torch
from helpers import make_inputs

import flash_qla


def chosen(device):
    return helpers.settings.path if helpers.settings.path != "auto" else {"cpu": "cpu", "cuda": "cuda_generic"}[device]


def test_calls_are_recorded_with_their_path_dtype_and_mode(paths, device):
    # K = 16: no path of a GPU prefers these to the generic one.
    helpers.run(make_inputs(T=10, Hq=1, K=16, dtype=torch.bfloat16), auto_cp="invariant", force_intra_cp=True)
    with flash_qla.use_path("reference" if device == "cpu" else "cuda_reference"):
        helpers.run(make_inputs(T=10, Hq=1, K=16), grads=False, auto_cp=False)
    path, oracle = chosen(device), "reference" if device == "cpu" else "cuda_reference"
    named = None if helpers.settings.path == "auto" else helpers.settings.path
    assert paths.calls == [
        ("chunk_forward", path, "bfloat16", "invariant forced", False, named),
        ("chunk_backward", path, "bfloat16", "invariant forced", False, named),
        ("chunk_forward", oracle, "float32", "False", False, oracle)]
    assert paths.properties() == sorted([
        ("calls", f"chunk_backward {path} bfloat16 1"), ("calls", f"chunk_forward {path} bfloat16 1"),
        ("calls", f"chunk_forward {oracle} float32 1")])


def test_questions_are_no_calls(paths):
    x = make_inputs(T=10, Hq=1, K=16)
    flash_qla.explain(x.q, x.k, x.v, x.g, x.beta)
    flash_qla.workspace_size("chunk_gated_delta_rule", 10, 1, 1, 1, 16, 16, device=helpers.settings.device)
    assert paths.calls == []


def test_a_test_about_a_path_fails_on_another(paths, device):
    x = make_inputs(T=10, Hq=1, K=16)
    with pytest.raises(pytest.fail.Exception, match="made no call"):
        paths.judge(chosen(device))
    helpers.run(x, grads=False)
    paths.judge(chosen(device))
    with pytest.raises(pytest.fail.Exception, match=f"chunk_forward in float32 by {chosen(device)}"):
        paths.judge("another")
    with pytest.raises(pytest.fail.Exception, match="not planned with auto_cp=True"):
        paths.judge(chosen(device), planned=True)
    paths.calls.clear()
    helpers.run(x, grads=False, auto_cp=False)
    paths.judge(chosen(device), planned=True)  # whole on purpose


@pytest.fixture
def gpu_run(monkeypatch):
    """A plugin of its own, as in a run on a Hopper GPU; hand it the reports of such a run."""
    monkeypatch.setattr(paths_plugin, "is_hopper", lambda: True)
    paths = paths_plugin.Paths("cuda", config=SimpleNamespace(args=["tests/python/test_lengths.py"]))

    def report(test, *calls):
        nodeid = f"tests/python/test_lengths.py::{test}[case]"
        for when in ("call", "teardown"):
            paths.pytest_runtest_logreport(SimpleNamespace(
                when=when, nodeid=nodeid, skipped=False, user_properties=[["requirement", "7"], *(["calls", value] for value in calls)]))

    return paths, report


def test_a_requirement_without_the_hopper_path_fails_the_run(gpu_run):
    paths, report = gpu_run
    report("test_a", "chunk_forward sm90 bfloat16 3", "chunk_backward sm90 bfloat16 3", "chunk_forward sm90 float16 1")
    assert paths.lacking() == ["requirement 7: no case of chunk_backward on path sm90 in float16"]
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    paths.pytest_sessionfinish(session, pytest.ExitCode.OK)
    assert session.exitstatus == pytest.ExitCode.TESTS_FAILED
    report("test_b", "chunk_backward sm90 float16 1", "chunk_backward cuda_generic bfloat16 1")
    assert paths.lacking() == []
    assert paths.cases["requirement 7"]["chunk_backward", "sm90", "float16"] == 1


def test_only_whole_requirements_of_a_run_on_the_chosen_path_are_judged(gpu_run, tmp_path):
    paths, report = gpu_run
    report("test_a", "chunk_forward cuda_generic bfloat16 3")
    assert len(paths.lacking()) == 4
    for change in (dict(named="cuda_generic"), dict(device="cpu"), dict(partial={"requirement 7"}),
                   dict(config=SimpleNamespace(args=["tests/python/test_lengths.py::test_a"]))):
        before = {name: getattr(paths, name) for name in change}
        vars(paths).update(change)
        assert paths.lacking() == [], change
        vars(paths).update(before)
    # Of a whole directory a requirement that has not run at all is missed as well.
    paths.config = SimpleNamespace(args=[str(tmp_path)])
    assert {sentence.partition(":")[0] for sentence in paths.lacking()} == set(paths_plugin.SM90_NEEDS)


def test_a_marker_names_the_subject():
    marked = SimpleNamespace(get_closest_marker=lambda name: SimpleNamespace(args=(12,)) if name == "requirement" else None)
    plain = SimpleNamespace(get_closest_marker=lambda name: None)
    assert paths_plugin.requirement_of(marked) == [("requirement", "12")] and paths_plugin.requirement_of(plain) == []
    assert paths_plugin.subject_of_test("tests/python/test_repeat.py::test_a[1]", paths_plugin.requirement_of(marked)) == "requirement 12"
    assert paths_plugin.subject_of_test("tests/python/test_pool.py::test_a", []) == "pool"
