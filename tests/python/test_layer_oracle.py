"""The layer's oracle: its gradients against central differences. Nothing here touches the library."""

import layer_oracle as oracle
import numpy as np
import pytest

STEP = 1e-5


def differs(loss, tensors, gradients, names):
    rng = np.random.default_rng(1)
    for name in names:
        if tensors.get(name) is None:
            continue
        direction = rng.standard_normal(tensors[name].shape)
        plus, minus = (loss(**{**tensors, name: tensors[name] + sign * STEP * direction}) for sign in (1, -1))
        numeric, exact = (plus - minus) / (2 * STEP), (gradients["d" + name] * direction).sum()
        assert abs(numeric - exact) <= 1e-7 * max(1.0, abs(numeric)), (name, numeric, exact)


CONV = {
    "plain": (oracle.Conv(), {}), "silu": (oracle.Conv("silu"), {}), "residual": (oracle.Conv("silu"), dict(residual=True)),
    "norm": (oracle.Conv("silu", 2, 3), {}), "states": (oracle.Conv("silu", 1, 2), dict(state=5)),
    "short": (oracle.Conv("silu", cu_seqlens=np.array([0, 1, 1, 4, 9])), dict(state=4)),
    "index": (oracle.Conv("silu", seq_idx=np.array([[0, 0, 1, 1, -1, 2, 2, 0, 0]])), {}),
}


@pytest.mark.parametrize("name", CONV)
def test_convolution(name):
    options, has = CONV[name]
    rng = np.random.default_rng(0)
    rows = 1 if options.cu_seqlens is not None or options.seq_idx is not None else 2
    x, weight, bias = rng.standard_normal((rows, 9, 7)), rng.standard_normal((7, 3)), rng.standard_normal(7)
    N = rows if options.cu_seqlens is None else len(options.cu_seqlens) - 1
    tensors = dict(x=x, weight=weight, bias=bias, residual=rng.standard_normal(x.shape) if has.get("residual") else None,
                   initial_state=rng.standard_normal((N, 7, has["state"])) if "state" in has else None)
    y, final = oracle.conv_forward(**tensors, options=options)
    dy, dfinal = rng.standard_normal(y.shape), None if final is None else rng.standard_normal(final.shape)

    def loss(**changed):
        y, final = oracle.conv_forward(**changed, options=options)
        return (y * dy).sum() + (0 if final is None else (final * dfinal).sum())

    differs(loss, tensors, oracle.conv_backward(**tensors, dy=dy, dfinal=dfinal, options=options), tensors)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation, gate_first):
    rng = np.random.default_rng(0)
    tensors = dict(x=rng.standard_normal((2, 3, 5)), z=rng.standard_normal((2, 3, 5)), weight=rng.standard_normal(5),
                   bias=rng.standard_normal(5))
    fixed = dict(activation=activation, gate_first=gate_first, eps=0.1)
    dy = rng.standard_normal((2, 3, 5))
    found = oracle.norm_gated_backward(dy=dy, **tensors, **fixed)
    found["dz"] = found["dg"]
    differs(lambda **changed: (oracle.norm_gated(**changed, **fixed) * dy).sum(), tensors, found, tensors)


def test_one_update_at_a_time_is_a_forward():
    rng = np.random.default_rng(0)
    x, weight, state = rng.standard_normal((6, 4)), rng.standard_normal((4, 4)), rng.standard_normal((4, 5))
    whole, _ = oracle.conv_forward(x[None], weight, initial_state=state[None], options=oracle.Conv("silu"))
    for t in range(6):
        y, state, windows = oracle.update(x[t:t + 1], weight, None, state, oracle.Conv("silu"))
        assert np.allclose(y[0], whole[0, t], rtol=0, atol=1e-14)
        assert np.array_equal(windows[0], state[:, -3:])
