"""The checks of a wheel: each passes on what a good wheel shows, and fails on each kind of trouble, by name."""

import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import wheel_check  # noqa: E402

NAME = "flash_qla_native-0.1.0-py3-none-manylinux_2_28_x86_64.whl"
TAGS = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: py3-none-manylinux_2_28_x86_64\n"
X86 = "  Class:                             ELF64\n  Machine:                           Advanced Micro Devices X86-64\n"

VERSIONS = """\
Version definition section '.gnu.version_d' contains 1 entries:
  000000: Rev: 1  Flags: BASE  Index: 1  Cnt: 1  Name: GLIBC_2.99

Version needs section '.gnu.version_r' contains 2 entries:
 Addr: 0x0000000000001000  Offset: 0x001000  Link: 4 (.dynstr)
  000000: Version: 1  File: libgcc_s.so.1  Cnt: 1
  0x0010:   Name: GCC_4.2.0  Flags: none  Version: 3
  0x0020: Version: 1  File: libc.so.6  Cnt: 2
  0x0030:   Name: GLIBC_2.27  Flags: none  Version: 4
  0x0040:   Name: GLIBC_2.2.5  Flags: none  Version: 2
"""
DYNAMIC = """\
 0x0000000000000001 (NEEDED)             Shared library: [libtvm_ffi.so]
 0x0000000000000001 (NEEDED)             Shared library: [libm.so.6]
 0x0000000000000001 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
 0x000000000000000e (SONAME)             Library soname: [flash_qla_ffi.so]
"""
SYMBOLS = """\
Symbol table '.dynsym' contains 6 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     0: 0000000000000000     0 NOTYPE  LOCAL  DEFAULT  UND
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND free@GLIBC_2.2.5 (2)
     2: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND __gmon_start__
     3: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND TVMFFIEnvGetStream
     4: 000000000008a7d0   100 FUNC    GLOBAL DEFAULT   12 __tvm_ffi_forward
"""
ROW = "     5: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND {}\n"


def test_a_good_wheel_has_no_problem():
    assert wheel_check.tag_problems(NAME, TAGS, X86) == []
    assert wheel_check.content_problems({wheel_check.MODULE: b"\x7fELF", "flash_qla/__init__.py": b'"""D'}) == []
    assert wheel_check.symbol_version_problems(VERSIONS) == []
    assert wheel_check.library_problems(DYNAMIC) == []
    assert wheel_check.symbol_problems(SYMBOLS) == []
    assert wheel_check.size_problems(64 << 20) == []


@pytest.mark.parametrize(
    "name, tags, header, word",
    [
        (NAME.replace("manylinux_2_28", "linux"), TAGS, X86, "linux_x86_64.whl is not"),
        (NAME.replace("2_28", "2_34"), TAGS, X86, "2_34"),
        (NAME.replace("py3-none", "cp311-cp311"), TAGS, X86, "cp311"),
        (NAME.replace("2_28_x86_64", "2_27_x86_64.manylinux_2_28_x86_64"), TAGS, X86, "2_27"),
        (NAME, TAGS.replace("2_28", "2_34"), X86, "WHEEL py3-none-manylinux_2_34"),
        (NAME, TAGS + "Tag: py3-none-linux_x86_64\n", X86, "linux_x86_64"),
        (NAME, TAGS, X86.replace("Advanced Micro Devices X86-64", "AArch64"), "the module is for AArch64"),
        (NAME.replace("x86_64", "aarch64"), TAGS.replace("x86_64", "aarch64"), X86, "X86-64"),
    ],
)
def test_tag(name, tags, header, word):
    (problem,) = wheel_check.tag_problems(name, tags, header)
    assert word in problem


@pytest.mark.parametrize("extra", ["flash_qla_native.libs/libgomp-1.so.1", "flash_qla/_lib/other.so"])
def test_another_compiled_file(extra):
    (problem,) = wheel_check.content_problems({wheel_check.MODULE: b"\x7fELF", extra: b"\x7fELF"})
    assert extra in problem
    assert wheel_check.content_problems({extra: b"\x7fELF"})


@pytest.mark.parametrize(
    "version",
    ["GLIBC_2.29", "GLIBC_2.34", "GLIBCXX_3.4.25", "CXXABI_1.3.13", "GCC_12.0.0", "GLIBC_PRIVATE", "OPENSSL_3.0.0"],
)
def test_symbol_version(version):
    problems = wheel_check.symbol_version_problems(VERSIONS.replace("GLIBC_2.27", version))
    assert len(problems) == 1 and version in problems[0]


def test_no_symbol_versions_is_not_a_pass():
    assert wheel_check.symbol_version_problems("")


@pytest.mark.parametrize(
    "row, word",
    [
        (" 0x1 (NEEDED)             Shared library: [libgomp.so.1]\n", "libgomp"),
        (" 0x1 (NEEDED)             Shared library: [libcudart.so.13]\n", "libcudart"),
        (" 0x1d (RUNPATH)            Library runpath: [/home/someone/lib]\n", "RUNPATH"),
        (" 0xf (RPATH)              Library rpath: [$ORIGIN]\n", "RPATH"),
    ],
)
def test_library(row, word):
    (problem,) = wheel_check.library_problems(DYNAMIC + row)
    assert word in problem


