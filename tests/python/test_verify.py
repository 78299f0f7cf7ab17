"""Draft tokens in chains and trees: the pool is read alone, states go to a buffer of their own."""

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import assert_bitwise, make_inputs, to_numpy

import flash_qla
from flash_qla import _options

both = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
POOL_DTYPES = pytest.mark.parametrize("pool_dtype", helpers.FLOATS, ids=helpers.dtype_name)
SLOTS, HQ, HV = 8, 1, 2
TOKENS = ("q", "k", "v", "g", "beta")

# Trees of 7 tokens, a row each: a chain, a star, a full binary tree, branches that come back to early tokens, two chains.
TREES = [[-1, 0, 1, 2, 3, 4, 5], [-1, -1, -1, -1, -1, -1, -1], [-1, 0, 0, 1, 1, 2, 2], [-1, 0, 1, 0, 3, 1, 5], [-1, -1, 0, 1, 2, 3, 4]]

# K and V of the test that runs: sizes that any path takes, and those of the kernels for models.
DIMS = [48, 32]


SIZES = helpers.with_cuda([(48, 32), (128, 128)], [(64, 48)])


@pytest.fixture(autouse=True, params=SIZES, ids=[f"{K}x{V}" for K, V in SIZES])
def dims(request):
    DIMS[:] = request.param


def tensor(values, dtype=torch.int32):
    return None if values is None else torch.tensor(values, dtype=dtype, device=helpers.settings.device)


def state_shape(v_first=True):
    return (HV, DIMS[1], DIMS[0]) if v_first else (HV, *DIMS)


def make_pool(dtype=torch.float32, v_first=True, seed=7):
    values = torch.randn(SLOTS, *state_shape(v_first), generator=torch.Generator().manual_seed(seed))
    return values.to(helpers.settings.device, dtype)


def drafts(dtype, T=7, N=5, **more):
    return make_inputs(**(dict(B=N, T=T, Hq=HQ, Hv=HV, K=DIMS[0], V=DIMS[1], dtype=dtype, grads=False, state=False) | more))


def verify(x, pool, initial, parents=None, index_dtype=torch.int32, **options):
    return flash_qla.gated_delta_rule_verify(
        x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial, index_dtype), parents=tensor(parents, index_dtype),
        **(dict(A_log=x.A_log, dt_bias=x.dt_bias) | x.options | options))


def buffer(x, pool, rows=None, fill=torch.nan):
    """states_out [rows, T, ..]."""
    return torch.full((rows or x.q.shape[0], x.q.shape[1], *pool.shape[1:]), fill, dtype=pool.dtype, device=pool.device)


def expected(x, pool, initial, parents=None, **options):
    return oracle.verified(*(to_numpy(getattr(x, name)) for name in TOKENS), pool=to_numpy(pool), initial_indices=initial, parents=parents,
                           A_log=to_numpy(x.A_log), dt_bias=to_numpy(x.dt_bias),
                           options=helpers.oracle_options(x.dtype, {"state_v_first": True} | x.options), **options)


def compare(x, pool, initial, parents, o, states_out, rows=None, **options):
    """o, and the states of rows that are not skipped, against the oracle; all other rows of the buffer bit by bit."""
    want_o, want_states, skipped = expected(x, pool, initial, parents, **options)
    helpers.compare({"o": o}, {"o": want_o}, x.dtype)
    assert not o[torch.from_numpy(skipped)].any(), "a skipped row's output is zero"
    if states_out is None:
        return
    rows = list(range(len(initial))) if rows is None else rows
    written = [n for n, row in enumerate(rows) if not skipped[n] and 0 <= row < len(states_out)]
    bound = helpers.bound_for("pool", x.dtype if pool.dtype == torch.float32 else pool.dtype)
    for t in range(x.q.shape[1]):
        helpers.assert_close("pool", states_out[[rows[n] for n in written], t], want_states[written, t], bound, 1, f"token {t}: ")
    others = [row for row in range(len(states_out)) if row not in [rows[n] for n in written]]
    assert states_out[others].isnan().all(), "rows that no sequence has are left alone"


