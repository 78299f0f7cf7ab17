"""rms_norm_gated against the oracle: both orders, both gates, any strides and dtypes."""

import helpers
import layer_oracle as oracle
import pytest
import torch
from helpers import assert_bitwise, assert_close, dtype_name, to_numpy
from layer_helpers import compare, drawn, dtypes

import flash_qla


class Norm:
    def __init__(self, shape=(2, 9, 3, 40), dtype=torch.float32, gate=True, weight=True, bias=True, activation="silu", gate_first=False,
                 eps=1e-6, weight_dtype=None, seed=0):
        V, weight_dtype = shape[-1], weight_dtype or dtype
        self.x, self.dy = drawn(shape, dtype, seed=seed), drawn(shape, dtype, seed=seed + 4)
        self.g = drawn(shape, dtype, seed=seed + 1) if gate else None
        self.weight = drawn((V,), weight_dtype, seed=seed + 2) if weight else None
        self.bias = drawn((V,), weight_dtype, seed=seed + 3) if bias else None
        self.activation, self.gate_first, self.eps = activation, gate_first, eps

    NAMES = ("x", "g", "weight", "bias")

    def run(self, grads=True):
        leaves = {name: getattr(self, name).detach().requires_grad_(grads) for name in self.NAMES if getattr(self, name) is not None}
        tensors = {name: None for name in self.NAMES} | leaves
        y = flash_qla.rms_norm_gated(**tensors, activation=self.activation, eps=self.eps, norm_before_gate=not self.gate_first)
        got = {"y": y.detach()}
        if grads:
            for (name, leaf), gradient in zip(leaves.items(), torch.autograd.grad(y, list(leaves.values()), self.dy)):
                assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
                got["d" + name] = gradient
        return got

    def check(self, grads=True):
        x, z, weight, bias = (to_numpy(getattr(self, name)) for name in self.NAMES)
        fixed = dict(eps=self.eps, activation="sigmoid" if self.activation == "sigmoid" else "silu", gate_first=self.gate_first)
        want = {"y": oracle.norm_gated(x, z, weight, bias, **fixed)}
        want.update(oracle.norm_gated_backward(x, to_numpy(self.dy), z, weight, bias, **fixed))
        got = self.run(grads)
        compare(got, want)
        return got


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_both_orders_and_gates(dtype, activation, gate_first):
    Norm(dtype=dtype, activation=activation, gate_first=gate_first).check()


@pytest.mark.parametrize("absent", [("gate",), ("weight",), ("bias",), ("weight", "bias"), ("gate", "weight", "bias")])
@pytest.mark.parametrize("gate_first", [False, True])
def test_absent_tensors(absent, gate_first):
    Norm(gate_first=gate_first, **dict.fromkeys(absent, False)).check()


@pytest.mark.parametrize("V", [1, 7, 16, 64, 96, 128, 130, 192, 256, 1000, 4096, 9000])
def test_sizes(V):
    # One value is normalised to its sign: its gradient is what rounding leaves of 1 - 1, and no float32 has it.
    Norm(shape=(5, 3, V), eps=1e-5).check(grads=V > 1)


@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
def test_rows(rows, dtype):
    Norm(shape=(rows, 128), dtype=dtype).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_weight_of_another_dtype(dtype):
    got = Norm(dtype=dtype, weight_dtype=torch.float32).check()
    assert got["dweight"].dtype == torch.float32


def test_one_dimension():
    Norm(shape=(48,)).check()


@pytest.mark.parametrize("gate_first", [False, True])
def test_any_strides(gate_first):
    case = Norm(shape=(2, 9, 3, 40), gate_first=gate_first)
    plain = case.run()
    for name in ("x", "g", "dy"):
        buffer = drawn((2, 9, 6, 120), seed=9)
        view = buffer[:, :, 1:6:2, 40:80] if name != "g" else buffer[:, :, :3, 1:120:3]
        view.copy_(getattr(case, name))
        setattr(case, name, view)
    for name, value in case.run().items():
        assert_bitwise(name, value, plain[name])


def test_rows_of_zeros_and_strong_gates():
    case = Norm(shape=(6, 64))
    case.x[1:3] = 0
    case.g[3] = 200.0
    case.g[4] = -200.0
    got = case.check()
    assert all(value.isfinite().all() for value in got.values())


def test_results_repeat_and_do_not_depend_on_threads():
    case = Norm(shape=(3000, 128))
    before = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for name, value in case.run().items():
            assert_bitwise(name, value, before[name])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cpu_only
@pytest.mark.parametrize("gate_first", [False, True])
def test_both_paths_of_the_host_agree(gate_first):
    case = Norm(shape=(70, 40), dtype=torch.float64, gate_first=gate_first)
    found = case.run()
    with helpers.use_path("reference"):
        for name, value in case.run().items():
            assert_close(name, found[name], value, 1e-12)
