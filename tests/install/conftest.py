"""The library built and installed the two ways its users can have it: static and shared, CPU backend alone."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **options):
    """Output of a command; a failing one shows all it said."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def header_version():
    """The project's version where it is defined."""
    header = (ROOT / "include" / "flash_qla" / "flash_qla.h").read_text()
    return ".".join(re.search(rf"VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def configure(source, build, *definitions):
    # A machine may have Ninja (from PyPI) and no make, which is CMake's default.
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    run("cmake", "-S", source, "-B", build, *generator, "-DCMAKE_BUILD_TYPE=Release", *definitions)


def configure_and_build(source, build, *definitions):
    configure(source, build, *definitions)
    run("cmake", "--build", build, "--parallel", os.cpu_count())
    return build


@pytest.fixture(scope="session")
def subdirectory_build(tmp_path_factory):
    """A project that takes the library in with add_subdirectory(); its build also installs the static library."""
    base = tmp_path_factory.mktemp("static")
    return configure_and_build(
        ROOT / "tests" / "install" / "subdirectory",
        base / "build",
        f"-DFLASH_QLA_SOURCE_DIR={ROOT}",
        "-DFLASH_QLA_CUDA=OFF",
        "-DFLASH_QLA_INSTALL=ON",
        "-DCMAKE_CXX_STANDARD=17",
        f"-DCMAKE_INSTALL_PREFIX={base / 'installed'}",
    )


@pytest.fixture(scope="session")
def static_prefix(subdirectory_build):
    run("cmake", "--install", subdirectory_build)
    return subdirectory_build.parent / "installed"


@pytest.fixture(scope="session")
def shared_prefix(tmp_path_factory):
    base = tmp_path_factory.mktemp("shared")
    prefix = base / "installed"
    build = configure_and_build(
        ROOT, base / "build", "-DFLASH_QLA_CUDA=OFF", "-DBUILD_SHARED_LIBS=ON", f"-DCMAKE_INSTALL_PREFIX={prefix}"
    )
    run("cmake", "--install", build)
    return prefix


@pytest.fixture(params=["static", "shared"])
def prefix(request):
    return request.getfixturevalue(f"{request.param}_prefix")