@both
@POOL_DTYPES
@pytest.mark.parametrize("T", [1, 2, 5, 16])
def test_chains(T, pool_dtype, dtype):
    x, pool = drafts(dtype, T), make_pool(pool_dtype)
    before, initial = pool.clone(), [2, -1, 7, SLOTS, 3]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, states_out=states_out)
    compare(x, before, initial, None, o, states_out)
    assert_bitwise("pool", pool, before)
    assert_bitwise("o", o, verify(x, pool, initial))


@both
@POOL_DTYPES
def test_trees(pool_dtype, dtype):
    x, pool, initial = drafts(dtype), make_pool(pool_dtype), [2, 5, 7, 7, 3]
    before, states_out = pool.clone(), buffer(x, pool)
    o = verify(x, pool, initial, TREES, states_out=states_out)
    compare(x, before, initial, TREES, o, states_out)
    assert_bitwise("pool", pool, before)
    assert_bitwise("o", o, verify(x, pool, initial, TREES))


@both
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_options(index_dtype, v_first, raw, dtype):
    x = drafts(dtype, raw=raw, state_v_first=v_first, **(dict(allow_neg_eigval=True) if raw else {})).with_options(scale=0.3)
    pool, initial = make_pool(v_first=v_first), [2, 5, 7, 1, 0]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, TREES, index_dtype, states_out=states_out)
    compare(x, pool, initial, TREES, o, states_out)


@both
@pytest.mark.parametrize("seed", range(3))
def test_drawn_trees_of_16(seed, dtype):
    random = np.random.default_rng(seed)
    N, T = 4, 16
    parents = [[int(random.integers(-1, t)) if t else -1 for t in range(T)] for _ in range(N)]
    x, pool, initial = drafts(dtype, T, N), make_pool(), [1, 2, 3, 4]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, parents, states_out=states_out)
    compare(x, pool, initial, parents, o, states_out)


@both
@POOL_DTYPES
def test_a_path_of_a_tree_has_the_bits_of_a_chain(pool_dtype, dtype):
    x, pool, initial = drafts(dtype), make_pool(pool_dtype), [2, 5, 7, 7, 3]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, TREES, states_out=states_out)
    for n, parents in enumerate(TREES):
        for leaf in range(len(parents)):
            path = [leaf]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            chain = x.replace(**{name: getattr(x, name)[n:n + 1, path] for name in TOKENS})
            alone = buffer(chain, pool)
            assert_bitwise("o", verify(chain, pool, [initial[n]], states_out=alone), o[n:n + 1, path])
            assert_bitwise("states", alone, states_out[n:n + 1, path])


@both
@POOL_DTYPES
def test_a_chain_decodes(pool_dtype, dtype):
    # What verification says of accepted tokens is what decoding them would have said, within the bounds.
    x, pool, initial = drafts(dtype, 4), make_pool(pool_dtype), [2, 5, 7, 1, 3]
    states_out, decoded = buffer(x, pool), pool.clone()
    o = verify(x, pool, initial, states_out=states_out)
    want = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, decoded, tensor(initial))
    helpers.compare({"o": o}, {"o": to_numpy(want)}, dtype)
    bound = helpers.bound_for("pool", dtype if pool_dtype == torch.float32 else pool_dtype)
    helpers.assert_close("pool", states_out[:, -1], to_numpy(decoded[initial]), bound, 1)


@both
def test_a_row_does_not_depend_on_its_neighbours(dtype):
    x, pool, initial = drafts(dtype), make_pool(), [2, 5, 7, 1, 3]
    together = buffer(x, pool)
    o = verify(x, pool, initial, TREES, states_out=together)
    for n in range(5):
        alone, states_out = x.replace(**{name: getattr(x, name)[n:n + 1] for name in TOKENS}), together[:1].clone()
        assert_bitwise("o", verify(alone, pool, [initial[n]], [TREES[n]], states_out=states_out), o[n:n + 1])
        assert_bitwise("states", states_out, together[n:n + 1])


