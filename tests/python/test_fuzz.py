"""Requirement 21: a few cases of tests/fuzz/fuzz.py, on a GPU against the CPU path too; the command itself runs as many as there
is time for."""

import sys
from pathlib import Path

import helpers
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fuzz"))
import fuzz

pytestmark = pytest.mark.requirement(21)

CASES = {"cpu": 30, "cuda": 300}
HOPPER_CASES = 60


def run(tenth, count, device, hopper=False):
    for number in range(tenth * count, (tenth + 1) * count):
        case = fuzz.draw_case(0, number, hopper)
        try:
            fuzz.run_case(case, device, "cpu")
        except AssertionError as error:
            raise AssertionError(f"case {number}: {error}\nrepeat: python tests/fuzz/fuzz.py --seed 0 --case {number} --device {device} "
                                 f"--path {helpers.settings.path} --against cpu{' --hopper' * hopper}\n{case}") from error


def test_cases_are_drawn_from_seed_and_number_alone():
    assert fuzz.draw_case(3, 14) == fuzz.draw_case(3, 14)
    assert fuzz.draw_case(3, 14) != fuzz.draw_case(4, 14)


@pytest.mark.early
@pytest.mark.parametrize("tenth", range(10))
def test_seed_0(tenth, device):
    run(tenth, CASES[device] // 10, device)


@pytest.mark.early
@pytest.mark.cuda
@pytest.mark.parametrize("tenth", range(10))
def test_seed_0_of_the_hopper_path(tenth, device):
    run(tenth, HOPPER_CASES // 10, device, hopper=True)
