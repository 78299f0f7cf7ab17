"""Requirements 1 to 3: no decay, decay beyond measure, and the gradient of the gate in both."""

import helpers
import pytest
import torch
from helpers import check, make_inputs

# Calls of at most 256 tokens have their gradients computed in float32 (docs/numerics.md).
lengths = pytest.mark.parametrize("T", helpers.with_cuda([200], [300]))
every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)


@pytest.mark.requirement(1)
@every_dtype
@pytest.mark.parametrize("pattern", ["everywhere", "a quarter of the heads", "alternating"])
def test_nothing_decays(pattern, dtype):
    x = make_inputs(T=300, Hq=2, Hv=4, K=128, dtype=dtype)
    g = torch.nn.functional.logsigmoid(torch.randn(x.g.shape, generator=torch.Generator().manual_seed(3))).to(x.g.device)
    if pattern == "everywhere":
        g[:] = 0
    elif pattern == "alternating":
        g[:, ::2] = 0
    else:
        g[..., :1] = 0
    check(x.replace(g=g))


@pytest.mark.requirement(2)
@every_dtype
@pytest.mark.parametrize("magnitude", [1e2, 1e3, 1e4])
@pytest.mark.parametrize("where", ["all tokens", "one token", "scattered"])
@pytest.mark.parametrize("T", helpers.with_cuda([150], [300]))
def test_very_negative_gates(T, magnitude, where, dtype):
    x = make_inputs(T=T, Hq=1, Hv=4, K=128, dtype=dtype)
    g = x.g.clone()
    if where == "all tokens":
        g[:] = -magnitude
    elif where == "one token":
        g[:, 70] = -magnitude
    else:
        g[:, 3::17] = -magnitude
        g[:, 64] = -magnitude / 3
    got, _ = check(x.replace(g=g))
    for name, value in got.items():
        assert value.isfinite().all(), name


@pytest.mark.requirement(2)
@every_dtype
@pytest.mark.parametrize("T", helpers.with_cuda([150], [300]))
def test_an_infinite_gate_forgets_everything(T, dtype):
    x = make_inputs(T=T, Hq=1, Hv=2, K=128, dtype=dtype)
    g = x.g.clone()
    g[:, 70] = -torch.inf
    got, _ = check(x.replace(g=g))
    for name, value in got.items():
        assert value.isfinite().all(), name
    assert not got["dg"][:, 70].any(), "the limit of the gradient at exp(g) = 0 is zero"
    # Nothing before token 70 reaches what comes after it.
    tail = {name: getattr(x, name)[:, 70:] for name in ("q", "k", "v", "g", "beta")}
    alone = helpers.run(x.replace(**tail, initial_state=None, do=x.do[:, 70:]), grads=False)
    bound = helpers.bound_for("o", dtype)
    helpers.assert_close("final_state", got["final_state"], helpers.to_numpy(alone["final_state"]), bound, 1)


@pytest.mark.requirement(3)
@every_dtype
@lengths
@pytest.mark.parametrize("A", [0.0, 16.0])
def test_gate_gradient_at_both_ends(A, T, dtype):
    # FlashQLA #28: dg lost its digits where everything decays and where nothing does.
    x = make_inputs(T=T, Hq=2, Hv=4, K=128, dtype=dtype, raw=True, use_beta_sigmoid_in_kernel=False)
    softplus = torch.nn.functional.softplus(x.g.float() + x.dt_bias)
    plain = x.replace(g=-A * softplus, beta=x.beta.sigmoid(), A_log=None, dt_bias=None, options=dict(use_qk_l2norm_in_kernel=True))
    check(plain)


@pytest.mark.requirement(3)
@every_dtype
@lengths
def test_in_kernel_gate_with_strong_and_no_decay(T, dtype):
    x = make_inputs(T=T, Hq=2, Hv=4, K=128, dtype=dtype, raw=True)
    A_log = torch.tensor([16.0, 1.0, 1e-2, 0.0]).log().to(x.A_log)  # the last is -inf: A = 0, as older models draw it
    got, _ = check(x.replace(A_log=A_log))
    assert got["dA_log"].isfinite().all() and not got["dA_log"][3]


@pytest.mark.requirement(3)
@every_dtype
@pytest.mark.parametrize("T", helpers.with_cuda([65], [150]))
def test_first_token(T, dtype):
    # Without an initial state there is nothing for the first gate to forget.
    x = make_inputs(B=2, T=T, K=128, dtype=dtype, state=False)
    got, _ = check(x)
    assert got["dg"][:, 0].abs().max() <= 1e-6
    x = make_inputs(T=1, K=128, dtype=dtype)
    check(x)


@pytest.mark.requirement(3)
@every_dtype
@pytest.mark.parametrize("T", helpers.with_cuda([65], [300]))
def test_gate_only_moves_the_first_token(T, dtype):
    x = make_inputs(T=T, K=128, dtype=dtype)
    g = torch.zeros_like(x.g)
    g[:, 0] = -3
    check(x.replace(g=g))
