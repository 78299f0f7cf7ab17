"""Requirements 7 and 8: every length around a chunk's edge, sequences cut anywhere, empty ones, padding after the last."""

import helpers
import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from helpers import check, make_inputs

every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
head_dims = pytest.mark.parametrize("K", helpers.with_cuda([32], [96, 128, 192]))
# Sequences and, on a GPU, their like for the Hopper path: more than the 256 tokens up to which gradients are computed in float32.
padded = pytest.mark.parametrize("K, lengths", helpers.with_cuda([(64, [70, 30])], [(128, [70, 30]), (128, [170, 130])]), ids=str)


@pytest.mark.requirement(7)
@every_dtype
@pytest.mark.parametrize("T", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000])
def test_lengths(T, dtype):
    check(make_inputs(B=2 if T < 200 else 1, T=T, Hq=1, Hv=2, K=128, dtype=dtype))


# Lengths on both sides of what decides on a path or on how it goes about a call: 64 and 256 tokens, below which gradients are
# computed in float32; 512 and 4,096, from which on sequences may be cut; and lengths between.
DISPATCH = [65, 200, 256, 257, 300, 512, 1000, 4096]
MODES = [dict(auto_cp=True), dict(auto_cp=False), dict(auto_cp="invariant"), dict(force_intra_cp=True)]


@pytest.mark.requirement(7)
@pytest.mark.path("sm90", operations=("chunk_forward",))
@pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
@pytest.mark.parametrize("mode", MODES, ids=str)
@pytest.mark.parametrize("T", DISPATCH)
def test_lengths_around_what_decides_on_a_path(T, mode, dtype, paths):
    for heads in ((1, 2), (2, 4)):
        x = make_inputs(T=T, Hq=heads[0], Hv=heads[1], K=128, dtype=dtype, drawn_on=helpers.settings.device)
        check(x, oracle=helpers.library_reference, **mode)
    if T == 4096:
        planned = {c.planned for c in paths.calls if c.operation == "chunk_forward" and c.path == "sm90"}
        assert planned == {mode.get("auto_cp", True) is not False}
    backward = {c.path for c in paths.calls if c.operation == "chunk_backward" and c.named == paths.named}
    assert T <= 256 and backward == {"cuda_generic"} or backward == {"sm90"}, backward


@pytest.mark.requirement(7)
@every_dtype
@pytest.mark.parametrize("lengths", helpers.with_cuda(
    [[0, 65, 64], [65, 0, 64], [65, 64, 0], [0, 0, 63, 0, 0, 1, 0], [1] * 70, [64] * 3, [63, 65, 1, 127, 2], [200, 1, 0, 1, 129]],
    [[0, 0, 257], [300, 0, 0, 64, 1, 65], [64] * 9, [2] * 130, [600, 0, 63, 700]]), ids=lambda lengths: str(lengths[:9]))
def test_cuts_and_empty_sequences(lengths, dtype):
    check(make_inputs(seqlens=lengths, Hq=1, Hv=2, K=128, dtype=dtype))


@pytest.mark.requirement(7)
@every_dtype
@pytest.mark.parametrize("lengths", [[0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("state", [False, True])
@head_dims
def test_all_sequences_empty(K, lengths, padding, state, dtype):
    x = make_inputs(seqlens=lengths, padding=padding, Hq=1, Hv=2, K=K, dtype=dtype, state=state)
    got, _ = check(x)
    want = x.initial_state.float() if state else torch.zeros_like(got["final_state"])
    helpers.assert_bitwise("final_state", got["final_state"], want)
    assert not got["o"].any()


@pytest.mark.requirement(7)
@every_dtype
@pytest.mark.parametrize("B,T", [(2, 0), (0, 5), (0, 0)])
@head_dims
def test_no_tokens_and_no_sequences(K, B, T, dtype):
    x = make_inputs(B=B, T=T, Hq=1, Hv=2, K=K, dtype=dtype)
    got, _ = check(x)
    assert got["o"].shape == (B, T, 2, K)
    if B:
        helpers.assert_bitwise("final_state", got["final_state"], x.initial_state.float())


@pytest.mark.requirement(7)
@every_dtype
@head_dims
def test_cu_seqlens_of_no_sequences(K, dtype):
    x = make_inputs(seqlens=[], padding=7, Hq=1, Hv=2, K=K, dtype=dtype)
    got, _ = check(x)
    assert got["final_state"].shape == (0, 2, K, K) and not got["o"].any()


ANY_DIMS = st.tuples(st.integers(1, 70), st.integers(1, 70))


@pytest.mark.requirement(7)
@hypothesis.given(
    lengths=st.lists(st.integers(0, 140), min_size=1, max_size=6), padding=st.sampled_from([0, 1, 70]),
    heads=st.sampled_from([(1, 1), (1, 2), (2, 4), (3, 3)]), dims=st.one_of(*helpers.with_cuda([ANY_DIMS], [st.just((128, 128))])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), v_first=st.booleans(), raw=st.booleans(),
    state=st.booleans(), index_dtype=st.sampled_from([torch.int32, torch.int64]), seed=st.integers(0, 1000))
@hypothesis.settings(max_examples=40)
def test_any_shape(lengths, padding, heads, dims, dtype, v_first, raw, state, index_dtype, seed):
    check(make_inputs(seqlens=lengths, padding=padding, Hq=heads[0], Hv=heads[1], K=dims[0], V=dims[1], dtype=dtype,
                      state_v_first=v_first, raw=raw, state=state, index_dtype=index_dtype, seed=seed))


@pytest.mark.requirement(8)
@every_dtype
@pytest.mark.parametrize("padding", [1, 63, 64, 1000])
@padded
def test_padding_after_the_last_offset(K, lengths, padding, dtype):
    x = make_inputs(seqlens=lengths, padding=padding, Hq=1, Hv=2, K=K, dtype=dtype)
    used = sum(lengths)
    poisoned = {}
    for name in ("q", "k", "v", "g", "beta", "do"):  # what lies in the padding must not matter
        poisoned[name] = getattr(x, name).clone()
        poisoned[name][:, used:] = torch.nan
    got = helpers.run(x.replace(**poisoned))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, used:].any(), f"{name} is not zero in the padding"
    helpers.compare(got, helpers.reference(x), dtype)


@pytest.mark.requirement(8)
@every_dtype
@padded
def test_padding_with_activations(K, lengths, dtype):
    x = make_inputs(seqlens=lengths, padding=30, Hq=1, Hv=2, K=K, dtype=dtype, raw=True)
    got, _ = check(x)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not got[name][:, sum(lengths):].any(), f"{name} is not zero in the padding"
