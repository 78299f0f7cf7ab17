"""The example of one text over several ranks, as a user starts it: torchrun, gloo, unequal shares."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "long_context.py"

pytestmark = pytest.mark.cpu_only


def torchrun(ranks, *arguments):
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the tests")
    path = os.pathsep.join([*(p for p in sys.path if p), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLE)]
    return subprocess.run([*command, "--backend", "gloo", "--compare", *arguments], capture_output=True, text=True, timeout=240,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


@pytest.mark.parametrize("ranks, arguments", [(2, ["--mode", "train", "--steps", "2", "--layout", "zigzag", "--tokens", "800"]),
                                              (3, ["--tokens", "2000", "--shares", "500,900,600"])], ids=["train", "prefill"])
def test_one_text_over_several_ranks(ranks, arguments):
    done = torchrun(ranks, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokens per second" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("difference from one rank: "))
    wanted = ["outputs", "final states", "loss"] + (["gradients"] if "train" in arguments else [])
    assert all(name in line for name in wanted) and "(bound 1e-04)" in line
