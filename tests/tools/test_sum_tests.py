"""The sum of the runners counts every outcome of both JUnit dialects."""

import subprocess
import sys
from pathlib import Path

SUM = Path(__file__).resolve().parents[2] / "tools" / "sum_tests.py"
PYTEST = """<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>
<testcase name="c"><skipped/></testcase><testcase name="d"><error/></testcase></testsuite></testsuites>"""
CTEST = """<testsuite><testcase name="e" status="run"/><testcase name="f" status="fail"><failure/></testcase>
<testcase name="g" status="notrun"/></testsuite>"""


def run(tmp_path, *texts):
    paths = []
    for i, text in enumerate(texts):
        paths.append(tmp_path / f"{i}.xml")
        paths[-1].write_text(text)
    return subprocess.run([sys.executable, SUM, *paths], capture_output=True, text=True)


def test_all_runners_are_added_up(tmp_path):
    done = run(tmp_path, PYTEST, CTEST)
    assert done.stdout == "2 passed, 3 failed, 2 skipped\n"
    assert done.returncode == 1


def test_success_needs_a_test_that_ran(tmp_path):
    assert run(tmp_path, '<testsuite><testcase name="a"/></testsuite>').returncode == 0
    assert run(tmp_path, "<testsuite/>").returncode == 1
