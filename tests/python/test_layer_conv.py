"""causal_conv1d against the oracle: values and gradients of every option, dtype and layout."""

import helpers
import layer_oracle as oracle
import pytest
import torch
from helpers import assert_bitwise, assert_close, dtype_name, settings, to_numpy
from layer_helpers import BOUNDS, SUM_NAMES, Conv, bound_of, drawn, dtypes

import flash_qla

# causal_conv1d's own grid, and the borders of what the kernels take at once.
LENGTHS = [1, 2, 3, 8, 16, 32, 63, 64, 65, 128, 255, 256, 257, 259, 512, 784, 1024, 2048]


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
@pytest.mark.parametrize("W", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
def test_options(dtype, W, activation, bias):
    Conv(dtype=dtype, W=W, activation=activation, bias=bias).check()


@pytest.mark.parametrize("T", LENGTHS)
@pytest.mark.parametrize("dtype", dtypes()[:2], ids=dtype_name)
def test_lengths(T, dtype):
    Conv(B=2, T=T, C=16, dtype=dtype, state=3).check()


@pytest.mark.parametrize("C", [1, 5, 64, 96, 130, 200])
def test_channels(C):
    Conv(C=C, T=70, state=4).check()


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
def test_norm_of_heads(D, dtype):
    Conv(B=1, T=21, C=2 * D + 40, dtype=dtype, l2norm_heads=2, head_dim=D).check()


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("D", [1, 3, 17])
def test_norm_of_odd_heads(D, activation):
    # One channel is normalised to its sign: its gradient is what rounding leaves of 1 - 1, and no float32 has it.
    Conv(T=30, C=3 * D, l2norm_heads=3, head_dim=D, activation=activation).check(grads=D > 1)


def test_norm_of_rows_of_zeros_is_finite():
    case = Conv(B=1, T=12, C=40, l2norm_heads=2, head_dim=16, bias=False)
    case.x[:, 3:9] = 0
    got = case.check()
    assert all(value.isfinite().all() for value in got.values() if value is not None)
    assert not got["y"][:, 6:9, :32].any()


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
def test_residual(dtype):
    Conv(dtype=dtype, residual=True).check()
    Conv(dtype=dtype, residual=True, seqlens=[5, 0, 9], padding=3).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_name)
def test_weights_and_states_of_other_dtypes(dtype):
    case = Conv(dtype=dtype, weight_dtype=torch.float32, state_dtype=torch.float32, state=4)
    got = case.check()
    assert got["dweight"].dtype == got["dinitial_state"].dtype == torch.float32
    assert got["final_state"].dtype == torch.float32


SEQLENS = {
    "empty first": [0, 0, 7, 12], "empty middle": [5, 0, 0, 9], "empty last": [300, 0], "all empty": [0, 0, 0], "none": [],
    "ones": [1] * 40, "short": [1, 2, 3, 4, 5], "run borders": [254, 2, 256, 1, 255, 3], "one": [513], "across": [250, 20, 300],
}


@pytest.mark.parametrize("name", SEQLENS)
@pytest.mark.parametrize("state", [0, 3, 6])
def test_packed(name, state):
    Conv(C=20, seqlens=SEQLENS[name], padding=4, state=state, final=1, index_dtype=torch.int64).check()


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
def test_packed_with_norm(dtype):
    Conv(C=40, seqlens=[3, 0, 250, 17], padding=2, dtype=dtype, state=4, l2norm_heads=2, head_dim=16).check()


def test_sequences_start_near_a_run_border():
    for shift in range(-4, 5):
        Conv(C=8, seqlens=[256 + shift, 40], state=3, seed=shift + 4).check()


def test_65536_sequences_of_length_one():
    N, C = 65536, 4
    case = Conv(C=C, seqlens=[1] * N, state=3)
    got = case.run(grads=False)
    u = (case.weight[:, 3] * case.x[0] + (case.initial_state * case.weight[:, :3]).sum(-1) + case.bias).double()
    assert_close("y", got["y"][0], to_numpy(u * u.sigmoid()), BOUNDS[torch.float32])
    assert_bitwise("final_state", got["final_state"], torch.cat([case.initial_state[:, :, 1:], case.x[0, :, :, None]], -1))


SEQ_IDX = {
    "sorted": [[0] * 5 + [1] * 2 + [2] * 30], "returning": [[0, 1, 0, 1, 0, 0, 2, 2, 0] + [3] * 28],
    "padding": [[-1] * 4 + [0] * 9 + [-1] * 3 + [1] * 21], "all padding": [[-1] * 37],
}


@pytest.mark.parametrize("name", SEQ_IDX)
@pytest.mark.parametrize("heads", [0, 2])
def test_seq_idx(name, heads):
    index = SEQ_IDX[name] * 2
    case = Conv(T=37, C=40, seq_idx=index, l2norm_heads=heads, head_dim=16 if heads else None, residual=not heads)
    if not heads:  # a token without a sequence has no output at all
        case.dy[torch.as_tensor(index, device=settings.device) < 0] = 0
        case.residual[torch.as_tensor(index, device=settings.device) < 0] = 0
    case.check()


def test_seq_idx_of_whole_sequences_is_cu_seqlens():
    lengths = [5, 9, 3, 260]
    packed = Conv(C=24, seqlens=lengths)
    indexed = Conv(B=1, T=sum(lengths), C=24, seq_idx=[[n for n, length in enumerate(lengths) for _ in range(length)]])
    got = indexed.run()
    for name, value in packed.run().items():
        if name in SUM_NAMES:  # over other runs of tokens, where the two are computed by other kernels
            assert_close(name, got[name], to_numpy(value), bound_of(name, value))
        elif value is not None:
            assert_bitwise(name, got[name], value)


