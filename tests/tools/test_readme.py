"""The code in README.md runs as it stands there: Python block after block, as a reader would paste it, and C++ compiles."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_python_blocks_run_in_order(capsys):
    pytest.importorskip("flash_qla")
    assert len(blocks("python")) >= 3
    names = {}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
    try:
        assert names["o"].isfinite().all()
        assert names["q"].grad is not None and names["state_pool"][[3, 5]].any() and not names["state_pool"][0].any()
        assert "path" in capsys.readouterr().out, "explain() was printed"
    finally:
        names["integration"].unpatch()


# What the lines of the C++ block stand in: the caller's tensors, sizes, scratch and stream.
SURROUNDINGS = """
#include <cstddef>
#include <cstdint>
{includes}
int fail(const char* message);
int prefill(const float* q, int64_t B, int64_t T, int64_t Hq, int64_t K, void* workspace, void* stream) {{
{body}
  return 0;
}}
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_cpp_block_compiles(tmp_path):
    (block,) = blocks("cpp")
    includes, body = ("\n".join(line for line in block.splitlines() if line.startswith("#include") == wanted) for wanted in (True, False))
    source = tmp_path / "block.cpp"
    source.write_text(SURROUNDINGS.format(includes=includes, body=body))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
