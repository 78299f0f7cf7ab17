"""Serving calls: states in a pool by index, skipped rows, checkpoints, draft tokens."""

import contextlib

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import assert_bitwise, make_inputs, to_numpy

import flash_qla

both = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
POOL_DTYPES = pytest.mark.parametrize("pool_dtype", helpers.FLOATS, ids=helpers.dtype_name)
SLOTS = 10

# K and V of the test that runs: sizes that any path takes, and those of the Hopper kernels.
DIMS = [48, 32]


@pytest.fixture(autouse=True, params=[(48, 32), (128, 128)], ids=["48x32", "128x128"])
def dims(request):
    DIMS[:] = request.param


def make_pool(Hv, K, V, dtype=torch.float32, v_first=True, slots=SLOTS, seed=7, stride=None):
    shape = (Hv, V, K) if v_first else (Hv, K, V)
    values = torch.randn(slots, *shape, generator=torch.Generator().manual_seed(seed)).to(helpers.settings.device, dtype)
    if stride is None:
        return values
    buffer = torch.full((slots * stride,), torch.nan, dtype=dtype, device=values.device)
    pool = buffer.as_strided((slots, *shape), (stride, *values.stride()[1:]))
    return pool.copy_(values)


def tensor(values, dtype=torch.int32):
    return None if values is None else torch.tensor(values, dtype=dtype, device=helpers.settings.device)


def expected(x, pool, initial, final=None, **options):
    """Oracle of a serving call: (o, pool afterwards, packed checkpoints)."""
    names = ("has_initial_state", "num_accepted_tokens", "null_index", "checkpoint_every", "checkpoint_offsets", "checkpoint_indices")
    given = {name: options.pop(name) for name in names if options.get(name) is not None}
    return oracle.pooled(
        *(to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), pool=to_numpy(pool), initial_indices=initial, final_indices=final,
        cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.cpu().numpy(), A_log=to_numpy(x.A_log), dt_bias=to_numpy(x.dt_bias),
        options=helpers.oracle_options(x.dtype, {"state_v_first": True} | x.options), **given)


def compare_pool(pool, before, want, pool_dtype, x_dtype):
    """Written slots against the oracle, the others bit by bit."""
    written = np.flatnonzero((want != to_numpy(before)).any((1, 2, 3))).tolist()
    others = [slot for slot in range(pool.shape[0]) if slot not in written]
    assert_bitwise("pool", pool[others], before[others])
    bound = helpers.bound_for("pool", x_dtype if pool_dtype == torch.float32 else pool_dtype)
    helpers.assert_close("pool", pool[written], want[written], bound, 1)
    return written


def prefill(x, pool, initial, final=None, index_dtype=torch.int32, **options):
    return flash_qla.gated_delta_rule_prefill(
        x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial, index_dtype), tensor(final, index_dtype),
        **(dict(cu_seqlens=x.cu_seqlens, A_log=x.A_log, dt_bias=x.dt_bias) | x.options | options))


def decode(x, pool, initial, final=None, index_dtype=torch.int32, **options):
    return flash_qla.gated_delta_rule_decode(
        x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial, index_dtype), tensor(final, index_dtype),
        **(dict(A_log=x.A_log, dt_bias=x.dt_bias) | x.options | options))


LENGTHS = [70, 0, 3, 130]


def packed(dtype, **more):
    return make_inputs(**(dict(seqlens=LENGTHS, padding=5, Hq=1, Hv=2, K=DIMS[0], V=DIMS[1], dtype=dtype, grads=False, state=False) | more))


@both
@POOL_DTYPES
@pytest.mark.parametrize("final", [None, [4, 9, 0, 3]], ids=["in place", "other slots"])
def test_prefill(final, pool_dtype, dtype):
    x, pool = packed(dtype), make_pool(2, *DIMS, pool_dtype)
    before, initial = pool.clone(), [2, 5, 7, 1]
    o = prefill(x, pool, initial, final)
    want_o, want_pool, _ = expected(x, before, initial, final)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    assert not o[:, sum(LENGTHS):].any()
    # The empty sequence hands its state on unchanged.
    assert_bitwise("pool", pool[9 if final else 5], before[5])
    compare_pool(pool, before, want_pool, pool_dtype, dtype)