@both
def test_rows_of_states_out(dtype):
    x, pool, initial, rows = drafts(dtype), make_pool(), [2, 5, -3, 1, 3], [6, -1, 0, 2, 9]
    states_out = buffer(x, pool, 9)
    o = verify(x, pool, initial, TREES, states_out=states_out, states_out_indices=tensor(rows, torch.int64))
    compare(x, pool, initial, TREES, o, states_out, rows)


@both
def test_a_null_index_is_about_the_pool_alone(dtype):
    x, pool, initial, rows = drafts(dtype), make_pool(), [3, 4, 2, 5, 7], [4, 0, 1, 2, 3]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, states_out=states_out, states_out_indices=tensor(rows), null_index=3)
    compare(x, pool, initial, None, o, states_out, rows, null_index=3)


@both
def test_strided_states_and_out(dtype):
    x, pool, initial = drafts(dtype), make_pool(), [2, 5, 7, 1, 3]
    wide = torch.full((5, 9, 2, *pool.shape[1:]), torch.nan, device=pool.device)
    states_out = wide[:, 1:8, 1]
    slots = torch.full((SLOTS, 3, *pool.shape[1:]), torch.nan, device=pool.device)
    slots[:, 1] = pool
    out = torch.full((5, HV, 7, DIMS[1]), torch.nan, dtype=dtype, device=pool.device).transpose(1, 2)
    o = verify(x, slots[:, 1], initial, TREES, states_out=states_out, out=out)
    assert o is out
    compare(x, pool, initial, TREES, o, states_out)
    assert wide[:, :, 0].isnan().all() and wide[:, [0, 8]].isnan().all()
    strided = x.replace(**{name: getattr(x, name).transpose(0, 1).contiguous().transpose(0, 1) for name in TOKENS})
    assert_bitwise("o", verify(strided, slots[:, 1], initial, TREES), o.contiguous())


@both
def test_parents_that_are_none_count_as_the_pools_state(dtype):
    x, pool, initial = drafts(dtype, 4, 1), make_pool(), [2]
    want = verify(x, pool, initial, [[-1, -1, -1, 0]])
    for parents in ([[0, 1, 3, 0]], [[-7, 2**31 - 1, -2**31, 0]], [[3, 4, 16, 0]]):
        assert_bitwise("o", verify(x, pool, initial, parents), want)


@both
def test_gates_and_parents_may_be_absent(dtype):
    x, pool = drafts(dtype).replace(g=None, beta=None), make_pool()
    states_out = buffer(x, pool)
    o = verify(x, pool, [2, 5, 7, 1, 3], states_out=states_out)
    compare(x, pool, [2, 5, 7, 1, 3], None, o, states_out)


@both
@pytest.mark.parametrize("K,V", [(1, 1), (2, 3), (4, 5), (5, 256), (256, 7), (96, 192)])
def test_other_dimensions(K, V, dtype):
    DIMS[:] = K, V
    for v_first in (True, False):
        x, pool, initial = drafts(dtype, state_v_first=v_first), make_pool(v_first=v_first), [2, 5, 7, 1, 3]
        states_out = buffer(x, pool)
        o = verify(x, pool, initial, TREES, states_out=states_out)
        compare(x, pool, initial, TREES, o, states_out)


@pytest.mark.cpu_only
def test_float64():
    x, pool, initial = drafts(torch.float64), make_pool(torch.float64), [2, 5, 7, 1, 3]
    states_out = buffer(x, pool)
    o = verify(x, pool, initial, TREES, states_out=states_out)
    compare(x, pool, initial, TREES, o, states_out)


@both
def test_a_nan_stays_on_its_paths(dtype):
    x, pool = drafts(dtype, N=1), make_pool()
    x.v[0, 1] = torch.nan
    states_out = buffer(x, pool, fill=0)
    o = verify(x, pool, [2], [TREES[2]], states_out=states_out)
    touched = [1, 3, 4]  # token 1 and its children
    for t in range(7):
        assert bool(o[0, t].isnan().any()) == (t in touched)
        assert bool(states_out[0, t].isnan().any()) == (t in touched)


