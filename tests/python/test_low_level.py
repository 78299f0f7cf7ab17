"""chunk_gated_delta_rule_fwd and _bwd: number, shapes and meaning of their values, and feeding them into each other."""

import helpers
import oracle
import pytest
import torch
from helpers import assert_bitwise, assert_close, make_inputs, to_numpy

import flash_qla

every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
layouts = pytest.mark.parametrize("seqlens", [None, [70, 0, 130, 64]], ids=["dense", "varlen"])


def forward(x, **options):
    return flash_qla.chunk_gated_delta_rule_fwd(
        x.q, x.k, x.v, x.g, x.beta, **(dict(initial_state=x.initial_state, cu_seqlens=x.cu_seqlens) | options))


def backward(x, g, A, **options):
    return flash_qla.chunk_gated_delta_rule_bwd(
        x.q, x.k, x.v, g, x.beta, A, x.do, **(dict(dht=x.dht, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens) | options))


def bounds(dtype):
    """The pair carries a float32 cumsum: its own bound in float32, the usual ones below."""
    if dtype == torch.float32:
        return dict.fromkeys(helpers.TENSORS, helpers.LOW_LEVEL_FLOAT32)
    return {name: helpers.bound_for(name, dtype) for name in helpers.TENSORS}


# Head dims: on a GPU the Hopper path's too. Of 300 tokens (264 packed) it computes the gradients as well.
dims = pytest.mark.parametrize("dims", helpers.with_cuda([dict(K=64, V=48)], [dict(K=128, V=128), dict(K=96, V=192), dict(K=256, V=256)]), ids=str)


def case(dtype, seqlens, **more):
    return make_inputs(**(dict(B=2, T=150, Hq=2, Hv=4, K=64, V=48, dtype=dtype, seqlens=seqlens) | more))


@every_dtype
@layouts
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@dims
def test_values_of_forward(dims, v_first, seqlens, dtype):
    x = case(dtype, seqlens, state_v_first=v_first, **dims)
    values = forward(x, output_h=True, state_v_first=v_first)
    assert len(values) == 5
    g, A, o, h, final_state = values
    B, T, Hv, V = x.v.shape
    cu = None if seqlens is None else x.cu_seqlens.cpu().numpy()
    assert (g.shape, g.dtype) == ((B, T, Hv), torch.float32)
    assert (A.shape, A.dtype) == ((B, T, Hv, 64), dtype)
    chunks = -(-T // 64) if seqlens is None else T // 64 + len(seqlens)
    assert (h.shape, h.dtype) == ((B, chunks, Hv, *((V, dims["K"]) if v_first else (dims["K"], V))), dtype)
    assert (o.dtype, final_state.dtype) == (dtype, torch.float32)

    assert_close("g", g, oracle.chunk_cumsum(to_numpy(x.g), cu), 1e-6, 2)
    assert_close("A", A, oracle.chunk_inverse(to_numpy(x.k), to_numpy(x.beta), cu), 1e-5 if dtype == torch.float32 else 5e-3, 2)
    starts = oracle.chunk_starts(B, T, cu)
    h = h.flatten(0, 1)  # as the oracle counts them: batch row by batch row, sequence by sequence
    want_o, want_final, want_h = oracle.forward(
        *(to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), initial_state=to_numpy(x.initial_state), cu_seqlens=cu,
        options=oracle.Options(state_v_first=v_first), snapshots=starts)
    helpers.compare({"o": o, "final_state": final_state, "h": h[:len(starts)]},
                    {"o": want_o, "final_state": want_final, "h": want_h}, dtype, bounds=bounds(dtype))
    assert not h[len(starts):].any(), "rows after the last chunk are zero"


@every_dtype
@layouts
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@dims
def test_forward_feeds_backward(dims, v_first, seqlens, dtype):
    x = case(dtype, seqlens, state_v_first=v_first, **dims)
    g, A, o, h, final_state = forward(x, state_v_first=v_first)
    assert h is None
    values = backward(x, g, A, state_v_first=v_first)
    assert len(values) == 6
    got = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), values))
    for name, like in (("dq", x.q), ("dk", x.k), ("dv", x.v), ("dbeta", x.beta)):
        assert (got[name].shape, got[name].dtype) == (like.shape, like.dtype), name
    assert got["dg"].dtype == torch.float32 and got["dh0"].dtype == torch.float32
    want = helpers.reference(x)
    helpers.compare(got, {name: want[name] for name in got}, dtype, bounds=bounds(dtype))


