"""Keywords that callers of FLA and of FlashQLA pass, beyond those that the other files are about."""

import warnings

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import assert_bitwise, make_inputs

import flash_qla


def chunked(x, **overrides):
    options = dict(initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens) | x.options | overrides
    return flash_qla.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **options)


def test_transpose_state_layout_is_an_alias():
    x = make_inputs(T=70, Hq=1, Hv=2, K=32, V=16, state_v_first=True, grads=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        want = chunked(x)
    with pytest.warns(DeprecationWarning, match="^chunk_gated_delta_rule: transpose_state_layout is now state_v_first") as caught:
        got = chunked(x, state_v_first=False, transpose_state_layout=True)
    assert caught[0].filename == __file__, "the warning names the caller's line"
    for a, b in zip(got, want):
        assert_bitwise("value", a, b)
    with pytest.warns(DeprecationWarning):
        assert chunked(x, state_v_first=False, transpose_state_layout=False, initial_state=None)[1].shape[-2:] == (32, 16)
    for given in (True, False):
        with pytest.raises(ValueError, match=rf"^chunk_gated_delta_rule: transpose_state_layout \({given}\) must be left out"):
            chunked(x, transpose_state_layout=given)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transpose_state_layout_compiles():
    x = make_inputs(T=70, Hq=1, Hv=2, K=32, V=16, state_v_first=True, grads=False).with_options(state_v_first=False)
    for function in (flash_qla.chunk_gated_delta_rule, flash_qla.fused_recurrent_gated_delta_rule):
        def call(q, function=function):
            return function(q, x.k, x.v, g=x.g, beta=x.beta, initial_state=x.initial_state, transpose_state_layout=True)[0]

        assert_bitwise("o", torch.compile(call, fullgraph=True, backend="aot_eager")(x.q), call(x.q))


@pytest.mark.parametrize("size", [1, 4, 16, 32, 64, 100, np.int64(7)])
def test_chunk_size_has_no_effect(size):
    x = make_inputs(T=70, Hq=1, Hv=2, K=16, grads=False)
    for a, b in zip(chunked(x, chunk_size=size), chunked(x)):
        assert_bitwise("value", a, b)


def test_chunk_size_is_a_positive_number():
    x = make_inputs(T=3, Hq=1, Hv=1, K=16, grads=False)
    for size in (0, -64):
        with pytest.raises(ValueError, match=rf"^chunk_gated_delta_rule: chunk_size must be from 1 to \d+ \({size}\)"):
            chunked(x, chunk_size=size)
    with pytest.raises(TypeError, match="^chunk_gated_delta_rule: chunk_size must be an integer"):
        chunked(x, chunk_size=None)


def test_arguments_of_fla_s_context():
    cu_seqlens = torch.tensor([0, 5])
    context = flash_qla.build_cp_context(cu_seqlens, None, use_tf32x3_affine_chain=True, layout="contiguous")
    assert context.cu_seqlens is cu_seqlens
    with pytest.raises(ValueError, match=r"^build_cp_context: layout \('ring'\) must be \"contiguous\" or \"zigzag\""):
        flash_qla.build_cp_context(cu_seqlens, layout="ring")
    with pytest.raises(ValueError, match=r"^build_cp_context: use_tf32x3_affine_chain \(False\) must be True"):
        flash_qla.build_cp_context(cu_seqlens, use_tf32x3_affine_chain=False)


@pytest.mark.cpu_only
def test_arrays_of_several_dtypes_token_by_token():
    x = make_inputs(T=9, Hq=1, Hv=2, K=16, V=8, grads=False)
    q, k, v, g, beta = (t.numpy() for t in (x.q, x.k, x.v, x.g, x.beta))
    q, v = q.astype(np.float16), v.astype(np.float16)
    o, final_state = flash_qla.fused_recurrent_gated_delta_rule(q, k, v, g, beta=beta, output_final_state=True)
    want_o, want_state, _ = oracle.forward(q, k, v, g, beta)
    assert (o.dtype, final_state.dtype) == (np.float16, np.float32)
    helpers.assert_close("final_state", final_state, want_state, 1e-5, 1)
    helpers.assert_close("o", o, want_o, 1e-3, 2)
    with pytest.raises(TypeError, match="^chunk_gated_delta_rule: k.dtype "):
        flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)
