"""Requirement 4: inputs that make the triangular inverse grow.

In this requirement alone a case may be ill-conditioned for every implementation of its dtype. Where it says so, the bound is
twice the error of an emulation of that dtype, if that is more than the usual one.
"""

import emulation
import helpers
import pytest
import torch
from helpers import make_inputs

pytestmark = pytest.mark.requirement(4)


every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
# The second length: gradients on tensor cores (docs/numerics.md).
lengths = pytest.mark.parametrize("T", helpers.with_cuda([140], [300]))


def draw(keys, beta, dtype, T, K=128):
    x = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=dtype, seed=4)
    generator = torch.Generator().manual_seed(5)
    base = torch.randn(1, 1, 1, K, generator=generator)
    noise = torch.randn(x.k.shape, generator=generator)
    k = {"identical": base.expand(x.k.shape), "correlated": base + 0.3 * noise, "random": noise}[keys]
    k = torch.nn.functional.normalize(k, dim=-1)
    return x.replace(k=k.to(x.k), beta=torch.full_like(x.beta, beta))


def emulated_errors(x, want):
    """Errors of the emulation, per tensor the worst of whole and heads, as the metric takes them."""
    def function(y, **_):
        return emulation.chunk_gated_delta_rule(y.q, y.k, y.v, y.g, y.beta, y.options.get("scale"), y.initial_state)

    got = helpers.run(x, function=function)
    errors = {}
    for name, reference in want.items():
        axis, value = helpers.TENSORS[name][1], helpers.to_numpy(got[name])
        parts = [(value, reference)] + [(value.take(i, axis), reference.take(i, axis)) for i in range(reference.shape[axis])]
        relative = [error for error, absolute in (helpers.relative_error(a, b) for a, b in parts) if not absolute]
        errors[name] = max(relative, default=0.0)
    return errors


def bounds_beside_the_emulation(x, want):
    """The usual bounds, or twice the emulation's errors where those are larger."""
    names = [name for name in (*x.DIFFERENTIABLE, "do", "dht") if getattr(x, name) is not None]
    emulated = emulated_errors(x.replace(**{name: getattr(x, name).cpu() for name in names}), want)
    return {name: max(helpers.bound_for(name, x.dtype), 2 * error) for name, error in emulated.items()}


@every_dtype
@lengths
@pytest.mark.parametrize("keys", ["random", "correlated", "identical"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 2.0])
def test_keys_and_beta(keys, beta, T, dtype):
    # At beta = 2 the recurrence reflects along k: errors neither grow nor shrink. Above it nothing is promised.
    x = draw(keys, beta, dtype, T)
    want = helpers.reference(x)
    # float32 is well-conditioned enough for its usual bounds, if the products behind the inverse are summed with care.
    bounds = bounds_beside_the_emulation(x, want) if dtype in helpers.LOW else None
    got = helpers.run(x)
    helpers.compare(got, want, dtype, bounds=bounds)
    if beta == 0.0:
        assert not got["dv"].any(), "with beta = 0 nothing is written: v has no influence"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
@pytest.mark.parametrize("keys", ["unit", "any length", "raw", "no beta"])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 5])
def test_few_key_dimensions(K, keys, dtype):
    # Keys of few dimensions lie along each other, so that small results are left of large ones.
    x = make_inputs(seqlens=[79, 200, 64], Hq=2, Hv=4, K=K, V=5, dtype=dtype, raw=keys == "raw", seed=K)
    if keys == "any length":
        generator = torch.Generator().manual_seed(K)
        x = x.replace(k=(torch.randn(x.k.shape, generator=generator) / K**0.5).to(x.k))
    elif keys == "no beta":
        x = x.replace(beta=None)
    helpers.check(x)


@every_dtype
@lengths
def test_unnormalised_keys(T, dtype):
    # Long keys with beta / |k|^2: the update is a projection still, but every product is large.
    x = draw("random", 1.0, dtype, T)
    length = 8.0
    x = x.replace(k=(x.k.float() * length).to(dtype), beta=torch.full_like(x.beta, 0.9 / length**2))
    want = helpers.reference(x)
    helpers.compare(helpers.run(x), want, dtype, bounds=bounds_beside_the_emulation(x, want) if dtype in helpers.LOW else None)


@every_dtype
@lengths
def test_negative_eigenvalues_in_kernel(T, dtype):
    x = make_inputs(T=T, Hv=4, K=128, dtype=dtype, raw=True, allow_neg_eigval=True)
    beta = x.beta.clone()
    beta[..., 0] = 20.0  # saturates at 2
    beta[..., 1] = -200.0  # saturates at 0: the gradient vanishes, without NaN
    got, _ = helpers.check(x.replace(beta=beta))
    assert got["dbeta"].isfinite().all()


def test_emulation_agrees_with_the_oracle_in_float32():
    # The yardstick itself: without its roundings it is the same mathematics.
    x = make_inputs(T=140, Hq=1, Hv=2, K=64, device="cpu")

    def function(y, **_):
        return emulation.chunk_gated_delta_rule(y.q, y.k, y.v, y.g, y.beta, None, y.initial_state)

    helpers.compare(helpers.run(x, function=function), helpers.reference(x), x.dtype, bounds=dict.fromkeys(helpers.TENSORS, 5e-5))