@every_dtype
@dims
def test_backward_recomputes_a_missing_inverse(dims, dtype):
    x = case(dtype, None, **dims)
    g, A, *_ = forward(x)
    want = helpers.reference(x)
    got = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), backward(x, g, None)))
    helpers.compare(got, {name: want[name] for name in got}, dtype, bounds=bounds(dtype))


@every_dtype
@dims
def test_low_precision_initial_state_gives_a_float32_gradient(dims, dtype):
    x = case(dtype, None, state_dtype=torch.bfloat16, **dims)
    g, A, *_ = forward(x)
    dh0 = backward(x, g, A)[5]
    assert dh0.dtype == torch.float32
    assert_close("dh0", dh0, helpers.reference(x)["dh0"], bounds(dtype)["dh0"], 1)


@every_dtype
@dims
def test_cumsum_restarts_and_is_clamped(dims, dtype):
    x = case(dtype, [70, 0, 130, 64], padding=6, **dims)
    g = x.g.clone()
    g[:, 3] = -1e4
    g[:, 72] = -torch.inf
    g[:, 80, 1] = 0.5
    cumsum = forward(x.replace(g=g))[0]
    assert cumsum.isfinite().all() and not cumsum[:, 264:].any()
    assert_close("g", cumsum, oracle.chunk_cumsum(to_numpy(g), x.cu_seqlens.cpu().numpy()), 1e-6, 2)
    # Differences after the clamped token keep their digits: that is what the clamp is for.
    assert_close("g", (cumsum[:, 60] - cumsum[:, 50]), (to_numpy(g)[:, 51:61]).sum(1), 1e-3)


@every_dtype
@dims
def test_no_gate_no_beta(dims, dtype):
    x = case(dtype, None, **dims).replace(g=None, beta=None)
    g, A, o, _, final_state = forward(x)
    assert not g.any()
    want = helpers.reference(x)
    dq, dk, dv, db, dg, dh0 = backward(x, None, A)
    assert db is None and dg is None
    helpers.compare({"o": o, "final_state": final_state, "dq": dq, "dk": dk, "dv": dv, "dh0": dh0}, want, dtype, bounds=bounds(dtype))


@every_dtype
@dims
def test_values_asked_for(dims, dtype):
    x = case(dtype, None, **dims)
    g, A, o, h, final_state = forward(x, output_final_state=False, output_h=False)
    assert h is None and final_state is None and A is not None and g is not None
    assert backward(x.replace(dht=None), g, A, initial_state=None, dht=None)[5] is None
    assert forward(x, output_final_state=True)[4] is not None


@every_dtype
@dims
@pytest.mark.parametrize("cache", [True, False])
def test_sixth_value_only_when_the_cache_is_named(cache, dims, dtype):
    x = case(dtype, None, **dims)
    values = forward(x, enable_fwd_cp_cache=cache, is_train=True, cp_context=None)
    assert len(values) == 6
    g, A = values[:2]
    assert values[5] is None
    for given in (values[5], "any object", (torch.zeros(3), None)):
        for a, b in zip(backward(x, g, A, cp_cache=given, cp_context=None), backward(x, g, A)):
            assert_bitwise("gradient", a, b)


