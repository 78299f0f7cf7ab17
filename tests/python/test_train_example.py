"""The training example, shortened: the same losses as Transformers' own functions at every step."""

from pathlib import Path

import helpers
import pytest

pytest.importorskip("transformers.models.qwen3_5")
pytest.importorskip("matplotlib")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "train_tiny.py"


def test_losses_of_a_short_training(tmp_path):
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the tests")
    picture = tmp_path / "curves.png"
    # One thread: so little work to a step that a team of them mostly waits for one another.
    arguments = [str(EXAMPLE), "--device", helpers.settings.device, "--steps", "25", "--batch", "2", "--tokens", "150",
                 "--plot", str(picture)]
    done = helpers.in_subprocess(
        f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path(sys.argv[0], run_name='__main__')",
        OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == 3, done.stdout
    assert picture.stat().st_size > 10_000