@both
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_prefill_options(index_dtype, raw, v_first, dtype):
    x, pool = packed(dtype, raw=raw, state_v_first=v_first), make_pool(2, *DIMS, v_first=v_first)
    before, initial = pool.clone(), [2, 5, 7, 1]
    o = prefill(x, pool, initial, index_dtype=index_dtype, scale=0.2)
    want_o, want_pool, _ = expected(x.with_options(scale=0.2), before, initial)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
def test_prefill_has_initial_state(dtype):
    x, pool = packed(dtype), make_pool(2, *DIMS)
    initial, has = [2, 5, 7, -1], [True, False, False, False]
    pool[7] = torch.nan  # not read: the freed slot of another request
    before, final = pool.clone(), [2, 5, 7, 8]
    o = prefill(x, pool, initial, final, has_initial_state=tensor(has, torch.bool))
    clean = torch.nan_to_num(before)
    want_o, want_pool, _ = expected(x, clean, initial, final, has_initial_state=has)
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)
    assert not pool[5].any(), "an empty sequence without a state ends with zeros"


@both
@pytest.mark.parametrize("null_index", [-1, 0, 3])
def test_prefill_null_rows(null_index, dtype):
    x, pool = packed(dtype), make_pool(2, *DIMS)
    before, initial, final = pool.clone(), [null_index, 5, null_index - 2, 6], [4, 7, 8, null_index]
    o = prefill(x, pool, initial, final, null_index=null_index)
    want_o, want_pool, _ = expected(x, before, initial, final, null_index=null_index)
    assert not o[:, :70].any() and not o[:, 70:73].any(), "a skipped row's output is zero"
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    assert compare_pool(pool, before, want_pool, torch.float32, dtype) == [7]


@both
def test_slots_past_the_pool_are_skipped(dtype):
    x, pool = packed(dtype), make_pool(2, *DIMS)
    before, initial, final = pool.clone(), [2, 5, 2**31 - 1, 6], [SLOTS, 5, 0, 10**6]
    o = prefill(x, pool, initial, final)
    want_o, want_pool, _ = expected(x, before, initial, final)
    assert not o[:, 70:73].any()
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
def test_a_skipped_row_writes_nothing(dtype):
    # Not its final slot, not where its listed tokens go, not its rows of checkpoints: whether its index is null or past
    # the pool. A row without an initial state is not skipped, whatever its index is; a null final index skips that write.
    lengths = [100, 100, 100, 100]
    x, pool = packed(dtype, seqlens=lengths), make_pool(2, *DIMS)
    before, initial, final = pool.clone(), [-1, SLOTS, -1, 5], [0, 1, 2, -1]
    positions, slots, has = [50, 64, 150, 250, 350], [3, 4, 6, 7, 8], [True, True, False, True]
    checkpoints = torch.full((4, 2, DIMS[1], DIMS[0]), torch.nan, device=pool.device)
    o = prefill(x, pool, initial, final, has_initial_state=tensor(has, torch.bool), checkpoint_offsets=tensor(positions),
                checkpoint_indices=tensor(slots), checkpoint_every=64, checkpoints=checkpoints, checkpoint_cu_starts=tensor([0, 1, 2, 3, 4]))
    want_o, want_pool, rows = expected(x, before, initial, final, has_initial_state=has, checkpoint_offsets=positions,
                                       checkpoint_indices=slots, checkpoint_every=64)
    assert not o[:, :200].any() and o[:, 200:400].any()
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    assert compare_pool(pool, before, want_pool, torch.float32, dtype) == [2, 7, 8]
    assert checkpoints[:2].isnan().all() and checkpoints[2:].isfinite().all()


