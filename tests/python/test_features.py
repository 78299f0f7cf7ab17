"""Every option and dtype of chunk_gated_delta_rule, forward and backward, against the oracle."""

import helpers
import pytest
import torch
from helpers import check, make_inputs

import flash_qla

every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
# The second length: gradients on tensor cores (docs/numerics.md).
lengths = pytest.mark.parametrize("T", helpers.with_cuda([100], [300]))


def skip_unless_offered(dtype, device):
    if dtype not in helpers.DEVICE_DTYPES[device]:
        pytest.skip(f"{dtype} is offered on the CPU alone")


@pytest.mark.parametrize("dtype", [*helpers.FLOATS, torch.float64], ids=helpers.dtype_name)
@pytest.mark.parametrize("heads", [(1, 1), (2, 4), (1, 3)], ids=str)
def test_dtypes_and_heads(dtype, heads, device):
    skip_unless_offered(dtype, device)
    check(make_inputs(B=2, T=130, Hq=heads[0], Hv=heads[1], K=128, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
@pytest.mark.parametrize("dims", [(1, 1), (5, 3), (16, 16), (17, 33), (64, 64), (96, 192), (128, 64), (64, 128), (128, 256), (256, 256), (255, 1)], ids=str)
def test_head_dims(dtype, dims):
    # A state of a few numbers may cancel by chance: more sequences make the norm of dh0 mean something.
    check(make_inputs(B=8 if dims[0] * dims[1] < 16 else 1, T=81, Hq=1, Hv=2, K=dims[0], V=dims[1], dtype=dtype))


@pytest.mark.parametrize("dtype", [*helpers.dtypes(), torch.float64], ids=helpers.dtype_name)
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("sizes", helpers.with_cuda(
    [dict(K=64, V=32, T=70), dict(K=64, V=32, seqlens=[70, 0, 65, 3])],
    [dict(K=128, T=170), dict(K=128, seqlens=[70, 0, 265, 3])]), ids=str)
def test_option_sets(dtype, raw, v_first, sizes, device):
    skip_unless_offered(dtype, device)
    check(make_inputs(B=2, Hq=2, Hv=4, dtype=dtype, raw=raw, state_v_first=v_first, **sizes,
                      **(dict(allow_neg_eigval=True) if raw else {})))


@every_dtype
@lengths
@pytest.mark.parametrize("option", ["use_qk_l2norm_in_kernel", "use_beta_sigmoid_in_kernel", "use_gate_in_kernel", "no dt_bias"])
def test_one_option_alone(option, T, dtype):
    raw = make_inputs(T=T, Hq=2, Hv=4, K=128, dtype=dtype, raw=True, seed=1)
    plain = make_inputs(T=T, Hq=2, Hv=4, K=128, dtype=dtype, seed=2)
    if option == "use_qk_l2norm_in_kernel":
        x = plain.replace(q=raw.q, k=raw.k, options={option: True})
    elif option == "use_beta_sigmoid_in_kernel":
        x = plain.replace(beta=raw.beta, options={option: True})
    else:
        x = plain.replace(g=raw.g, A_log=raw.A_log, dt_bias=raw.dt_bias if option == "use_gate_in_kernel" else None,
                          options=dict(use_gate_in_kernel=True))
    check(x)


@every_dtype
@pytest.mark.parametrize("scale", [0.0, -0.5, 1.0, 3])
@pytest.mark.parametrize("T", helpers.with_cuda([70], [300]))
def test_scale_is_a_run_time_value(T, scale, dtype):
    got, _ = check(make_inputs(T=T, dtype=dtype, scale=scale))
    if scale == 0.0:
        assert not got["o"].any() and not got["dq"].any()


@every_dtype
@lengths
@pytest.mark.parametrize("absent", ["g", "beta", "both"])
def test_absent_gate_and_beta(absent, T, dtype):
    x = make_inputs(T=T, dtype=dtype)
    check(x.replace(g=None if absent != "beta" else x.g, beta=None if absent != "g" else x.beta))


@pytest.mark.parametrize("dtype", helpers.with_cuda([torch.bfloat16], [torch.float16]), ids=helpers.dtype_name)
@lengths
@pytest.mark.parametrize("gate_dtype", helpers.FLOATS, ids=helpers.dtype_name)
@pytest.mark.parametrize("state_dtype", helpers.FLOATS, ids=helpers.dtype_name)
def test_dtypes_of_gate_beta_and_state(gate_dtype, state_dtype, T, dtype):
    x = make_inputs(T=T, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=gate_dtype, state_dtype=state_dtype)
    check(x)


@every_dtype
@lengths
def test_raw_activations_in_bf16(T, dtype):
    x = make_inputs(T=T, Hv=4, dtype=dtype, raw=True, gate_dtype=torch.bfloat16, beta_dtype=torch.bfloat16)
    x = x.replace(A_log=x.A_log.bfloat16(), dt_bias=x.dt_bias.bfloat16())
    bounds = dict.fromkeys(helpers.TENSORS, helpers.BOUNDS[dtype]["state"]) | {
        name: helpers.LOW_PRECISION["gate_grad"] for name in ("dg", "dbeta", "dA_log", "ddt_bias")}
    if dtype in helpers.LOW:
        bounds |= dict.fromkeys(("dq", "dk", "dv", "dh0"), helpers.LOW_PRECISION["grad"])
    check(x, bounds=bounds)


@every_dtype
@lengths
def test_growth_is_computed_as_given(T, dtype):
    x = make_inputs(T=T, dtype=dtype)
    check(x.replace(g=(x.g.abs() + 0.01) * (100 / T)))  # as much in all, whatever the length: fp16 ends at 65,504


@every_dtype
@pytest.mark.parametrize("options", [dict(auto_cp=False), dict(auto_cp=True), dict(auto_cp="invariant"), dict(force_intra_cp=True)], ids=str)
def test_context_parallel_modes_are_taken_by_every_path(options, dtype):
    # What a cut does to results is a test of its own, where a path cuts (test_context_parallel.py).
    check(make_inputs(Hq=1, Hv=2, K=64, dtype=dtype, seqlens=[300, 0, 65]), **options)


def test_parameters_without_effect_have_none():
    x = make_inputs(seqlens=[70, 30], K=64)
    a = helpers.run(x)
    b = helpers.run(x, cu_seqlens_cpu=x.cu_seqlens.cpu(), chunk_indices=torch.zeros(3, 2, dtype=torch.int64), enable_fwd_cp_cache=False)
    for name in a:
        helpers.assert_bitwise(name, a[name], b[name])


def test_final_state_is_only_returned_when_asked():
    x = make_inputs(T=70, K=32)
    assert helpers.call(x, output_final_state=False)[1] is None
    assert flash_qla.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)[1] is None


def test_dtypes_of_results():
    x = make_inputs(T=70, K=32, dtype=torch.bfloat16, state_dtype=torch.float16)
    o, final_state = helpers.call(x)
    assert (o.dtype, final_state.dtype) == (torch.bfloat16, torch.float32)
    assert o.shape == x.v.shape and final_state.shape == (1, 2, 32, 32)


def in_narrower_heads(x, parts=2, **overrides):
    """A call with each value head as `parts` of them with as many fewer columns, which the recurrence does not mix."""
    def split(state):  # [N, Hv, K, V]
        return None if state is None else state.unflatten(-1, (parts, -1)).movedim(-2, 2).flatten(1, 2)

    narrow = x.replace(v=x.v.unflatten(-1, (parts, -1)).flatten(2, 3), initial_state=split(x.initial_state),
                       g=x.g.repeat_interleave(parts, -1), beta=x.beta.repeat_interleave(parts, -1))  # fmt: skip
    o, final_state = helpers.call(narrow, **overrides)
    return o.reshape(x.v.shape), final_state.unflatten(1, (-1, parts)).movedim(2, -2).flatten(-2)


@pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
def test_more_than_256_value_columns_go_as_more_heads(dtype):
    """As docs/kernels/sm80.md says."""
    x = make_inputs(T=150, Hq=1, Hv=2, K=64, V=512, dtype=dtype)
    helpers.compare(helpers.run(x, function=in_narrower_heads), helpers.reference(x), dtype)