def test_no_libraries_is_not_a_pass():
    assert wheel_check.library_problems("")


def test_tvm_ffi_symbol_beyond_those_of_the_oldest_version():
    (problem,) = wheel_check.symbol_problems(SYMBOLS + ROW.format("TVMFFIObjectNew"))
    assert "TVMFFIObjectNew" in problem and "oldest" in problem
    assert wheel_check.symbol_problems(SYMBOLS.replace("TVMFFI", "OTHER@"))


def test_symbol_that_no_library_had():
    (problem,) = wheel_check.symbol_problems(SYMBOLS + ROW.format("fstat64"))
    assert "fstat64" in problem


def test_size():
    (problem,) = wheel_check.size_problems((64 << 20) + 1)
    assert "64 MiB" in problem


def fat_binary(*entries):
    """Entries are (kind, architecture, flags)."""
    body = b""
    for kind, architecture, flags in entries:
        payload = b"\x7fELF" + bytes(20)
        body += struct.pack("<HHIQ12xI8xQ16x", kind, 0x101, 64, len(payload), architecture, flags) + payload
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


GENERIC = fat_binary((2, 80, 0x11), (2, 90, 0x11), (1, 120, 0x8011))
HOPPER = fat_binary((2, 90, 0x100011))
DECLARED = [{"sm_80", "sm_90", "compute_120"}, {"sm_90a"}]


def test_architectures_of_a_section():
    found = wheel_check.fat_binaries(GENERIC + bytes(8) + HOPPER)
    assert found == DECLARED
    assert wheel_check.architecture_problems(found, DECLARED) == []
    assert wheel_check.fat_binaries(b"") == [] and wheel_check.architecture_problems([], []) == []


@pytest.mark.parametrize(
    "section, declared, word",
    [
        (GENERIC, DECLARED, "no machine code for {sm_90a}"),
        (HOPPER, DECLARED, "no machine code for {compute_120 sm_80 sm_90}"),
        (GENERIC + HOPPER + fat_binary((2, 80, 0), (2, 90, 0)), DECLARED, "machine code for {sm_80 sm_90}, where"),
        (GENERIC + HOPPER + fat_binary((2, 90, 0)), DECLARED, "machine code for {sm_90}, where"),
        (HOPPER, [], "none (a wheel for the CPU alone)"),
        (b"", DECLARED, "no machine code for {sm_90a}"),
    ],
)
def test_missing_and_extra_architectures(section, declared, word):
    problems = wheel_check.architecture_problems(wheel_check.fat_binaries(section), declared)
    assert any(word in problem for problem in problems), problems


def test_an_unknown_kind_of_entry_is_an_error():
    with pytest.raises(ValueError, match="kind 64"):
        wheel_check.fat_binaries(fat_binary((64, 90, 0)))


def test_lists_that_the_build_declares():
    generic, hopper = wheel_check.declared_architectures((ROOT / "src" / "cuda" / "CMakeLists.txt").read_text())
    assert hopper == {"sm_90a"}
    # The driver compiles nothing on an A100, on Hopper or on Blackwell; PTX is for what comes later.
    assert {"sm_80", "sm_90", "sm_100", "sm_120"} < generic
    assert [name for name in generic if name.startswith("compute_")] == ["compute_120"]
    with pytest.raises(ValueError, match="two lists"):
        wheel_check.declared_architectures("set(FLASH_QLA_HOPPER_ARCHITECTURES 90a-real)\n")


def test_names_of_architectures():
    assert wheel_check.expand(["80-real", "120-virtual", "90"]) == {"sm_80", "compute_120", "sm_90", "compute_90"}


def test_oldest_tvm_ffi_is_the_one_of_the_metadata():
    assert wheel_check.floor_of("Name: x\nRequires-Dist: apache-tvm-ffi<0.2,>=0.1.11\nRequires-Dist: numpy>=1.26\n") == "0.1.11"
    with pytest.raises(ValueError, match="apache-tvm-ffi"):
        wheel_check.floor_of("Requires-Dist: numpy>=1.26\n")


def check(wheel, *options):
    command = [sys.executable, ROOT / "tools" / "wheel_check.py", wheel, *options]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_whole_wheel(tmp_path):
    """A wheel around a module of this machine's compiler: what it breaks is named, and the exit code says so."""
    source, module = tmp_path / "module.cpp", tmp_path / "module.so"
    source.write_text('extern "C" int TVMFFIGetTypeInfo(int); extern "C" int f(int x) { return TVMFFIGetTypeInfo(x); }\n')
    subprocess.run(["g++", "-shared", "-fPIC", "-o", module, source, "-Wl,-rpath,/home/someone/lib"], check=True)
    wheel = tmp_path / NAME
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(module, wheel_check.MODULE)
        archive.writestr("flash_qla_native-0.1.0.dist-info/METADATA", "Requires-Dist: apache-tvm-ffi<0.2,>=0.1.11\n")
        archive.writestr("flash_qla_native-0.1.0.dist-info/WHEEL", TAGS)
    done = check(wheel)
    assert done.returncode == 1 and "RUNPATH is set: /home/someone/lib" in done.stdout, done.stdout + done.stderr
    assert "architectures     ok" in done.stdout
    done = check(wheel, "--cuda")
    assert "architectures     FAILED  no machine code for" in done.stdout