@both
def test_slots_beyond_2_31_elements(dtype, device):
    # Of the buffer only the touched pages exist on the CPU.
    stride = 2**30 + 64
    shape = (2, DIMS[1], DIMS[0])
    buffer = torch.empty(2 * stride + 2 * DIMS[0] * DIMS[1], dtype=torch.bfloat16, device=device)
    pool = buffer.as_strided((3, *shape), (stride, DIMS[0] * DIMS[1], DIMS[0], 1))
    x = packed(dtype, seqlens=[65, 3])
    pool[0], pool[2] = make_pool(2, *DIMS, torch.bfloat16)[:2]
    start = torch.stack([pool[0], pool[2]])
    o = prefill(x, pool, [0, 2], index_dtype=torch.int64)
    want_o, want_pool, _ = expected(x, start, [0, 1])
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    helpers.assert_close("pool", torch.stack([pool[0], pool[2]]), want_pool, helpers.LOW_PRECISION["state"], 1)
    y, start = rows(dtype, N=2), torch.stack([pool[0], pool[2]])
    o = decode(y, pool, [2, 0])
    want_o, want_pool, _ = expected(y, start, [1, 0])
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    helpers.assert_close("pool", torch.stack([pool[0], pool[2]]), want_pool, helpers.LOW_PRECISION["state"], 1)


@both
@POOL_DTYPES
def test_prefill_checkpoints_every_n(pool_dtype, dtype):
    lengths = [64, 200, 0, 63, 130]
    x, pool = packed(dtype, seqlens=lengths), make_pool(2, *DIMS, pool_dtype)
    for every in (64, 128):
        rows = [n // every for n in lengths]
        starts = np.concatenate([[0], np.cumsum(rows)]).tolist()
        work, checkpoints = pool.clone(), torch.full((sum(rows) + 1, 2, DIMS[1], DIMS[0]), torch.nan, dtype=pool_dtype, device=pool.device)
        initial = [2, 5, 7, 1, 8]
        o = prefill(x, work, initial, checkpoint_every=every, checkpoints=checkpoints, checkpoint_cu_starts=tensor(starts))
        want_o, want_pool, want_rows = expected(x, pool, initial, checkpoint_every=every)
        bound = helpers.bound_for("checkpoints", dtype if pool_dtype == torch.float32 else pool_dtype)
        helpers.compare({"o": o}, {"o": want_o}, dtype)
        helpers.assert_close("checkpoints", checkpoints[:-1], want_rows, bound, 1)
        assert checkpoints[-1].isnan().all(), "the row that no sequence fills is left alone"
        compare_pool(work, pool, want_pool, pool_dtype, dtype)


@both
def test_prefill_listed_checkpoints(dtype):
    lengths = [64, 200, 0, 63, 130]
    x, pool = packed(dtype, seqlens=lengths), make_pool(2, *DIMS)
    before, initial = pool.clone(), [2, 5, -1, 1, 8]
    # Inside chunks, at a chunk's edge, at a sequence's end, at the very end; one goes to a null slot.
    positions, slots = [10, 64, 128, 163, 300, 457, 70], [0, 3, 4, 6, 7, 9, -1]
    o = prefill(x, pool, initial, checkpoint_offsets=tensor(positions), checkpoint_indices=tensor(slots))
    want_o, want_pool, _ = expected(x, before, initial, checkpoint_offsets=positions, checkpoint_indices=slots)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    assert compare_pool(pool, before, want_pool, torch.float32, dtype) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]


