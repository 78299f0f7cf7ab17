"""The wheel that tools/setup.sh built, in an environment with nothing but its own dependencies: no PyTorch."""

import re
import subprocess
import sys
import zipfile

import pytest
from conftest import ROOT, header_version, run

NUMPY_PROGRAM = """
import sys
import numpy as np
import flash_qla
assert "torch" not in sys.modules

rng = np.random.default_rng(0)
B, T, Hq, Hv, K, V = 1, 70, 1, 2, 8, 16
q, k = (rng.standard_normal((B, T, Hq, K), dtype=np.float32) for _ in range(2))
k /= np.linalg.norm(k, axis=-1, keepdims=True)
v = rng.standard_normal((B, T, Hv, V), dtype=np.float32)
g = -rng.random((B, T, Hv), dtype=np.float32)
beta = rng.random((B, T, Hv), dtype=np.float32)
_, _, o, _, state = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta)

expected = np.zeros((B, T, Hv, V))
for h in range(Hv):
    S = np.zeros((K, V))
    for t in range(T):
        kt, qt = k[0, t, 0].astype(float), q[0, t, 0].astype(float)
        S *= np.exp(float(g[0, t, h]))
        S += np.outer(kt, beta[0, t, h] * (v[0, t, h] - S.T @ kt))
        expected[0, t, h] = S.T @ qt / np.sqrt(K)
error = np.linalg.norm(np.asarray(o) - expected) / np.linalg.norm(expected)
assert error < 5e-5, error
assert np.asarray(state).shape == (1, Hv, K, V)
print("version", flash_qla.__version__)
"""


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


def test_numpy_call_without_torch(python, tmp_path):
    version = re.search(r"version (\S+)", run(python, "-c", NUMPY_PROGRAM, cwd=tmp_path))[1]
    assert version == header_version()


def test_command_line_says_what_it_needs(python, tmp_path):
    """Without the cli extra the command ends with the name of what to install, not with a traceback."""
    done = subprocess.run([python, "-m", "flash_qla", "info"], capture_output=True, text=True, cwd=tmp_path)
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert done.returncode == 0 or "flash-qla-native[cli]" in output
