"""compare_machine_code.py tells kernels whose code has changed from those that are the same."""

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
import compare_machine_code as compare  # noqa: E402


def elf(registers=8, **kernels):
    """An ELF file with a section .text.<name> for each kernel, whose info is its symbol's number, and three more."""
    symbols = {f".text.{name}": number for number, name in enumerate(kernels, start=5)}
    info = b"".join(struct.pack("<BBHII", 4, 0x2F, 8, symbol, registers) for symbol in symbols.values())
    info = struct.pack("<BBH", 3, 0x01, 0) + struct.pack("<BBHII", 4, 0x11, 8, 5, 0) + info
    contents = [("", b""), (".nv.info", info), (".data", b"other"), *((f".text.{name}", code) for name, code in kernels.items())]
    names, body, headers = b"", b"", []
    contents.append((".shstrtab", b"".join(name.encode() + b"\0" for name, _ in [*contents, (".shstrtab", b"")])))
    for name, data in contents:
        headers.append((len(names), 1, 64 + len(body), len(data), symbols.get(name, 0)))
        names += name.encode() + b"\0"
        body += data
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01", 2, 190, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64,
                       len(headers), len(headers) - 1)  # fmt: skip
    return head + body + b"".join(struct.pack("<IIQQQQIIQQ", n, t, 0, 0, at, size, 0, i, 0, 0) for n, t, at, size, i in headers)


def test_reads_the_code_of_each_kernel():
    assert compare.kernels_of_cubin(elf(a=b"12345678", b=b"code")) == {"a": (8, b"12345678"), "b": (8, b"code")}
    with pytest.raises(ValueError, match="not an ELF file"):
        compare.kernels_of_cubin(b"MZ")


def test_names_what_differs():
    old = {("sm_90a", "same"): (8, b"x"), ("sm_90a", "changed"): (8, b"x"), ("sm_80", "gone"): (8, b"x")}
    new = {("sm_90a", "same"): (8, b"x"), ("sm_90a", "changed"): (9, b"yz"), ("sm_80", "added"): (9, b"x")}
    assert compare.differences(old, new) == [
        "only in the new build: sm_80 added",
        "only in the old build: sm_80 gone",
        "other code (8 registers and 1 bytes, then 9 and 2): sm_90a changed",
    ]
    assert compare.differences(old, old) == []


def test_a_kernel_under_another_name_is_the_same():
    """Two kernels with the same code may each have a new name; a third one without a partner is a difference."""
    old = {("sm_90a", name): (8, b"x") for name in ("a", "b", "c")} | {("sm_80", "d"): (8, b"x")}
    new = {("sm_90a", name): (8, b"x") for name in ("e", "f")} | {("sm_80", "d"): (8, b"x")}
    assert compare.renamed(old, new) == [(("sm_90a", "a"), ("sm_90a", "e")), (("sm_90a", "b"), ("sm_90a", "f"))]
    assert compare.differences(old, new) == ["only in the old build: sm_90a c"]


def test_files_are_compared_by_what_cuobjdump_takes_out_of_them(monkeypatch, tmp_path, capsys):
    """cuobjdump is played by a script that writes the cubin which the file holds."""
    tool = tmp_path / "cuobjdump"
    tool.write_text('#!/bin/sh\n[ "$1 $2" = "-xelf all" ] && cp "$3" "x.1.sm_90a.cubin"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("CUOBJDUMP", str(tool))
    unnamed = "_ZN4cuda40_GLOBAL__N__{}_8_split_cu_585a0d6317list_tilesEv"  # of two build trees
    files = {
        "old": elf(**{unnamed.format("c96ccccc"): b"1"}, b=b"2"),
        "same": elf(b=b"2", **{unnamed.format("ec6d6959"): b"1"}),
        "new": elf(**{unnamed.format("c96ccccc"): b"1"}, b=b"3"),
        "none": elf(),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    outcomes = {}
    for name in ("same", "new", "none"):
        monkeypatch.setattr(sys, "argv", ["compare", str(tmp_path / "old"), str(tmp_path / name)])
        outcomes[name] = (compare.main(), capsys.readouterr().out.splitlines()[-1:])
    assert outcomes == {
        "same": (0, ["2 kernels in both (0 under other names), 0 differences"]),
        "new": (1, ["2 kernels in both (0 under other names), 1 differences"]),
        "none": (2, []),
    }
