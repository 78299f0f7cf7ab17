"""Every public header compiles alone, without a warning, in the oldest language it promises."""

import pytest
from conftest import ROOT, run

INCLUDE = ROOT / "include"
HEADERS = sorted(path.relative_to(INCLUDE).as_posix() for path in INCLUDE.rglob("*.h"))
STRICT = ["-Wall", "-Wextra", "-pedantic", "-Werror", "-fsyntax-only", "-I", INCLUDE]


def test_headers_are_found():
    assert {"flash_qla/c_api.h", "flash_qla/flash_qla.h"} <= set(HEADERS)


@pytest.mark.parametrize("header", HEADERS)
def test_header_is_cpp17(header, tmp_path):
    source = tmp_path / "alone.cpp"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    run("g++", "-std=c++17", *STRICT, source)


def test_c_header_is_c99(tmp_path):
    source = tmp_path / "alone.c"
    source.write_text('#include "flash_qla/c_api.h"\n#include "flash_qla/c_api.h"\n')
    run("gcc", "-std=c99", *STRICT, source)
