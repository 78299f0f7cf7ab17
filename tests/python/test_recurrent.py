"""fused_recurrent_gated_delta_rule: every option, FLA's parameter order, forward only."""

import helpers
import pytest
import torch
from helpers import make_inputs

import flash_qla

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=helpers.dtype_name)


def recurrent(x, **overrides):
    arguments = dict(g=x.g, beta=x.beta, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
                     A_log=x.A_log, dt_bias=x.dt_bias) | x.options | overrides
    return flash_qla.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, **arguments)


def check(x):
    helpers.compare(helpers.run(x, grads=False, function=recurrent), helpers.reference(x, grads=False), x.dtype)


@both
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("seqlens", [None, [1, 0, 3, 1, 20]], ids=["dense", "varlen"])
def test_options(seqlens, v_first, raw, dtype):
    check(make_inputs(B=3, T=4, Hq=2, Hv=4, K=64, V=32, dtype=dtype, raw=raw, state_v_first=v_first, seqlens=seqlens, grads=False))


@both
@pytest.mark.parametrize("T", [1, 17, 65, 130])
def test_lengths(T, dtype):
    check(make_inputs(B=2, T=T, Hq=1, Hv=2, K=128, dtype=dtype, grads=False))


@both
@pytest.mark.parametrize("dims", [(1, 1), (7, 3), (96, 192), (256, 256)], ids=str)
def test_head_dims(dims, dtype):
    check(make_inputs(B=2, T=2, Hq=1, Hv=2, K=dims[0], V=dims[1], dtype=dtype, grads=False))


@both
def test_absent_tensors_and_low_precision_states(dtype):
    x = make_inputs(B=2, T=3, Hq=1, Hv=2, K=64, dtype=dtype, grads=False)
    check(x.replace(g=None, beta=None, initial_state=None))
    check(make_inputs(B=2, T=3, Hq=1, Hv=2, K=64, dtype=dtype, grads=False, state_dtype=torch.bfloat16, gate_dtype=torch.bfloat16,
                      beta_dtype=torch.bfloat16))


def test_parameter_order_is_flas():
    x = make_inputs(B=2, T=2, K=32, grads=False)
    by_position = flash_qla.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, x.g, None, None, x.beta, 0.5, x.initial_state, True)
    by_name = recurrent(x, scale=0.5)
    for a, b in zip(by_position, by_name):
        helpers.assert_bitwise("value", a, b)


# Of q, k, v: FLA's tests have the first.
MIXED = [(torch.float32, torch.float32, torch.float16), (torch.bfloat16, torch.bfloat16, torch.float32),
         (torch.float16, torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16, torch.float16)]


@pytest.mark.parametrize("dtypes", MIXED, ids=lambda dtypes: "-".join(map(helpers.dtype_name, dtypes)))
@pytest.mark.parametrize("options", [{}, dict(raw=True), dict(state_v_first=True, seqlens=[1, 0, 3, 1, 20])], ids=str)
def test_inputs_of_several_dtypes(options, dtypes):
    """Each is read as it is, all is computed in float32: the oracle has the rounded inputs, the bounds are float32's, and
    o alone is rounded once more."""
    x = make_inputs(B=2, T=12, Hq=2, Hv=4, K=64, V=32, grads=False, **options)
    x = x.replace(**{name: getattr(x, name).to(dtype) for name, dtype in zip("qkv", dtypes)})
    wide = x.replace(q=x.q.float(), k=x.k.float(), v=x.v.float())  # so that a norm in the kernel is not rounded either
    got, want = helpers.run(x, grads=False, function=recurrent), helpers.reference(wide, grads=False)
    assert (got["o"].dtype, got["final_state"].dtype) == (dtypes[2], torch.float32)
    helpers.compare({"final_state": got["final_state"]}, {"final_state": want["final_state"]}, torch.float32)
    helpers.compare({"o": got["o"]}, {"o": want["o"]}, dtypes[2])


def test_the_chunked_call_and_float64_take_no_several_dtypes():
    x = make_inputs(T=4, K=32, grads=False)
    with pytest.raises(TypeError, match="^chunk_gated_delta_rule: v.dtype "):
        helpers.call(x.replace(v=x.v.half()))
    with pytest.raises(TypeError, match="^fused_recurrent_gated_delta_rule: v.dtype "):
        recurrent(x.replace(v=x.v.double()))


def test_transpose_state_layout_is_an_alias():
    x = make_inputs(B=2, T=3, K=32, V=16, state_v_first=True, grads=False)
    want = recurrent(x)
    with pytest.warns(DeprecationWarning, match="^fused_recurrent_gated_delta_rule: transpose_state_layout") as caught:
        got = recurrent(x, state_v_first=False, transpose_state_layout=True)
    assert caught[0].filename == __file__
    for a, b in zip(got, want):
        helpers.assert_bitwise("value", a, b)
    with pytest.warns(DeprecationWarning):
        assert recurrent(x, state_v_first=False, transpose_state_layout=False, initial_state=None)[1].shape[-2:] == (32, 16)
    for given in (True, False):
        with pytest.raises(ValueError, match="^fused_recurrent_gated_delta_rule: transpose_state_layout "):
            recurrent(x, transpose_state_layout=given)


def test_final_state_is_only_returned_when_asked():
    x = make_inputs(T=2, K=32, grads=False)
    assert recurrent(x, output_final_state=False)[1] is None


def test_agrees_with_the_chunked_call():
    x = make_inputs(T=100, K=128, grads=False)
    a, b = recurrent(x), helpers.call(x)
    for name, left, right in zip(("o", "final_state"), a, b):
        helpers.assert_close(name, left, helpers.to_numpy(right), 2e-5)


@pytest.mark.parametrize("name", ["gk", "gv"])
def test_channel_decay_is_not_there_yet(name):
    x = make_inputs(T=2, K=32, grads=False)
    with pytest.raises(NotImplementedError, match=f"^fused_recurrent_gated_delta_rule: {name} "):
        recurrent(x, **{name: torch.zeros_like(x.q)})


@pytest.mark.parametrize("name", ["q", "initial_state"])
@pytest.mark.parametrize("loss", ["o", "final_state", "both"])
def test_backward_is_refused(loss, name):
    x = make_inputs(T=2, K=32)
    leaf = getattr(x, name).requires_grad_()
    results = dict(zip(("o", "final_state"), recurrent(x)))
    # Another term of the loss, so that a result that was silently detached would leave a gradient without an error.
    total = (leaf * 2).sum() + sum(results[key].sum() for key in results if loss in (key, "both"))
    with pytest.raises(NotImplementedError, match="^fused_recurrent_gated_delta_rule: .*chunk_gated_delta_rule"):
        total.backward()


def test_results_are_detached_where_nothing_wants_a_gradient():
    x = make_inputs(T=2, K=32)
    assert not any(t.requires_grad for t in recurrent(x))
    with torch.no_grad():
        assert not any(t.requires_grad for t in recurrent(x.replace(q=x.q.requires_grad_())))