@every_dtype
@dims
def test_h_is_exact_in_rows_with_offsets_on_the_host(dims, dtype):
    x = case(dtype, [70, 0, 130, 64], **dims)
    capacity = forward(x, output_h=True)[3]
    for host in (x.cu_seqlens.cpu(), x.cu_seqlens.cpu().numpy(), x.cu_seqlens.tolist()):
        exact = forward(x, output_h=True, cu_seqlens_cpu=host)[3]
        assert exact.shape[:2] == (1, 2 + 0 + 3 + 1)
        assert_bitwise("h", exact, capacity[:, :6])


@every_dtype
@dims
@pytest.mark.parametrize("host", [[0, 64, 70, 134, 264], [0, 70, 71, 200, 264], [0, 1, 2, 3, 4]], ids=str)
def test_wrong_offsets_on_the_host_change_the_rows_of_h_alone(host, dims, dtype):
    # They say how many rows h has; the sequences are those of the device. Rows that are too many are zero.
    x = case(dtype, [70, 0, 130, 64], **dims)
    values, wrong = forward(x, output_h=True), forward(x, output_h=True, cu_seqlens_cpu=host)
    rows = sum(-(-(b - a) // 64) for a, b in zip(host, host[1:]))
    right, got = values[3][0], wrong[3][0]
    assert got.shape[0] == rows
    assert_bitwise("h", got[:6], right[:min(rows, 6)])
    assert not got[6:].any()
    for name, a, b in zip(("g", "A", "o", "final_state"), (*values[:3], values[4]), (*wrong[:3], wrong[4])):
        assert_bitwise(name, a, b)


@every_dtype
@dims
def test_h_rows_of_empty_sequences(dims, dtype):
    x = case(dtype, [0, 0, 0], padding=10, **dims)
    h = forward(x, output_h=True)[3]
    assert h.shape[:2] == (1, 10 // 64 + 3) and not h.any()


@dims
@pytest.mark.parametrize("shape", [dict(B=0), dict(B=2, T=0)], ids=str)
def test_h_of_a_call_without_tokens(shape, dims):
    x = case(torch.float32, None, **dims | shape).replace(initial_state=None)
    assert forward(x, output_h=True)[3].shape == (x.q.shape[0], -(-x.q.shape[1] // 64), 4, x.q.shape[3], x.v.shape[3])


@every_dtype
@dims
def test_agrees_bitwise_with_autograd_where_both_are_float32(dims, dtype):
    x = case(dtype, [70, 0, 130, 64], **dims)
    whole = helpers.run(x)
    g, A, o, _, final_state = forward(x)
    assert_bitwise("o", o, whole["o"])
    assert_bitwise("final_state", final_state, whole["final_state"])


@every_dtype
@pytest.mark.parametrize("missing", ["do", "dht", "initial_state"])
@dims
def test_backward_with_absent_tensors(dims, missing, dtype):
    x = case(dtype, [70, 0, 200], **dims).replace(**{missing: None})
    g, A, *_ = forward(x)
    got = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), backward(x, g, A)))
    want = helpers.reference(x)
    helpers.compare(got, {name: want[name] for name in got if name in want}, dtype, bounds=bounds(dtype))


def test_float64_pair_on_the_cpu(device):
    if device != "cpu":
        pytest.skip("float64 is offered on the CPU alone")
    x = make_inputs(T=100, Hq=1, Hv=2, K=16, dtype=torch.float64)
    g, A, o, h, final_state = forward(x, output_h=True)
    assert {t.dtype for t in (g, A, o, h, final_state)} == {torch.float64}
    got = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), backward(x, g, A))) | {"o": o, "final_state": final_state}
    helpers.compare(got, helpers.reference(x), torch.float64)


def test_many_value_heads_of_one_key_head():
    x = make_inputs(T=70, Hq=1, Hv=64, K=16, dtype=torch.bfloat16)
    g, A, *_ = forward(x)
    got = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), backward(x, g, A)))
    want = helpers.reference(x)
    helpers.compare(got, {name: want[name] for name in got}, x.dtype)
