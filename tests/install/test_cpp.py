"""C and C++ projects that use the library as its users do: add_subdirectory, find_package, pkg-config."""

import os
import re
import shutil

import pytest
from conftest import ROOT, configure, configure_and_build, header_version, run

EXAMPLE = ROOT / "examples" / "cpp"
C_PROGRAM = ROOT / "tests" / "install" / "c99"
AGREEMENT = re.compile(r"relative error against the recurrence: (\S+)")


def assert_example_agrees(program, **options):
    error = float(AGREEMENT.search(run(program, **options))[1])
    assert error < 1e-5


def test_add_subdirectory(subdirectory_build):
    assert_example_agrees(subdirectory_build / "prefill")


def test_find_package_from_cpp17(prefix, tmp_path):
    configure_and_build(EXAMPLE, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}", "-DCMAKE_CXX_STANDARD=17")
    assert_example_agrees(tmp_path / "prefill")
    assert "over 2 ranks: relative difference from one call" in run(tmp_path / "several_cards")  # exits with 1 above 1e-5


def test_find_package_from_c99(prefix, tmp_path):
    configure_and_build(C_PROGRAM, tmp_path, f"-DCMAKE_PREFIX_PATH={prefix}")
    output = run(tmp_path / "c_consumer")
    assert "o[2] = 11" in output
    assert "refused as it should be: recurrent: " in output


def test_find_package_refuses_another_minor_version(prefix, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.25)\nproject(x LANGUAGES CXX)\n"
        'find_package(flash_qla 0.99 QUIET)\nif(flash_qla_FOUND)\n  message(FATAL_ERROR "found")\nendif()\n'
    )
    configure(tmp_path, tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")


@pytest.mark.skipif(shutil.which("pkg-config") is None, reason="pkg-config is not installed")
@pytest.mark.parametrize(
    "compiler, standard, source, program_output",
    [("g++", "c++17", EXAMPLE / "prefill.cpp", "relative error"), ("gcc", "c99", C_PROGRAM / "main.c", "o[2] = 11")],
)
def test_pkg_config(prefix, tmp_path, compiler, standard, source, program_output):
    environment = dict(os.environ, PKG_CONFIG_PATH=str(next(prefix.rglob("pkgconfig"))))
    flags = run("pkg-config", "--cflags", "--libs", "flash_qla", env=environment).split()
    library_dir = next(prefix.rglob("libflash_qla.*")).parent
    run(compiler, f"-std={standard}", source, "-o", tmp_path / "program", *flags)
    assert program_output in run(tmp_path / "program", env=dict(os.environ, LD_LIBRARY_PATH=str(library_dir)))


def test_installation_has_the_version_of_the_header(prefix):
    environment = dict(os.environ, PKG_CONFIG_PATH=str(next(prefix.rglob("pkgconfig"))))
    if shutil.which("pkg-config"):
        assert run("pkg-config", "--modversion", "flash_qla", env=environment).strip() == header_version()
    assert f'"{header_version()}"' in next(prefix.rglob("flash_qlaConfigVersion.cmake")).read_text()


def test_shared_library_exports_the_c_interface_alone(shared_prefix):
    library = next(shared_prefix.rglob("libflash_qla.so"))
    symbols = [line.split()[-1] for line in run("nm", "-D", "--defined-only", library).splitlines()]
    assert "flash_qla_chunk_forward_run" in symbols
    ours = [name for name in symbols if "flash_qla" in name and not name.startswith("flash_qla_")]
    assert ours == []