@both
def test_without_rows_or_tokens(dtype):
    pool = make_pool()
    assert verify(drafts(dtype, 3, 0), pool, []).shape == (0, 3, HV, DIMS[1])
    x = drafts(dtype, 0, 2)
    assert verify(x, pool, [2, 5], states_out=buffer(x, pool)).shape == (2, 0, HV, DIMS[1])


# What the call may not do.

def legal():
    x, pool = drafts(torch.float32), make_pool()
    return dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, state_pool=pool, initial_state_indices=tensor([2, 5, 7, 1, 3]),
                parents=tensor(TREES), states_out=buffer(x, pool, fill=7.0), states_out_indices=tensor([0, 1, 2, 3, 4]),
                out=torch.full_like(x.v, 7.0))


CHECKED = [
    ("initial_state_indices", [2, 5, 7, 1, SLOTS], "initial_state_indices[4] (8) must be below state_pool.shape[0] (8)"),
    ("initial_state_indices", [2, -5, 7, 1, SLOTS], "initial_state_indices[4] (8)"),
    ("states_out_indices", [0, 1, 2, 3, 5], "states_out_indices[4] (5) must be below states_out.shape[0] (5)"),
    ("states_out_indices", [0, 1, 2, 1, 4], "states_out_indices[3] (1) must not name a row that is written twice"),
    ("parents", [*TREES[:4], [-1, 1, 0, 1, 2, 3, 4]], "parents[4, 1] (1) must be -1 or an earlier token, at most 0"),
    ("parents", [*TREES[:4], [-2, -1, 0, 1, 2, 3, 4]], "parents[4, 0] (-2)")]


@pytest.mark.parametrize("name,values,message", CHECKED, ids=range(len(CHECKED)))
def test_the_check_refuses_device_data(name, values, message, monkeypatch):
    arguments = legal()
    before = {key: t.clone() for key, t in arguments.items()}
    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    flash_qla.gated_delta_rule_verify(**{key: t.clone() for key, t in arguments.items()})
    with pytest.raises(ValueError) as caught:
        flash_qla.gated_delta_rule_verify(**arguments | {name: tensor(values)})
    assert str(caught.value).startswith(f"gated_delta_rule_verify: {message}"), str(caught.value)
    for key, t in before.items():
        assert_bitwise(key, arguments[key], t)


def test_the_check_passes_over_rows_that_are_skipped(monkeypatch):
    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    arguments = legal() | dict(initial_state_indices=tensor([2, -1, 7, 1, 3]), parents=tensor([TREES[0], [9] * 7, *TREES[2:]]),
                               states_out_indices=tensor([0, 99, -4, -4, 1]))
    o = flash_qla.gated_delta_rule_verify(**arguments)
    assert not o[1].any() and o[0].any()


@both
def test_memory_around_and_inputs_are_left_alone(dtype):
    x, pool = drafts(dtype), make_pool()
    guarded = {name: helpers.Guarded(t) for name, t in dict(
        q=x.q, k=x.k, v=x.v, pool=pool, states=buffer(x, pool, fill=0), out=torch.zeros_like(x.v), parents=tensor(TREES)).items()}
    g = {name: item.tensor for name, item in guarded.items()}
    before = {name: g[name].clone() for name in ("q", "k", "v", "pool", "parents")}
    flash_qla.gated_delta_rule_verify(g["q"], g["k"], g["v"], x.g, x.beta, g["pool"], tensor([2, 5, -1, 1, 99]), parents=g["parents"],
                                      states_out=g["states"], out=g["out"])
    assert all(item.intact() for item in guarded.values())
    for name, t in before.items():
        assert_bitwise(name, g[name], t)


# Frameworks.

