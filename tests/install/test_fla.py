"""The integration with fla, against the registries of fla that are released, each case in a fresh interpreter.

The wheels come from PyPI (one megabyte each); what of them is used is in fla_skeleton.py. The cases are in fla_cases.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import fla_skeleton
import pytest

HERE = Path(__file__).resolve().parent

# The two forms of the registry: fla.backends, and fla.ops.backends before it.
VERSIONS = ["0.6.0", "0.5.2"]


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """Folder with a package `fla` by version."""
    base = tmp_path_factory.mktemp("fla")
    found = {}
    for version in VERSIONS:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "-d", base]
        done = subprocess.run([*command, f"fla-core=={version}"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"fla-core {version} could not be downloaded: {done.stderr.strip().splitlines()[-1]}")
        (wheel,) = base.glob(f"fla_core-{version}-*.whl")
        found[version] = fla_skeleton.build(wheel, base / version)
    return found


def run_case(case, folder=None, **environment):
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder or ""), environment.get("PYTHONPATH", "")]))
    done = subprocess.run([sys.executable, HERE / "fla_cases.py", case], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"{case} passed", done.stdout + done.stderr[-4000:]


@pytest.mark.parametrize("case", ["fla_first", "flash_qla_first"])
@pytest.mark.parametrize("version", VERSIONS)
def test_registered_in_both_orders_of_import(packages, version, case):
    run_case(case, packages[version])


@pytest.mark.parametrize("case", ["declines", "computed_calls", "layer"])
def test_backend(packages, case):
    run_case(case, packages["0.6.0"])


def test_the_layer_of_an_old_fla(packages):
    run_case("layer_of_an_old_fla", packages["0.5.2"])


@pytest.mark.parametrize("switch", [{"FLA_FLASH_QLA": "0"}, {"FLA_DISABLE_BACKEND_DISPATCH": "1"}], ids=str)
def test_switches(packages, switch):
    run_case("switched_off", packages["0.6.0"], **switch)


@pytest.mark.parametrize("case", ["without_fla", "unknown_registry"])
def test_without_a_known_registry(case):
    run_case(case)
