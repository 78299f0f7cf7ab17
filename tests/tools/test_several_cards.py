"""tools/several_cards.sh: what it runs on how many GPUs, told by an interpreter that writes down its arguments."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Fails where its arguments say so.
STUB = """#!/bin/sh
echo "$PYTHONPATH | $*" >> {log}
case "$*" in *{bad}*) exit 3 ;; esac
"""


def ran(tmp_path, *steps, bad="nothing", **settings):
    """The exit code, and the lines of arguments."""
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(STUB.format(log=log, bad=bad))
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), "OUT": str(tmp_path / "out"), "PYTHONPATH": "ours", **settings}
    found = subprocess.run([ROOT / "tools" / "several_cards.sh", *steps], env=environment, capture_output=True, text=True, timeout=60)
    return found, log.read_text().splitlines() if log.exists() else []


def test_one_command_runs_tests_example_and_table(tmp_path):
    found, lines = ran(tmp_path, GPUS="2")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "--device cuda" in lines[0] and "tests/python/test_cards_gpus.py" in lines[0]
    examples = [line for line in lines if "long_context.py" in line]
    assert len(examples) == 4 and all("--nproc-per-node 2 " in line and "--compare" in line for line in examples)
    tables = [line for line in lines if "-m flash_qla bench" in line]
    assert [line.split("--nproc-per-node ")[1][0] for line in tables] == ["1", "2"]
    assert lines == [lines[0], *examples, *tables]
    for line in [*examples, *tables]:
        script = next((word for word in line.split() if word.endswith(".py")), None)
        assert script is None or (ROOT / script).exists()
    assert all((ROOT / word).exists() for word in lines[0].split() if word.endswith(".py"))


def test_as_many_cards_as_there_are(tmp_path):
    found, lines = ran(tmp_path, "table", GPUS="4", SEQS="1x131072")
    assert found.returncode == 0
    assert [line.split("--nproc-per-node ")[1][0] for line in lines] == ["1", "2", "4"]
    assert all("--seqs 1x131072" in line and "--merge" in line for line in lines)


def test_other_packages_run_with_their_own_folder_alone(tmp_path):
    found, lines = ran(tmp_path, "table", GPUS="2", PEERS="fla=/x/fla flashqla=/x/qla")
    assert found.returncode == 0
    theirs, ours = [line for line in lines if "bench_cards_peers.py" in line], [line for line in lines if "flash_qla bench" in line]
    assert [(line.split(" | ")[0], line.split("bench_cards_peers.py ")[1].split()[0]) for line in theirs] == [("/x/fla", "fla"), ("/x/qla", "flashqla")]
    assert all(line.startswith("ours | ") and f"--peer-results {tmp_path}/out/peers" in line for line in ours)


def test_a_step_that_fails_stops_no_other(tmp_path):
    found, lines = ran(tmp_path, GPUS="2", bad="pytest")
    assert found.returncode == 1 and "--- exit code 3" in found.stdout
    assert len(lines) == 7


@pytest.mark.parametrize("gpus, steps, sentence", [("1", [], "needs 2 GPUs (found 1)"), ("2", ["x"], "STEP (x) must be suite, example or table")])
def test_what_is_refused(tmp_path, gpus, steps, sentence):
    found, lines = ran(tmp_path, *steps, GPUS=gpus)
    assert found.returncode == 2 and sentence in found.stdout and not lines
