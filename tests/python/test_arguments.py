"""Requirements 14 to 16: absent states and gradients, strides and dtypes of what callers really pass, padded rows of zeros."""

import helpers
import pytest
import torch
from helpers import assert_bitwise, check, make_inputs

# Head dims and tokens: on a GPU the Hopper path's, on both sides of what has its gradients computed in float32.
sizes = pytest.mark.parametrize("K, T", helpers.with_cuda([(64, 100)], [(128, 100), (128, 300)]))
every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)


@pytest.mark.requirement(14)
@every_dtype
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
@sizes
def test_no_state_is_a_state_of_zeros(K, T, packed, dtype):
    x = make_inputs(B=2, T=T, Hq=1, Hv=2, K=K, dtype=dtype, seqlens=[T - 30, 0, 65] if packed else None, state=False)
    zeros = x.replace(initial_state=torch.zeros_like(x.dht))
    a, b = helpers.run(x), helpers.run(zeros)
    begins = [0] if x.cu_seqlens is None else x.cu_seqlens.unique()[:-1].tolist()
    for name in a:
        differing = (a[name] != b[name]).nonzero().tolist()  # -0 and 0 may differ
        # Known to be zero without a state, the first token's dg is stored as such; with one it is what rounding leaves.
        assert not [at for at in differing if name != "dg" or at[1] not in begins or a[name][tuple(at)]], (name, differing[:5])
    helpers.compare(b, helpers.reference(zeros), dtype)


@pytest.mark.requirement(14)
@every_dtype
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("incoming", ["do", "dht"])
@sizes
def test_one_incoming_gradient_alone(K, T, incoming, state, dtype):
    x = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=dtype, state=state)
    x = x.replace(do=None) if incoming == "dht" else x.replace(dht=None)
    # Gradients that are exactly zero for want of o come back as zeros, not as None (run() would refuse None).
    check(x)


@pytest.mark.requirement(14)
@every_dtype
@sizes
def test_some_inputs_do_not_require_gradients(K, T, dtype):
    x = make_inputs(T=T, K=K, dtype=dtype)
    full = helpers.run(x)
    for name in ("q", "g", "initial_state"):
        leaf = getattr(x, name).clone().requires_grad_()
        o, final_state = helpers.call(x.replace(**{name: leaf}))
        (gradient,) = torch.autograd.grad([o, final_state], [leaf], [x.do, x.dht])
        assert_bitwise(name, gradient, full[helpers.GRADIENT_NAMES[name]])


def layouts(x, layout):
    """The same values in another memory layout."""
    def relaid(t):
        if t is None or t.ndim < 3:
            return t
        if layout == "transposed":  # [B, H, T, ..] in memory, as attention code lays it out
            return t.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "reversed dims":  # Transformers: split of a transposed convolution, last dimension not contiguous
            return t.permute(*reversed(range(t.ndim))).contiguous().permute(*reversed(range(t.ndim)))
        if layout == "sliced":
            wide = torch.full((*t.shape[:-1], 2 * t.shape[-1] + 3), torch.nan, dtype=t.dtype, device=t.device)
            wide[..., 1:1 + 2 * t.shape[-1]:2] = t
            return wide[..., 1:1 + 2 * t.shape[-1]:2]
        if layout == "misaligned":
            flat = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)[1:]
            return flat.view(t.shape).copy_(t)
        raise AssertionError(layout)

    names = (*x.DIFFERENTIABLE, "do", "dht")
    return x.replace(**{name: relaid(getattr(x, name)) for name in names})


@pytest.mark.requirement(15)
@every_dtype
@pytest.mark.parametrize("layout", ["transposed", "reversed dims", "sliced", "misaligned"])
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("K, V, T", helpers.with_cuda([(48, 32, 70)], [(128, 128, 70), (128, 128, 150), (96, 192, 150), (100, 60, 150), (256, 256, 150)]))
def test_strides(K, V, T, layout, raw, dtype):
    x = make_inputs(B=2, T=T, Hq=2, Hv=4, K=K, V=V, dtype=dtype, raw=raw)
    check(layouts(x, layout))