def test_any_strides():
    case = Conv(B=2, T=50, C=24, residual=True, state=4)
    plain = case.run()
    wide = drawn((2, 101, 60), seed=9)
    for name in ("x", "residual", "dy"):
        value = getattr(case, name)
        buffer = wide.clone()
        buffer[:, 1:101:2, 7:55:2] = value
        setattr(case, name, buffer[:, 1:101:2, 7:55:2])
    case.weight = case.weight.t().contiguous().t()
    case.initial_state = case.initial_state.transpose(1, 2).contiguous().transpose(1, 2)
    case.dfinal = case.dfinal.transpose(0, 1).contiguous().transpose(0, 1)
    for name, value in case.run().items():
        assert_bitwise(name, value, plain[name])


def test_expanded_gradient():
    case = Conv(B=2, T=20, C=16)
    case.dy = torch.ones(1, 1, 1, device=settings.device).expand(2, 20, 16)
    case.check()


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
@pytest.mark.parametrize("channels_last", [False, True])
def test_channels_first(dtype, channels_last):
    """causal_conv1d_fn: same numbers as causal_conv1d, whichever way x lies."""
    case = Conv(B=2, T=150, C=72, dtype=dtype, state=3)
    plain = case.run()
    x = case.x.transpose(1, 2)
    x = (x if channels_last else x.contiguous()).detach().requires_grad_()
    y, final = flash_qla.causal_conv1d_fn(x, case.weight, case.bias, initial_states=case.initial_state, return_final_states=True,
                                          activation="silu")
    assert y.stride() == x.stride()
    dx, = torch.autograd.grad([y, final], [x], [case.dy.transpose(1, 2), case.dfinal])
    assert_bitwise("y", y.transpose(1, 2), plain["y"])
    assert_bitwise("dx", dx.transpose(1, 2), plain["dx"])
    assert_bitwise("final_state", final, plain["final_state"])


def test_channels_first_in_a_wider_buffer():
    buffer = drawn((2, 4128 + 64, 30))
    x = buffer[:, 64:]
    weight = drawn((4128, 4), scale=0.5)
    y = flash_qla.causal_conv1d_fn(x, weight, activation="silu")
    want, _ = oracle.conv_forward(to_numpy(x).transpose(0, 2, 1), to_numpy(weight), options=oracle.Conv("silu"))
    assert_close("y", y.transpose(1, 2), want, BOUNDS[torch.float32])


def test_final_states_go_where_they_are_wanted():
    x, weight = drawn((2, 8, 5)), drawn((8, 4))
    out = torch.zeros(2, 8, 3, device=settings.device)
    y, final = flash_qla.causal_conv1d_fn(x, weight, return_final_states=True, final_states_out=out)
    assert final is out
    assert_bitwise("final", out, x[:, :, 2:])


def test_gradients_with_absent_inputs():
    """Only what needs a gradient gets one, and a gradient of the final state alone is enough."""
    case = Conv(state=3)
    x = case.x.detach().requires_grad_()
    y, final = case.call(x=x)
    dx, = torch.autograd.grad(final, x, case.dfinal)
    want = oracle.conv_backward(to_numpy(case.x), to_numpy(case.weight), to_numpy(case.bias), None, to_numpy(case.initial_state),
                                None, to_numpy(case.dfinal), case.oracle_options())["dx"]
    assert_close("dx", dx, want, bound_of("dx", dx))


def test_neighbours_and_past_are_bitwise_unchanged():
    lengths = [70, 0, 300, 40]
    case = Conv(C=40, seqlens=lengths, state=4, l2norm_heads=1, head_dim=32)
    before = case.run()
    case.x[0, 200] = float("nan")
    after = case.run()
    for name in ("y", "dx"):
        for begin, end in ((0, 70), (370, 410)):
            assert_bitwise(name, after[name][:, begin:end], before[name][:, begin:end])
    assert_bitwise("past", after["y"][:, :200], before["y"][:, :200])
    assert after["y"][0, 200:204].isnan().all() and not after["y"][0, 204:].isnan().any()


def test_prefill_in_parts_is_the_whole_bitwise():
    case = Conv(B=2, T=301, C=48, state=4, l2norm_heads=2, head_dim=16)
    whole = case.run(grads=False)
    state, parts = case.initial_state, []
    for begin, end in ((0, 1), (1, 3), (3, 200), (200, 301)):
        y, state = flash_qla.causal_conv1d(case.x[:, begin:end], case.weight, case.bias, initial_state=state, output_final_state=True,
                                           **case.options)
        parts.append(y)
    assert_bitwise("y", torch.cat(parts, 1), whole["y"])
    assert_bitwise("final_state", state, whole["final_state"])


def test_results_repeat_and_do_not_depend_on_threads():
    case = Conv(B=2, T=700, C=200, state=3)
    before = case.run()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        for name, value in case.run().items():
            assert_bitwise(name, value, before[name])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.cpu_only
def test_both_paths_of_the_host_agree():
    """The library's own recurrence in fp64 on the same call, every option at once."""
    case = Conv(C=40, seqlens=[3, 0, 250, 17], padding=2, dtype=torch.float64, state=5, l2norm_heads=2, head_dim=16)
    found = case.run()
    with helpers.use_path("reference"):
        for name, value in case.run().items():
            assert_close(name, found[name], value, 1e-12)
