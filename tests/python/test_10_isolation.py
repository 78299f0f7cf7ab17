"""Rung 10: sequences do not see each other, the past does not see the future, and NaN stays at home."""

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
LENGTHS = [100, 0, 65, 200, 1]
BEGIN = [0, 100, 100, 165, 365]
TOKEN_TENSORS = ("q", "k", "v", "g", "beta", "do")


def case(dtype, **more):
    return make_inputs(**(dict(seqlens=LENGTHS, Hq=1, Hv=2, K=64, dtype=dtype) | more))


def changed(x, n, value=None):
    """The inputs with sequence n's tokens replaced: by other numbers, or by `value`."""
    tokens = slice(BEGIN[n], BEGIN[n] + LENGTHS[n])
    other = make_inputs(seqlens=LENGTHS, Hq=1, Hv=2, K=64, dtype=x.dtype, seed=99)
    replaced = {}
    for name in TOKEN_TENSORS:
        replaced[name] = getattr(x, name).clone()
        replaced[name][:, tokens] = getattr(other, name)[:, tokens] if value is None else value
    return x.replace(**replaced)


def assert_others_equal(a, b, n):
    inside = torch.zeros(sum(LENGTHS), dtype=torch.bool)
    inside[BEGIN[n]:BEGIN[n] + LENGTHS[n]] = True
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert_bitwise(name, a[name][:, ~inside], b[name][:, ~inside])
    others = [i for i in range(len(LENGTHS)) if i != n]
    for name in ("final_state", "dh0"):
        assert_bitwise(name, a[name][others], b[name][others])


@both
@pytest.mark.parametrize("auto_cp", [False, "invariant"])
@pytest.mark.parametrize("n", [0, 3])
def test_a_changed_sequence_leaves_the_others_bitwise_equal(n, auto_cp, dtype):
    x = case(dtype)
    a, b = helpers.run(x, auto_cp=auto_cp), helpers.run(changed(x, n), auto_cp=auto_cp)
    assert_others_equal(a, b, n)
    assert not torch.equal(a["final_state"][n], b["final_state"][n])


@both
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("auto_cp", [False, True])
def test_nan_and_infinity_stay_in_their_sequence(value, auto_cp, dtype):
    x = case(dtype)
    a, b = helpers.run(x, auto_cp=auto_cp), helpers.run(changed(x, 2, value), auto_cp=auto_cp)
    assert_others_equal(a, b, 2)
    assert not b["o"][:, BEGIN[2]:BEGIN[2] + LENGTHS[2]].isfinite().any()


@both
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_one_nan_is_not_lost(name, dtype):
    x = make_inputs(B=2, T=200, Hq=1, Hv=2, K=32, dtype=dtype)
    poisoned = getattr(x, name).clone()
    poisoned[0, 100, 0] = torch.nan
    a, b = helpers.run(x, auto_cp=False), helpers.run(x.replace(**{name: poisoned}), auto_cp=False)
    assert b["o"][0, 100, 0].isnan().all(), "the token's own output"
    if name == "q":
        assert b["o"][0, 101:].isfinite().all() and b["final_state"].isfinite().all()
    else:
        assert b["o"][0, 100:, 0].isnan().all() and b["final_state"][0, 0].isnan().all(), "the state carries it on"
    for result in ("o", "dq", "dk", "dv", "dg", "dbeta", "final_state", "dh0"):
        assert_bitwise(result, a[result][1], b[result][1])
    assert_bitwise("o", a["o"][0, :64], b["o"][0, :64])  # chunks before the token
    if name in ("v", "g", "beta"):  # a tensor of the value head: the other head is untouched
        assert_bitwise("o", a["o"][0, :, 1], b["o"][0, :, 1])


@both
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 130])
@pytest.mark.parametrize("auto_cp", [False, "invariant"])
def test_the_future_leaves_the_past_bitwise_equal(cut, auto_cp, dtype):
    x = make_inputs(T=200, Hq=1, Hv=2, K=64, dtype=dtype, grads=False)
    other = make_inputs(T=200, Hq=1, Hv=2, K=64, dtype=dtype, grads=False, seed=99)
    mixed = {name: torch.cat([getattr(x, name)[:, :cut], getattr(other, name)[:, cut:]], 1) for name in TOKEN_TENSORS[:5]}
    a = helpers.run(x, grads=False, auto_cp=auto_cp)
    b = helpers.run(x.replace(**mixed), grads=False, auto_cp=auto_cp)
    assert_bitwise("o", a["o"][:, :cut], b["o"][:, :cut])


@both
def test_alone_in_company_and_sharded_give_the_same_bits(dtype):
    x = make_inputs(B=3, T=130, Hq=2, Hv=4, K=64, dtype=dtype)
    whole = helpers.run(x, auto_cp=False)
    row = x.replace(**{name: getattr(x, name)[1:2] for name in (*TOKEN_TENSORS, "initial_state", "dht")})
    alone = helpers.run(row, auto_cp=False)
    for name in whole:
        assert_bitwise(name, whole[name][1:2], alone[name])
    # Heads sharded over two cards: key head 1 with its value heads 2 and 3.
    shard = x.replace(q=x.q[:, :, 1:], k=x.k[:, :, 1:], v=x.v[:, :, 2:], g=x.g[..., 2:], beta=x.beta[..., 2:], do=x.do[:, :, 2:],
                      initial_state=x.initial_state[:, 2:], dht=x.dht[:, 2:])
    sharded = helpers.run(shard, auto_cp=False)
    for name in ("o", "dv", "dg", "dbeta"):
        assert_bitwise(name, whole[name][:, :, 2:], sharded[name])
    for name in ("dq", "dk"):
        assert_bitwise(name, whole[name][:, :, 1:], sharded[name])
    for name in ("final_state", "dh0"):
        assert_bitwise(name, whole[name][:, 2:], sharded[name])


@both
def test_packed_and_dense_give_the_same_bits(dtype):
    dense = make_inputs(B=3, T=70, Hq=1, Hv=2, K=64, dtype=dtype)
    packed = dense.replace(**{name: getattr(dense, name).reshape(1, 210, *getattr(dense, name).shape[2:]) for name in TOKEN_TENSORS},
                           cu_seqlens=helpers.offsets([70] * 3))
    a, b = helpers.run(dense, auto_cp=False), helpers.run(packed, auto_cp=False)
    for name in a:
        assert_bitwise(name, a[name].reshape(b[name].shape), b[name])