@pytest.mark.requirement(15)
@every_dtype
@sizes
def test_expanded_inputs(K, T, dtype):
    x = make_inputs(B=2, T=T, Hq=2, Hv=4, K=K, dtype=dtype)
    x = x.replace(q=x.q[:, :, :1].expand_as(x.q), g=x.g[:, :1].expand_as(x.g), beta=x.beta[..., :1].expand_as(x.beta),
                  v=x.v[:1].expand_as(x.v), initial_state=x.initial_state[:1].expand_as(x.initial_state))
    check(x)


@pytest.mark.requirement(15)
@every_dtype
@sizes
def test_expanded_gradients(K, T, dtype):
    # o.sum().backward() sends a gradient of zero strides.
    x = make_inputs(B=2, T=T, Hq=1, Hv=2, K=K, dtype=dtype)
    one = torch.ones((), dtype=dtype, device=x.q.device)
    check(x.replace(do=one.expand_as(x.do), dht=one.float().expand_as(x.dht)))


@pytest.mark.requirement(15)
@every_dtype
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@sizes
def test_offsets_of_both_widths_and_strided(K, T, index_dtype, dtype):
    x = make_inputs(seqlens=[T - 30, 0, 65], Hq=1, Hv=2, K=K, dtype=dtype)
    plain = helpers.run(x)
    spread = torch.full((8,), -1, dtype=index_dtype, device=x.q.device)
    spread[::2] = x.cu_seqlens.to(index_dtype)
    for cu_seqlens in (x.cu_seqlens.to(index_dtype), spread[::2]):
        got = helpers.run(x.replace(cu_seqlens=cu_seqlens))
        for name in plain:
            assert_bitwise(name, plain[name], got[name])


@pytest.mark.requirement(15)
@every_dtype
@pytest.mark.parametrize("T", helpers.with_cuda([100], [300]))
def test_everything_in_bf16(T, dtype):
    low = torch.bfloat16
    x = make_inputs(T=T, Hq=1, Hv=2, K=128, dtype=dtype, gate_dtype=low, beta_dtype=low, state_dtype=low)
    # Gradients come back in bf16 where the input was, so those are held to the bounds of bf16.
    narrow = {"dg": "gate_grad", "dbeta": "gate_grad", "dh0": "grad"}
    bounds = {name: helpers.LOW_PRECISION[narrow[name]] if name in narrow else helpers.bound_for(name, dtype)
              for name in helpers.TENSORS}
    check(x, bounds=bounds)


@pytest.mark.requirement(16)
@every_dtype
@pytest.mark.parametrize("rows", ["some", "all", "whole chunk"])
@pytest.mark.parametrize("T", helpers.with_cuda([150], [300]))
def test_zero_rows_with_l2norm(T, rows, dtype):
    x = make_inputs(T=T, Hq=1, Hv=2, K=128, dtype=dtype, raw=True)
    tokens = {"some": slice(3, None, 7), "all": slice(None), "whole chunk": slice(64, 128)}[rows]
    q, k = x.q.clone(), x.k.clone()
    q[:, tokens], k[:, tokens] = 0, 0
    got = helpers.run(x.replace(q=q, k=k))
    for name, value in got.items():
        assert value.isfinite().all(), name
    # At a zero row the gradient is 1e3 times that of the unit vector: that row would drown all others in one norm.
    want = helpers.reference(x.replace(q=q, k=k))
    helpers.compare(got, want, dtype)


@pytest.mark.requirement(16)
@every_dtype
@pytest.mark.parametrize("T", helpers.with_cuda([100], [300]))
def test_padding_rows_do_not_move_the_state(T, dtype):
    # Transformers multiplies padded hidden states by zero: q = k = v = 0 with beta = 0.5.
    x = make_inputs(T=T, Hq=1, Hv=2, K=128, dtype=dtype)
    x = x.with_options(use_qk_l2norm_in_kernel=True)
    padded = {name: getattr(x, name).clone() for name in ("q", "k", "v", "g", "beta")}
    for name in ("q", "k", "v", "g"):
        padded[name][:, :40] = 0
    padded["beta"][:, :40] = 0.5
    got, _ = check(x.replace(**padded))
    assert not got["dv"][:, :40].any()
