"""The Python in README.md runs as it stands there, block after block, as a reader would paste it."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flash_qla")
README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order():
    assert len(BLOCKS) >= 3
    names = {}
    for block in BLOCKS:
        exec(compile(block, "README.md", "exec"), names)
    try:
        assert names["o"].isfinite().all()
        assert names["q"].grad is not None and names["state_pool"][[3, 5]].any() and not names["state_pool"][0].any()
    finally:
        names["integration"].unpatch()
