"""Rungs 7 and 8: every length around a chunk's edge, sequences cut anywhere, empty ones, padding after the last."""

import helpers
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers import check, make_inputs

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)


@both
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_rung7_lengths(T, dtype):
    check(make_inputs(B=2 if T < 200 else 1, T=T, Hq=1, Hv=2, K=128, dtype=dtype))


@both
@pytest.mark.parametrize("lengths", [
    [0, 65, 64], [65, 0, 64], [65, 64, 0], [0, 0, 63, 0, 0, 1, 0], [1] * 70, [64] * 3, [63, 65, 1, 127, 2], [200, 1, 0, 1, 129]], ids=str)
def test_rung7_cuts_and_empty_sequences(lengths, dtype):
    check(make_inputs(seqlens=lengths, Hq=1, Hv=2, K=128, dtype=dtype))


@both
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("state", [False, True])
def test_rung7_all_sequences_empty(lengths, padding, state, dtype):
    x = make_inputs(seqlens=lengths, padding=padding, Hq=1, Hv=2, K=32, dtype=dtype, state=state)
    got, _ = check(x)
    want = x.initial_state.float() if state else torch.zeros_like(got["final_state"])
    helpers.assert_bitwise("final_state", got["final_state"], want)
    assert not got["o"].any()


@both
@pytest.mark.parametrize("B,T", [(2, 0), (0, 5), (0, 0)])
def test_rung7_no_tokens_and_no_sequences(B, T, dtype):
    x = make_inputs(B=B, T=T, Hq=1, Hv=2, K=32, dtype=dtype)
    got, _ = check(x)
    assert got["o"].shape == (B, T, 2, 32)
    if B:
        helpers.assert_bitwise("final_state", got["final_state"], x.initial_state.float())


def test_rung7_cu_seqlens_of_no_sequences():
    x = make_inputs(seqlens=[], padding=7, Hq=1, Hv=2, K=32)
    got, _ = check(x)
    assert got["final_state"].shape == (0, 2, 32, 32) and not got["o"].any()


@hypothesis.given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=6), padding=st.sampled_from([0, 1, 70]),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 4), (3, 3)]), dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), v_first=st.booleans(), raw=st.booleans(),
    state=st.booleans(), index_dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 1000))
@hypothesis.settings(max_examples=40)
def test_rung7_any_shape(lengths, padding, heads, dims, dtype, v_first, raw, state, index_dtype, seed):
    check(make_inputs(seqlens=lengths, padding=padding, Hq=heads[0], Hv=heads[1], K=dims[0], V=dims[1], dtype=dtype,
                      state_v_first=v_first, raw=raw, state=state, index_dtype=index_dtype, seed=seed))


@both
@pytest.mark.parametrize("padding", [1, 63, 64, 1000])
def test_rung8_padding_after_the_last_offset(padding, dtype):
    x = make_inputs(seqlens=[70, 30], padding=padding, Hq=1, Hv=2, K=64, dtype=dtype)
    used = 100
    poisoned = {}
    for name in ("q", "k", "v", "g", "beta", "do"):  # what lies in the padding must not matter
        poisoned[name] = getattr(x, name).clone()
        poisoned[name][:, used:] = torch.nan
    got = helpers.run(x.replace(**poisoned))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, used:].any(), f"{name} is not zero in the padding"
    helpers.compare(got, helpers.reference(x), dtype)


@both
def test_rung8_padding_with_activations(dtype):
    x = make_inputs(seqlens=[70, 30], padding=30, Hq=1, Hv=2, K=64, dtype=dtype, raw=True)
    got, _ = check(x)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, 100:].any(), f"{name} is not zero in the padding"
