"""The wheel that tools/setup.sh built, in an environment with nothing but its own dependencies: no PyTorch."""

import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, header_version, run


@pytest.fixture(scope="module")
def wheel():
    wheels = list((ROOT / "build" / "wheels").glob("flash_qla_native-*.whl"))
    assert len(wheels) == 1, f"tools/setup.sh leaves one wheel in build/wheels, found {wheels}"
    return wheels[0]


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """Interpreter of a new environment that holds the wheel and what it asks for."""
    environment = tmp_path_factory.mktemp("wheel") / "venv"
    run(sys.executable, "-m", "venv", environment)
    run(environment / "bin" / "pip", "install", "-q", "--disable-pip-version-check", wheel)
    return environment / "bin" / "python"


def test_wheel_is_for_every_python(wheel):
    assert re.fullmatch(r"flash_qla_native-[\d.]+-py3-none-\w+\.whl", wheel.name)


def test_wheel_holds_the_package_alone(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"flash_qla", next(top for top in tops if top.endswith(".dist-info"))}
    assert "flash_qla/py.typed" in names
    assert [name for name in names if name.endswith(".so")] == ["flash_qla/_lib/flash_qla_ffi.so"]


def test_numpy_calls_without_torch(python, tmp_path):
    output = run(python, ROOT / "tools" / "wheel_program.py", cwd=tmp_path)
    assert output.startswith(f"flash_qla {header_version()} with apache-tvm-ffi "), output
    assert run(python, "-c", "import flash_qla, sys; print('torch' in sys.modules)", cwd=tmp_path).strip() == "False"


def test_command_line_says_what_it_needs(python, tmp_path):
    """Without the cli extra the command ends with the name of what to install, not with a traceback."""
    done = subprocess.run([python, "-m", "flash_qla", "info"], capture_output=True, text=True, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert done.returncode == 0 or "flash-qla-native[cli]" in output
