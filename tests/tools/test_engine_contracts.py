"""tools/engine_contracts.py: our adapters against what was recorded of the engines, and that it finds what does not fit."""

import copy
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("engine_contracts", ROOT / "tools" / "engine_contracts.py")
contracts = importlib.util.module_from_spec(spec)
spec.loader.exec_module(contracts)
RECORD = json.loads(contracts.RECORD.read_text())


def test_adapters_fit():
    assert contracts.problems(RECORD) == []


def test_everything_compared_is_recorded():
    compared = {(folder, key) for folder, key, *_ in contracts.REPLACED + contracts.CALLED + contracts.USED}
    assert compared <= {(folder, key) for folder, engine in RECORD.items() for key in engine["names"]}
    assert {folder: engine["version"] for folder, engine in RECORD.items() if folder in contracts.RELEASES} == {
        folder: release.partition("==")[2] for folder, release in contracts.RELEASES.items()}


def test_adapters_know_the_recorded_releases():
    """An adapter that takes a version for known was compared with one of those."""
    sys.path.insert(0, str(ROOT / "python"))
    from flash_qla.integrations import _engines, sglang, vllm

    for adapter, folder in ((vllm, "vllm"), (sglang, "sglang")):
        assert _engines.is_version(RECORD[folder]["version"], adapter.KNOWN_VERSIONS)


@pytest.mark.skipif("FLASH_QLA_ENGINES" not in os.environ, reason="needs the engines' released Python: set FLASH_QLA_ENGINES")
def test_record_is_of_the_releases():
    assert contracts.recorded(Path(os.environ["FLASH_QLA_ENGINES"])) == RECORD


@pytest.mark.parametrize("theirs, ours, expected", [
    (["self", "q", "k=None"], ["q", "k=None"], []),
    (["q"], ["self", "q", "k=None", "**kwargs"], []),
    (["q", "k"], ["k", "q"], ["parameter 0 is q, ours k", "parameter 1 is k, ours q"]),
    (["q", "k"], ["q", "*args"], ["parameter 1 is k, ours none"]),
    (["q", "k"], ["q", "*args", "**named"], []),
    (["q", "k=1"], ["q"], ["parameter 1 is k, ours none"]),
    (["q", "k=1"], ["q", "k=2"], ["k is 1 where it is left out, in ours 2"]),
    (["q", "k=1"], ["q", "k=None"], []),
    (["q", "k"], ["q", "k=2"], []),
    (["q", "k=1"], ["q", "k"], ["k is 1 where it is left out, in ours needed"]),
    (["q", "*", "k=True"], ["q", "*", "k=False"], ["k is True where it is left out, in ours False"]),
    (["q", "*", "k"], ["q"], ["ours has no keyword k"]),
    (["q", "*", "k"], ["q", "k"], []),
    (["q"], ["q", "k"], ["ours needs k"]),
    (["q"], ["q", "*", "k"], ["ours needs k"]),
    (["q", "/", "**kwargs"], ["q"], []),
], ids=str)
def test_what_is_not_taken(theirs, ours, expected):
    assert list(contracts.not_taken(theirs, ours)) == expected


@pytest.mark.parametrize("theirs, count, keywords, expected", [
    (["self", "x", "y=None"], 1, ("y",), []),
    (["cls", "x"], 2, (), ["takes 1 positional arguments, and we pass 2"]),
    (["*args"], 2, (), []),
    (["x"], 1, ("x",), ["has no keyword x"]),
    (["x", "**kwargs"], 1, ("z",), []),
    (["x", "y", "*", "z"], 1, (), ["needs y", "needs z"]),
], ids=str)
def test_what_cannot_be_called(theirs, count, keywords, expected):
    assert list(contracts.not_callable(theirs, count, keywords)) == expected


@pytest.mark.parametrize("folder, key, change, message", [
    ("vllm", contracts.REPLACED[0][1], lambda names: names.append("window=64"), "forward_flash_qla for"),
    ("sglang", "sglang/srt/plugins/hook_registry.py:HookRegistry.register", lambda names: names.append("owner"), "needs owner"),
    ("sglang", "sglang/srt/plugins/hook_registry.py:HookType", lambda names: names.remove("AROUND"), "HookType has no AROUND"),
    ("vllm", "vllm/v1/attention/backends/utils.py:NULL_BLOCK_ID", lambda names: names.__setitem__(0, "-1"), "NULL_BLOCK_ID has no 0"),
], ids=["replaced", "called", "member", "value"])
def test_a_new_release_that_does_not_fit(folder, key, change, message):
    record = copy.deepcopy(RECORD)
    change(record[folder]["names"][key])
    found = contracts.problems(record)
    assert found and all(message in text for text in found)


def test_reading(tmp_path):
    (tmp_path / "module.py").write_text("""
VALUE: int = 3
if True:
    def inside(a, /, b: int = 1, *c, d=None, e, **f): pass
class Outer:
    x: int
    y: str = "y"
    Z = 1
    def method(self, *, key):
        def nested(q): return q
""")
    read = lambda name: contracts.read(tmp_path, f"module.py:{name}")  # noqa: E731
    assert read("VALUE") == ["3"]
    assert read("inside") == ["a", "/", "b=1", "*c", "d=None", "e", "**f"]
    assert read("Outer") == ["x", "y", "Z"]
    assert read("Outer.method") == ["self", "*", "key"] and read("Outer.method.nested") == ["q"]
    with pytest.raises(SystemExit, match="has no Outer.none"):
        read("Outer.none")


def test_command(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as done:
        contracts.main(["check"])
    assert done.value.code == 0 and "fit" in capsys.readouterr().out
    changed = copy.deepcopy(RECORD)
    changed["sglang"]["names"]["sglang/srt/plugins/hook_registry.py:HookType"] = []
    monkeypatch.setattr(contracts, "RECORD", tmp_path / "engines.json")
    contracts.RECORD.write_text(json.dumps(changed))
    with pytest.raises(SystemExit) as done:
        contracts.main(["check"])
    assert done.value.code == 1
    with pytest.raises(SystemExit, match="is not vllm==0.33.0: fetch it"):
        contracts.main(["write", str(tmp_path)])
