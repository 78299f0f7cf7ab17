"""The table of engines that `python -m flash_qla info` prints."""

import importlib
import subprocess
import sys

import pytest

from flash_qla.integrations import _engines, _table, fla

info = importlib.import_module("flash_qla.cli.info")  # the package's attribute of this name is the command
ENGINES = ["FLA", "Transformers", "vLLM", "SGLang", "Megatron", "TensorRT-LLM"]


@pytest.fixture
def installed(monkeypatch):
    """Sets the versions of distributions, and whether this machine's kernels are the fast ones."""
    versions = {}
    monkeypatch.setattr(_engines, "version_of", versions.get)
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda needs_grad=False: versions.get("slow"))
    return versions


def line(engine):
    return next(info._engine(row) for row in _table.rows() if row.engine == engine)


def test_nothing_installed(installed):
    assert [(row.engine, info._engine(row)) for row in _table.rows()] == [(engine, "not installed") for engine in ENGINES]


def test_everything_installed(installed):
    installed.update({"fla-core": "0.6.0", "transformers": "5.17.0", "vllm": "0.33.0", "sglang": "0.5.23", "megatron-core": "0.20.0", "tensorrt-llm": "1.4.0"})
    assert [line(engine) for engine in ENGINES] == [
        "0.6.0, takes its calls: chunked calls, forward and backward; FLA_FLASH_QLA=0 turns it off",
        "5.17.0, by flash_qla.integrations.transformers.patch(), and through FLA without it",
        "0.33.0, takes its calls: prefill; FLASH_QLA_VLLM=0 turns it off",
        "0.5.23, by --linear-attn-prefill-backend flash_qla, --linear-attn-decode-backend flash_qla",
        "0.20.0, by kernel_backend=GatedDeltaProvider(base)",
        "1.4.0, by flash_qla.integrations.tensorrt_llm.patch()",
    ]


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "Transformers"])
def test_slow_machines(installed, engine):
    installed.update({"fla-core": "0.6.0", "vllm": "0.33.0", "sglang": "0.5.23", "megatron-core": "0.20.0", "tensorrt-llm": "1.4.0", "slow": "no GPU"})
    assert line(engine).endswith(", left alone: no GPU")


@pytest.mark.parametrize("version, environment, why", [
    ("0.5.1", {}, "hands no calls to packages"),
    ("0.4.2", {}, "hands no calls to packages"),
    ("0.5.2", {}, None),
    ("0.10.0.dev1", {}, None),
    ("0.6.0", {"FLA_FLASH_QLA": "0"}, "FLA_FLASH_QLA=0"),
    ("0.6.0", {"FLA_DISABLE_BACKEND_DISPATCH": "1"}, "FLA_DISABLE_BACKEND_DISPATCH=1"),
    ("0.6.0", {"FLA_FLASH_QLA": "1", "FLA_DISABLE_BACKEND_DISPATCH": "0"}, None),
])
def test_fla(installed, monkeypatch, version, environment, why):
    for name in ("FLA_FLASH_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    installed["flash-linear-attention"] = version
    takes, text = fla.status()
    assert takes == (why is None) and (why is None or why in text)


@pytest.mark.parametrize("engine, distribution, variable", [("vLLM", "vllm", "FLASH_QLA_VLLM"), ("SGLang", "sglang", "FLASH_QLA_SGLANG")])
def test_switched_off_and_unknown(installed, monkeypatch, engine, distribution, variable):
    installed[distribution] = "99.0"
    assert "99.0 is not known here" in line(engine)
    monkeypatch.setenv(variable, "1")
    assert "left alone" not in line(engine)
    monkeypatch.setenv(variable, "0")
    assert line(engine) == f"99.0, left alone: {variable}=0"


def test_without_pytorch(installed, monkeypatch):
    installed["transformers"] = "5.17.0"

    def import_module(name, package=None):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(_table.importlib, "import_module", import_module)
    assert line("Transformers") == "5.17.0, left alone: No module named 'torch'"


def test_no_engine_is_imported():
    code = "import sys, flash_qla.integrations._table as t; t.rows(); print([n for n in ('vllm', 'sglang', 'fla', 'transformers', 'megatron') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300,
                          env={**__import__("os").environ, "PYTHONPATH": ":".join(path for path in sys.path if path)})
    assert done.stdout.strip() == "[]", done.stderr


def test_command(capsys):
    info.report()
    printed = capsys.readouterr().out
    assert all(engine in printed for engine in ENGINES)