@both
def test_both_kinds_of_checkpoints_at_once(dtype):
    x, pool = packed(dtype, seqlens=[200]), make_pool(2, *DIMS)
    before = pool.clone()
    checkpoints = torch.full((3, 2, DIMS[1], DIMS[0]), torch.nan, device=pool.device)
    o = prefill(x, pool, [0], checkpoint_every=64, checkpoints=checkpoints, checkpoint_cu_starts=tensor([0, 3]),
                checkpoint_offsets=tensor([100]), checkpoint_indices=tensor([4]))
    want_o, want_pool, rows = expected(x, before, [0], checkpoint_every=64, checkpoint_offsets=[100], checkpoint_indices=[4])
    helpers.compare({"o": o, "checkpoints": checkpoints}, {"o": want_o, "checkpoints": rows}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
def test_a_checkpoint_resumes_bitwise(dtype):
    # What prefix caching does: start again from a cached state and get the same bits as without the cache.
    x, pool = packed(dtype, seqlens=[200], padding=0), make_pool(2, *DIMS)
    if helpers.settings.path == "reference":
        pytest.skip("an oracle's state is float64 inside a call and float32 between calls")
    whole = prefill(x, pool, [0], checkpoint_offsets=tensor([128]), checkpoint_indices=tensor([4]), auto_cp=False)
    tail = x.replace(**{name: getattr(x, name)[:, 128:] for name in ("q", "k", "v", "g", "beta")}, cu_seqlens=helpers.offsets([72]))
    assert_bitwise("o", prefill(tail, pool, [4], auto_cp=False), whole[:, 128:])
    assert_bitwise("pool", pool[4], pool[0])


@both
def test_pool_with_any_slot_stride(dtype):
    x = packed(dtype)
    pool = make_pool(2, *DIMS, stride=2 * DIMS[0] * DIMS[1] + 24)
    before = pool.clone()
    o = prefill(x, pool, [2, 5, 7, 1])
    want_o, want_pool, _ = expected(x, before, [2, 5, 7, 1])
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)


@both
def test_dense_prefill_without_offsets(dtype):
    x = make_inputs(B=3, T=70, Hq=1, Hv=2, K=DIMS[0], V=DIMS[1], dtype=dtype, grads=False, state=False)
    pool = make_pool(2, *DIMS)
    before = pool.clone()
    o = prefill(x, pool, [2, 5, 7])
    want_o, want_pool, _ = expected(x, before, [2, 5, 7])
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)


@both
def test_out_is_returned_and_filled(dtype):
    x, pool = packed(dtype), make_pool(2, *DIMS)
    out = torch.full_like(x.v, torch.nan)
    assert prefill(x, pool.clone(), [2, 5, 7, 1], out=out) is out
    assert_bitwise("o", out, prefill(x, pool.clone(), [2, 5, 7, 1]))
    y = rows(dtype)
    out = torch.full_like(y.v, torch.nan)
    assert decode(y, pool.clone(), [2, 5, 7, 1], out=out) is out
    assert_bitwise("o", out, decode(y, pool.clone(), [2, 5, 7, 1]))


def rows(dtype, T=1, N=4, **more):
    return make_inputs(**(dict(B=N, T=T, Hq=1, Hv=2, K=DIMS[0], V=DIMS[1], dtype=dtype, grads=False, state=False) | more))


@both
@POOL_DTYPES
@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_decode(T, pool_dtype, dtype):
    x, pool = rows(dtype, T, N=6), make_pool(2, *DIMS, pool_dtype)
    before, initial, final = pool.clone(), [2, -1, 7, SLOTS, 3, 1], [2, 5, 8, 6, SLOTS, -1]
    o = decode(x, pool, initial, final)
    want_o, want_pool, _ = expected(x, before, initial, final)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    assert not o[1].any() and not o[3].any(), "a skipped row's output is zero"
    assert compare_pool(pool, before, want_pool, pool_dtype, dtype) == [2, 8]


@both
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_decode_options(index_dtype, v_first, raw, dtype):
    x, pool = rows(dtype, 3, raw=raw, state_v_first=v_first), make_pool(2, *DIMS, v_first=v_first)
    before, initial = pool.clone(), [2, 5, 7, 1]
    o = decode(x, pool, initial, index_dtype=index_dtype, scale=0.3)
    want_o, want_pool, _ = expected(x.with_options(scale=0.3), before, initial)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
@pytest.mark.parametrize("T", [1, 4])
def test_decode_keeps_the_state_of_every_draft(T, dtype):
    x, pool = rows(dtype, T, N=2), make_pool(2, *DIMS)
    before, initial = pool.clone(), [2, 5]
    final = np.array([[0, 1, -1, 3], [6, 7, 8, 9]])[:, :T].tolist()
    o = decode(x, pool, initial, final)
    want_o, want_pool, _ = expected(x, before, initial, final)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
