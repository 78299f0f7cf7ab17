"""Where the library cannot be built, the build stops with a sentence that says why."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import build_backend  # noqa: E402


def configure(build, *definitions):
    command = ["cmake", "-S", ROOT, "-B", build, "-DFLASH_QLA_CUDA=OFF", *definitions]
    command += ["-G", "Ninja"] if shutil.which("ninja") else []
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    return done.returncode, " ".join(done.stderr.split())


def test_another_system(tmp_path):
    code, said = configure(tmp_path, "-DCMAKE_SYSTEM_NAME=FreeBSD")
    assert code != 0
    assert "flash_qla can be built for Linux alone, and this build is for FreeBSD." in said


def test_a_compiler_without_cxx20(tmp_path):
    """A compiler that takes the option for C++20 and knows C++17, as the first ones did."""
    compiler = tmp_path / "old-c++"
    compiler.write_text('#!/bin/bash\nexec g++ "${@/#-std=*++2[0a]/-std=c++17}"\n')
    compiler.chmod(0o755)
    code, said = configure(tmp_path / "build", f"-DCMAKE_CXX_COMPILER={compiler}")
    assert code != 0
    assert f"flash_qla needs a compiler for C++20, and {compiler} (GNU" in said


def test_this_compiler(tmp_path):
    code, said = configure(tmp_path)
    assert code == 0, said


@pytest.mark.parametrize("hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"])
def test_pip_on_another_system(monkeypatch, hook):
    monkeypatch.setattr(build_backend.platform, "system", lambda: "Darwin")
    with pytest.raises(SystemExit, match="flash-qla-native can be built on Linux alone, and this is Darwin."):
        getattr(build_backend, hook)()
