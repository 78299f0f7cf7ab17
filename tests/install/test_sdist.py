"""The source distribution: what is in it, and that pip builds the same package from it as from the tree."""

import os
import re
import sys
import tarfile
import zipfile

import pytest
from conftest import ROOT, header_version, run


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Made as pip and `python -m build` do it: by the hook of PEP 517 in tools/build_backend.py."""
    out = tmp_path_factory.mktemp("sdist")
    program = "import build_backend, sys; build_backend.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", program, out, cwd=ROOT, env=dict(os.environ, PYTHONPATH=str(ROOT / "tools")))
    (archive,) = out.iterdir()
    return archive


@pytest.fixture(scope="module")
def python(sdist, tmp_path_factory):
    """Interpreter of a new environment in which pip has built and installed the source distribution."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", environment)
    # Not this environment's packages, tools or folders: pip gets what pyproject.toml asks for.
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    kept |= {"FLASH_QLA_CUDA": "OFF", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    run(environment / "bin" / "pip", "install", "-q", "--disable-pip-version-check", sdist, env=kept)
    return environment / "bin" / "python"


def test_sources_and_backend_are_in_it_and_results_are_not(sdist):
    assert sdist.name == f"flash_qla_native-{header_version()}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "tools/build_backend.py"} <= names
    assert {"tools/wheel.sh", "tools/wheel_check.py", "bindings/ffi/exports.map"} <= names
    for folder in ("src", "include", "cmake", "bindings", "python"):
        tree = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
        made = {name for name in tree if re.search(r"(__pycache__|\.egg-info)/|/_lib/|\.so$", name)}
        assert tree - made <= names, f"left out: {sorted(tree - made - names)}"
    strange = [name for name in names if re.match(r"(build|dist|benchmarks/results|\.venv)/", name) or name.endswith(".so")]
    assert strange == []


def test_pip_installs_the_same_files_as_the_wheel_from_the_tree(python):
    program = (
        "import importlib.metadata as m; print(*(f for f in m.files('flash-qla-native') if f.parts[0] == 'flash_qla'), sep='\\n')"
    )
    installed = {name for name in run(python, "-c", program).splitlines() if "__pycache__" not in name}
    (wheel,) = (ROOT / "build" / "wheels").glob("flash_qla_native-*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("flash_qla/") and name[-1] != "/"}
    assert installed == packed


def test_what_pip_built_computes(python):
    assert f"flash_qla {header_version()}" in run(python, ROOT / "tools" / "wheel_program.py")