def test_written_tensors_are_modified_in_place_and_the_pool_is_not():
    arguments = legal()
    versions = {name: arguments[name]._version for name in ("state_pool", "states_out", "out")}
    flash_qla.gated_delta_rule_verify(**arguments)
    assert {name: arguments[name]._version - version for name, version in versions.items()} == dict(state_pool=0, states_out=1, out=1)
    flash_qla.explain(**arguments, op="gated_delta_rule_verify")
    assert arguments["out"]._version == versions["out"] + 1


@pytest.mark.parametrize("leaf", ["q", "v", "beta", "state_pool"])
def test_backward_is_refused(leaf):
    arguments = legal() | dict(out=None)
    arguments[leaf].requires_grad_()
    o = flash_qla.gated_delta_rule_verify(**arguments)
    with pytest.raises(NotImplementedError, match="^gated_delta_rule_verify: .*chunk_gated_delta_rule"):
        o.sum().backward()


def test_compiled():
    def step(out, states_out, **rest):
        return flash_qla.gated_delta_rule_verify(out=out, states_out=states_out, **rest) * 2

    torch._dynamo.reset()
    eager, compiled = legal(), legal()
    a, b = step(**eager), torch.compile(step, fullgraph=True, backend="aot_eager")(**compiled)
    assert_bitwise("o", a, b)
    for name in ("out", "states_out", "state_pool"):
        assert_bitwise(name, eager[name], compiled[name])


def test_opcheck():
    arguments = legal()
    options = _options.make_options("opcheck", state_v_first=True)
    inputs = (*(arguments[name] for name in TOKENS), None, None)
    states = tuple(arguments[name] for name in ("state_pool", "initial_state_indices", "parents", "states_out", "states_out_indices"))
    torch.library.opcheck(torch.ops.flash_qla.verify.default, (*options, *inputs, *states, -1, arguments["out"]))


@pytest.mark.cpu_only
def test_numpy():
    arguments = legal()
    arrays = {name: t.clone().numpy() for name, t in arguments.items()}
    o = flash_qla.gated_delta_rule_verify(**arrays)
    assert o is arrays["out"]
    flash_qla.gated_delta_rule_verify(**arguments)
    for name in ("out", "states_out"):
        assert_bitwise(name, torch.from_numpy(arrays[name]), arguments[name])
    frozen = arrays["states_out"].copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match=r"^gated_delta_rule_verify: states_out \(a read-only array\)"):
        flash_qla.gated_delta_rule_verify(**arrays | dict(states_out=frozen))


def test_workspace_size_serves_every_smaller_call(device):
    sizes = dict(Hq=HQ, Hv=HV, K=DIMS[0], V=DIMS[1], dtype="float32", device=device, state_v_first=True)
    bound = flash_qla.workspace_size("gated_delta_rule_verify", 35, 5, **sizes)
    for T, N in ((7, 5), (1, 5), (16, 2), (16, 1), (0, 5)):
        x, pool = drafts(torch.float32, T, N), make_pool()
        for parents in (None, [[-1] * T] * N):
            text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, pool, tensor([0] * N), parents=tensor(parents), op="gated_delta_rule_verify")
            assert int(text.splitlines()[1].split()[1]) <= bound


@pytest.mark.cuda
@both
def test_a_graph_replays_with_other_trees(dtype):
    x, pool, initial = drafts(dtype), make_pool(), tensor([2, 5, 7, 1, 3])
    parents, states_out, out = tensor(TREES), buffer(x, pool), torch.empty_like(x.v)

    def step():
        return flash_qla.gated_delta_rule_verify(x.q, x.k, x.v, x.g, x.beta, pool, initial, parents=parents, states_out=states_out, out=out)

    graph, _ = helpers.captured(step)
    for roll in range(3):
        trees = TREES[roll:] + TREES[:roll]
        parents.copy_(tensor(trees))
        initial.copy_(tensor([roll, -1, 7, 1, 3]))
        states_out.fill_(torch.nan)
        graph.replay()
        compare(x, pool, [roll, -1, 7, 1, 3], trees, out, states_out)
