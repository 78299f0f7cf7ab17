"""integrations.causal_conv1d: what stands in for the package causal_conv1d, and when it does not."""

import importlib
import importlib.util
import sys

import layer_oracle
import numpy as np
import pytest
import torch

import flash_qla
from flash_qla.integrations import causal_conv1d as integration


@pytest.fixture(autouse=True)
def nothing_installed():
    if importlib.util.find_spec("causal_conv1d") is not None:
        pytest.skip("the package causal_conv1d is installed")
    yield
    integration.uninstall()
    assert "causal_conv1d" not in sys.modules


def test_imported_functions_compute():
    assert integration.install() == integration.install() == ["causal_conv1d", "causal_conv1d.causal_conv1d_interface"]
    from causal_conv1d import causal_conv1d_fn, causal_conv1d_update
    from causal_conv1d.causal_conv1d_interface import causal_conv1d_fn as same

    assert same is causal_conv1d_fn is flash_qla.causal_conv1d_fn
    x, weight, bias = torch.randn(2, 8, 11), torch.randn(8, 4), torch.randn(8)
    y = causal_conv1d_fn(x, weight, bias, activation="silu")
    parts = [u.numpy().astype(np.float64) for u in (x.transpose(1, 2), weight, bias)]
    want, _ = layer_oracle.conv_forward(*parts, options=layer_oracle.Conv(activation="silu"))
    np.testing.assert_allclose(y.transpose(1, 2).numpy(), want, rtol=1e-5, atol=1e-5)
    state = torch.zeros(2, 8, 4)
    steps = [causal_conv1d_update(x[..., t], state, weight, bias, "silu") for t in range(11)]
    torch.testing.assert_close(torch.stack(steps, dim=-1), y, rtol=1e-6, atol=1e-6)


def test_found_by_those_who_look_first():
    integration.install()
    assert importlib.util.find_spec("causal_conv1d").origin == "flash_qla"
    assert tuple(map(int, importlib.import_module("causal_conv1d").__version__.split("."))) >= (1, 4, 0)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("causal_conv1d.cpp_functions")


def test_refused_beside_the_package(tmp_path, monkeypatch):
    (tmp_path / "causal_conv1d.py").write_text("causal_conv1d_fn = causal_conv1d_update = None\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(RuntimeError, match="install: causal_conv1d .*causal_conv1d.py.* must not be installed"):
            integration.install()
        assert importlib.import_module("causal_conv1d").causal_conv1d_fn is None
        with pytest.raises(RuntimeError, match="must not be installed"):
            integration.install()
        integration.uninstall()
        assert "causal_conv1d" in sys.modules, "what is not ours stays"
    finally:
        sys.modules.pop("causal_conv1d", None)
