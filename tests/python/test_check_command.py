"""`python -m flash_qla check`, and the metric that it and the bench judge by: the same as that of these tests."""

import importlib

import helpers
import pytest
import torch

pytest.importorskip("typer")

from typer.testing import CliRunner

import flash_qla
from flash_qla.cli import app, errors

pytestmark = pytest.mark.cpu_only

check = importlib.import_module("flash_qla.cli.check")  # the package has a command of this name

SHAPES = {"o": (1, 50, 3, 16), "dbeta": (1, 50, 3), "dh0": (2, 3, 16, 16), "final_state": (2, 3, 16, 16)}


def a_reference(name, kind):
    """Drawn numbers, of which all or one head may be zero or nothing but rounding."""
    want = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    head = want.select(helpers.TENSORS[name][1], 1)
    {"drawn": lambda: None, "zeros": want.zero_, "a head of zeros": head.zero_, "tiny": lambda: want.mul_(9e-7),
     "a tiny head": lambda: head.mul_(9e-7), "small": lambda: want.mul_(1e-5)}[kind]()  # fmt: skip
    return want


def suite_accepts(name, found, want, dtype):
    try:
        helpers.assert_close(name, found.to(dtype), want.numpy(), helpers.bound_for(name, dtype), helpers.TENSORS[name][1])
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("kind", ["drawn", "zeros", "a head of zeros", "tiny", "a tiny head", "small"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("off", [0.0, 1e-7, 5e-7, 2e-6, 1e-4, 4e-3, 1e-2, 5e-2])
def test_the_metric_is_that_of_the_suite(name, kind, off):
    """The same tensors get the same verdict, off by a share of themselves or by a number everywhere."""
    dtype = torch.float32 if off < 1e-5 else torch.bfloat16  # whose bounds lie in this range
    want = a_reference(name, kind)
    for found in (want * (1 + off), want + off, want.where(want != want.flatten()[0], want + 300 * off)):
        found = found.float()  # as assert_close() sees it: stored values
        if dtype == torch.bfloat16:
            found = found.bfloat16()
        failure = errors.first_failure({name: found}, {name: want}, dtype)[1]
        assert (failure is None) == suite_accepts(name, found, want, dtype), failure
        whole, *heads = errors.errors_of(name, found, want)
        theirs = helpers.relative_error(helpers.to_numpy(found), want.numpy())
        assert whole == pytest.approx(theirs, rel=1e-12) and len(heads) == 3


def test_its_numbers_are_those_of_the_suite():
    assert errors.TINY == helpers.ABSOLUTE
    for name in ("o", "final_state", "dq", "dk", "dv", "dh0", "dbeta", "dg", "dA_log", "ddt_bias"):
        for dtype in helpers.FLOATS:
            assert errors.bound(name, dtype) == helpers.bound_for(name, dtype)


def test_an_o_of_zeros_that_is_off_everywhere_fails():
    zeros = torch.zeros(SHAPES["o"], dtype=torch.float64)
    found = torch.full(SHAPES["o"], 4e-3, dtype=torch.bfloat16)
    relative, failure = errors.first_failure({"o": found}, {"o": zeros}, torch.bfloat16)
    assert relative == {"o": None} and failure.startswith("o: error 4.0e-03 (root mean square) of a reference that is zero")
    assert not suite_accepts("o", found, zeros, torch.bfloat16)
    assert errors.head_errors("o", found, zeros) == [], "a head of zeros has no relative error to make a ratio of"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_must_stand_in_the_same_places(value):
    want = a_reference("o", "drawn")
    want[0, 7, 2, 3] = value
    for found, right in ((want, True), (want.where(want.isfinite(), 0.0), False), (want.where(want.isfinite(), -value), value != value)):
        assert (errors.first_failure({"o": found.bfloat16()}, {"o": want}, torch.bfloat16)[1] is None) == right
        assert suite_accepts("o", found, want, torch.bfloat16) == right


@pytest.mark.parametrize("number", ["9999", "-1", "21"])
def test_only_must_be_a_case_of_the_set(number):
    result = CliRunner().invoke(app, ["check", "--only", number])
    assert result.exit_code == 2
    assert f"check: --only must be from 0 to 20, the cases of develop ({number})" in result.output


def test_what_is_not_split_is_checked_too(monkeypatch):
    right = flash_qla.chunk_gated_delta_rule

    def wrong_unsplit(*args, auto_cp=True, **options):
        o, final_state = right(*args, auto_cp=auto_cp, **options)
        return (o if auto_cp else o * 1.1), final_state

    monkeypatch.setattr(flash_qla, "chunk_gated_delta_rule", wrong_unsplit)
    result = CliRunner().invoke(app, ["check", "--only", "3", "--num-heads", "2"])
    assert result.exit_code == 1 and "with auto_cp=False o: relative L2 1.0e-01" in result.output
    assert "0 of 1 cases passed" in result.output


@pytest.mark.parametrize("tensor, only, verdict", [("dq", "0", "MISS"), ("dk", "0", "FAIL"), ("dq", "6", "FAIL")])
def test_a_known_miss_is_told_from_a_failure(tensor, only, verdict, monkeypatch):
    """dq of few tokens (case 0: one) with auto_cp=False alone."""
    right = check.compute

    def off(case, x, dtype, auto_cp=True):
        results = right(case, x, dtype, auto_cp)
        return results if auto_cp else {name: t * 1.1 if name == tensor else t for name, t in results.items()}

    monkeypatch.setattr(check, "compute", off)
    result = CliRunner().invoke(app, ["check", "--only", only, "--num-heads", "2"])
    assert f"{verdict}  " in result.output and f"with auto_cp=False {tensor}: relative L2 1.0e-01" in result.output
    assert ("1 known misses" in result.output) == (verdict == "MISS") and "0 of 1 cases passed" in result.output
    assert result.exit_code == (0 if verdict == "MISS" else 1)
