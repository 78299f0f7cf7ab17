"""The example that trains on packed documents, as a user starts it, and that its checks can fail."""

from pathlib import Path

import helpers
import pytest

pytest.importorskip("transformers.models.qwen3_5")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "python" / "train_packed.py"


def run(change="pass", steps=10):
    """The example, with `change` to its module first."""
    if not EXAMPLE.exists():
        pytest.skip("the examples are not beside the tests")
    # One thread: so little work to a step that a team of them mostly waits for one another.
    arguments = ["train_packed.py", "--device", helpers.settings.device, "--steps", str(steps)]
    code = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r}); sys.argv = {arguments!r}; import train_packed; {change}; "
    return helpers.in_subprocess(code + "sys.exit(train_packed.main())", OMP_NUM_THREADS="1")


def test_packed_documents_train_as_single_ones():
    done = run(steps=25)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == 4 and "FAIL" not in done.stdout, done.stdout


def test_documents_that_see_each_other_are_found():
    """Without offsets convolution and delta rule mix the documents, and the attention alone keeps them apart."""
    done = run("call = train_packed.build_model().__class__.forward; train_packed.build_model().__class__.forward = "
               "lambda self, *x, cu_seq_lens_q=None, **more: call(self, *x, **more)")  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "FAIL  largest difference in the first 50 steps" in done.stdout