def test_decode_starts_from_the_accepted_draft(dtype):
    # A round of speculative decoding: drafts are verified, k of them accepted, the next call starts from the k-th state.
    N, T = 3, 3
    x, pool = rows(dtype, T, N=N), make_pool(2, *DIMS)
    before, slots, accepted = pool.clone(), [[0, 1, 2], [3, 4, 5], [6, 7, 8]], [1, 3, 2]
    o = decode(x, pool, slots, slots, num_accepted_tokens=tensor(accepted))
    want_o, want_pool, _ = expected(x, before, slots, slots, num_accepted_tokens=accepted)
    helpers.compare({"o": o}, {"o": want_o}, dtype)
    compare_pool(pool, before, want_pool, torch.float32, dtype)


@both
def test_decode_drafts_default_to_the_initial_slots(dtype):
    x, pool = rows(dtype, 2, N=2), make_pool(2, *DIMS)
    before, slots = pool.clone(), [[0, 1], [3, 4]]
    o = decode(x, pool, slots, num_accepted_tokens=tensor([2, 1], torch.int64))
    want_o, want_pool, _ = expected(x, before, slots, slots, num_accepted_tokens=[2, 1])
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)


@both
def test_drafts_one_by_one_give_the_same_states(dtype):
    x, pool = rows(dtype, 4, N=1), make_pool(2, *DIMS)
    together, single = pool.clone(), pool.clone()
    o = decode(x, together, [2], [[3, 4, 5, 6]])
    for t in range(4):
        one = x.replace(**{name: getattr(x, name)[:, t:t + 1] for name in ("q", "k", "v", "g", "beta")})
        helpers.assert_close("o", decode(one, single, [2 + t], [3 + t]), to_numpy(o[:, t:t + 1]), helpers.bound_for("o", dtype))
    helpers.assert_close("pool", single[3:7], to_numpy(together[3:7]), helpers.bound_for("pool", dtype))


def test_decode_without_rows_or_tokens():
    pool = make_pool(2, *DIMS)
    before = pool.clone()
    assert decode(rows(torch.float32, 1, N=0), pool, []).shape == (0, 1, 2, DIMS[1])
    o = decode(rows(torch.float32, 0, N=2), pool, [2, 5])
    assert o.shape == (2, 0, 2, DIMS[1])
    assert_bitwise("pool", pool, before)


@both
def test_gate_and_beta_may_be_absent(dtype):
    x, pool = rows(dtype, 2).replace(g=None, beta=None), make_pool(2, *DIMS)
    before = pool.clone()
    o = decode(x, pool, [2, 5, 7, 1])
    want_o, want_pool, _ = expected(x, before, [2, 5, 7, 1])
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)


@both
def test_unaligned_pool_of_one_slot(dtype):
    x = rows(dtype, 1, N=1)
    flat = torch.zeros(1 + 2 * DIMS[0] * DIMS[1], device=x.q.device)
    pool = flat[1:].view(1, 2, DIMS[1], DIMS[0])
    pool.copy_(make_pool(2, *DIMS)[:1])
    before = pool.clone()
    o = decode(x, pool, [0])
    want_o, want_pool, _ = expected(x, before, [0])
    helpers.compare({"o": o, "pool": pool}, {"o": want_o, "pool": want_pool}, dtype)
    assert not flat[0]


# What serving calls write is modified in place: autograd must not take the old values for the new ones.

def step(name):
    """A call that writes the tensors of written_by(name)."""
    if name == "decode":
        x = rows(torch.float32)
        return lambda pool, out, checkpoints: decode(x, pool, [2, 5, 7, 1], out=out)
    x = packed(torch.float32)
    return lambda pool, out, checkpoints: prefill(x, pool, [2, 5, 7, 1], out=out, checkpoint_every=64, checkpoints=checkpoints,
                                                  checkpoint_cu_starts=tensor([0, 1, 1, 1, 3]))


