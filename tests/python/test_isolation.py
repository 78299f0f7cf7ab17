"""Requirement 10: sequences do not see each other, the past does not see the future, and NaN stays at home."""

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs

pytestmark = pytest.mark.requirement(10)

every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
TOKEN_TENSORS = ("q", "k", "v", "g", "beta", "do")
LENGTHS = [100, 0, 65, 200, 1]
# On a GPU also a sequence that "invariant" cuts (from 4,096 tokens on).
CUT = [4200, 0, 65, 600, 1]
sizes = pytest.mark.parametrize("K, lengths", helpers.with_cuda([(64, LENGTHS)], [(128, LENGTHS), (128, CUT)]), ids=str)
head_dims = pytest.mark.parametrize("K", helpers.with_cuda([64], [96, 128, 256]))


def case(lengths, K, dtype, seed=0):
    return make_inputs(seqlens=lengths, Hq=1, Hv=2, K=K, dtype=dtype, seed=seed)


def tokens_of(lengths, n):
    return slice(sum(lengths[:n]), sum(lengths[:n + 1]))


def changed(x, lengths, n, value=None):
    """The inputs with sequence n's tokens replaced: by other numbers, or by `value`."""
    tokens, other = tokens_of(lengths, n), case(lengths, x.q.shape[3], x.dtype, seed=99)
    replaced = {}
    for name in TOKEN_TENSORS:
        replaced[name] = getattr(x, name).clone()
        replaced[name][:, tokens] = getattr(other, name)[:, tokens] if value is None else value
    return x.replace(**replaced)


def without(results, lengths, n):
    """The results of all sequences but number n."""
    tokens, rest = torch.ones(sum(lengths), dtype=torch.bool), [i for i in range(len(lengths)) if i != n]
    tokens[tokens_of(lengths, n)] = False
    return {name: value[rest] if name in ("final_state", "dh0") else value[:, tokens.to(value.device)] for name, value in results.items()}


def assert_others_equal(a, b, lengths, n):
    others = without(b, lengths, n)
    for name, value in without(a, lengths, n).items():
        assert_bitwise(name, value, others[name])


@every_dtype
@sizes
@pytest.mark.parametrize("auto_cp", helpers.with_cuda([False], ["invariant"]))  # the CPU knows no modes
@pytest.mark.parametrize("n", [0, 3])
def test_a_changed_sequence_leaves_the_others_bitwise_equal(n, auto_cp, K, lengths, dtype):
    x = case(lengths, K, dtype)
    a, b = helpers.run(x, auto_cp=auto_cp), helpers.run(changed(x, lengths, n), auto_cp=auto_cp)
    assert_others_equal(a, b, lengths, n)
    assert not torch.equal(a["final_state"][n], b["final_state"][n])


@every_dtype
@sizes
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("auto_cp", helpers.with_cuda([True], [False, "invariant"]))
def test_nan_and_infinity_stay_in_their_sequence(value, auto_cp, K, lengths, dtype):
    x = case(lengths, K, dtype)
    a, b = helpers.run(x, auto_cp=auto_cp), helpers.run(changed(x, lengths, 2, value), auto_cp=auto_cp)
    if auto_cp is True and lengths == CUT:
        # The plan may go by the whole batch: the others' bits may change, within their bounds.
        helpers.compare(without(b, lengths, 2), without(helpers.library_reference(x), lengths, 2), dtype)
    else:
        assert_others_equal(a, b, lengths, 2)
    assert not b["o"][:, tokens_of(lengths, 2)].isfinite().any()


@every_dtype
@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("K", helpers.with_cuda([32], [128]))
def test_one_nan_is_not_lost(K, name, dtype):
    x = make_inputs(B=2, T=200, Hq=1, Hv=2, K=K, dtype=dtype)
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


@every_dtype
@head_dims
@pytest.mark.parametrize("T, cut", helpers.with_cuda([(200, n) for n in (1, 63, 64, 65, 130)], [(4500, n) for n in (1000, 2304, 4000)]))
@pytest.mark.parametrize("auto_cp", helpers.with_cuda([False], ["invariant"]))
def test_the_future_leaves_the_past_bitwise_equal(T, cut, auto_cp, K, dtype):
    x = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=dtype, grads=False)
    other = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=dtype, grads=False, seed=99)
    mixed = {name: torch.cat([getattr(x, name)[:, :cut], getattr(other, name)[:, cut:]], 1) for name in TOKEN_TENSORS[:5]}
    a = helpers.run(x, grads=False, auto_cp=auto_cp)
    b = helpers.run(x.replace(**mixed), grads=False, auto_cp=auto_cp)
    assert_bitwise("o", a["o"][:, :cut], b["o"][:, :cut])


@every_dtype
@head_dims
def test_alone_in_company_and_sharded_give_the_same_bits(K, dtype):
    x = make_inputs(B=3, T=130, Hq=2, Hv=4, K=K, dtype=dtype)
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


@every_dtype
@head_dims
def test_packed_and_dense_give_the_same_bits(K, dtype):
    dense = make_inputs(B=3, T=70, Hq=1, Hv=2, K=K, dtype=dtype)
    packed = dense.replace(**{name: getattr(dense, name).reshape(1, 210, *getattr(dense, name).shape[2:]) for name in TOKEN_TENSORS},
                           cu_seqlens=helpers.offsets([70] * 3))
    a, b = helpers.run(dense, auto_cp=False), helpers.run(packed, auto_cp=False)
    for name in a:
        assert_bitwise(name, a[name].reshape(b[name].shape), b[name])