def written_by(name):
    v = {"decode": rows, "prefill": packed}[name](torch.float32).v
    return dict(pool=make_pool(2, *DIMS), out=torch.zeros_like(v), checkpoints=make_pool(2, *DIMS, slots=3))


def each_written():
    return [("decode", "pool"), ("decode", "out"), ("prefill", "pool"), ("prefill", "out"), ("prefill", "checkpoints")]


@pytest.mark.parametrize("mode", ["eager", "no_grad", "inference_mode", "compiled", "compiled by aot_eager"])
@pytest.mark.parametrize("name,read", each_written())
def test_a_gradient_through_values_that_a_call_overwrote_is_refused(name, read, mode):
    call, tensors = step(name), written_by(name)
    w = torch.ones((), device=helpers.settings.device, requires_grad=True)
    y = (w * tensors[read]).sum()  # keeps the values of the tensor for w's gradient
    if mode.startswith("compiled"):
        backend = mode.rpartition(" ")[2] if " " in mode else "eager"
        torch._dynamo.reset()
        torch.compile(call, fullgraph=True, backend=backend)(**tensors)
    else:
        with {"eager": contextlib.nullcontext, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
            call(**tensors)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_tensors_of_inference_mode_are_written_without_a_version():
    with torch.inference_mode():
        tensors = written_by("decode")
        step("decode")(**tensors)
        assert tensors["out"].any()


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_calls_that_compute_nothing_raise_no_version(name):
    tensors = written_by(name)
    with pytest.raises(TypeError):
        step(name)(**tensors | dict(pool=tensors["pool"].int()))
    x = rows(torch.float32)
    out = torch.zeros_like(x.v)
    flash_qla.explain(x.q.requires_grad_(), x.k, x.v, x.g, x.beta, tensors["pool"], tensor([2, 5, 7, 1]), out=out,
                      op="gated_delta_rule_decode")
    assert not out.requires_grad and out._version == torch.zeros_like(x.v)._version
    assert {key: t._version for key, t in tensors.items()} == {key: t._version for key, t in written_by(name).items()}


@pytest.mark.parametrize("given", [False, True], ids=["new", "out"])
@pytest.mark.parametrize("leaf", ["q", "v", "pool"])
def test_backward_is_refused(leaf, given):
    x, pool = rows(torch.float32), make_pool(2, *DIMS)
    leaf = pool.requires_grad_() if leaf == "pool" else getattr(x, leaf).requires_grad_()
    out = torch.zeros(8, *x.v.shape[1:], device=pool.device)[::2] if given else None
    o = decode(x, pool, [2, 5, 7, 1], out=out)
    assert (o is out) == given
    with pytest.raises(NotImplementedError, match="^gated_delta_rule_decode: .*chunk_gated_delta_rule"):
        (o.sum() + 2 * leaf.sum()).backward()


def test_an_out_that_wants_its_own_gradient_is_refused():
    x, pool = rows(torch.float32), make_pool(2, *DIMS)
    x.q.requires_grad_()
    before, out = pool.clone(), torch.zeros_like(x.v).requires_grad_()
    with pytest.raises(ValueError, match=r"^gated_delta_rule_decode: out \(a leaf that requires a gradient\)"):
        decode(x, pool, [2, 5, 7, 1], out=out)
    assert_bitwise("pool", pool, before)
    assert not out.any()


def test_an_out_that_autograd_refuses_leaves_the_pool_as_it_is():
    # Such a view would need a history that it was told not to have.
    x, pool = rows(torch.float32), make_pool(2, *DIMS)
    x.q.requires_grad_()
    with torch.no_grad():
        out = torch.zeros(8, *x.v.shape[1:], device=pool.device)[::2]
    before = pool.clone()
    with pytest.raises(RuntimeError, match="no_grad"):
        decode(x, pool, [2, 5, 7, 1], out=out)
    assert_bitwise("pool", pool, before)
    assert not out.any()
