"""Which bits depend on what: every line of docs/determinism.md, forward and backward, on any path and on the Hopper kernels.

A case named "hopper" is about path sm90: its lengths are such as that path takes and, where the mode cuts, cuts.
"""

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs

import flash_qla

MODES = [True, "invariant", False]
TOKENS = ("q", "k", "v", "g", "beta", "do")
STATES = ("initial_state", "dht")
STATE_RESULTS = ("final_state", "dh0")
every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
low_precision = pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
SMALL = dict(lengths=[130, 0, 65, 200], K=64)
LONG = dict(lengths=[4200, 0, 65, 6200], K=128)  # "invariant" cuts from 4,096 tokens on
# True plans by sizes alone, as if sequences were equally long: two of 4,096 tokens and 2/8 heads pay (split_plan_test.cpp).
PLANNED = dict(lengths=[8127, 65], K=128)


def cases(modes):
    """(auto_cp, lengths, K, dtype): small ones for any path, long ones for path sm90, cut where the mode cuts."""
    found = []
    for mode in modes:
        for dtype in helpers.dtypes():
            found.append(pytest.param(mode, *SMALL.values(), dtype, id=f"{mode}-any-{helpers.dtype_name(dtype)}"))
        for dtype in helpers.LOW:
            mark = pytest.mark.path("sm90", planned=mode is not False)
            long = PLANNED if mode is True else LONG
            found.append(pytest.param(mode, *long.values(), dtype, id=f"{mode}-hopper-{helpers.dtype_name(dtype)}", marks=mark))
    return pytest.mark.parametrize("mode, lengths, K, dtype", found)


def inputs(lengths, K, dtype, Hq=2, Hv=None):
    return make_inputs(seqlens=lengths, Hq=Hq, Hv=Hv or (8 if lengths == PLANNED["lengths"] else 4), K=K, dtype=dtype)


def tokens_of(lengths, n):
    return slice(sum(lengths[:n]), sum(lengths[:n + 1]))


def rows(x, lengths, chosen):
    """The call with the sequences `chosen` alone, in that order."""
    parts = {name: torch.cat([getattr(x, name)[:, tokens_of(lengths, n)] for n in chosen], 1) for name in TOKENS}
    return x.replace(**parts, **{name: getattr(x, name)[chosen] for name in STATES}, cu_seqlens=helpers.offsets([lengths[n] for n in chosen]))


def heads(x, key_heads, group=2):
    """The call with a range of key heads and their value heads alone, as a card of several has them."""
    values = slice(key_heads.start * group, key_heads.stop * group)
    own = {name: getattr(x, name)[:, :, key_heads] for name in ("q", "k")}
    own |= {name: getattr(x, name)[:, :, values] for name in ("v", "g", "beta", "do")}
    return x.replace(**own, **{name: getattr(x, name)[:, values] for name in STATES}), values


# --- the table itself ---

@pytest.mark.cpu_only
def test_the_table():
    names = ["repeatable", "batch_invariant", "head_invariant", "prefix_invariant"]
    for mode in MODES:
        table = flash_qla.determinism(mode)
        assert list(table) == names and all(type(value) is bool for value in table.values())
        table["repeatable"] = None  # a copy
        assert flash_qla.determinism(mode)["repeatable"] is True
    assert flash_qla.determinism() == flash_qla.determinism(True)
    assert all(flash_qla.determinism(False).values())
    assert [name for name, is_so in flash_qla.determinism("invariant").items() if is_so] == names[:3]
    assert not any(flash_qla.determinism(True)[name] for name in names[1:])
    for given in (2, None, "always", 1.0):
        with pytest.raises(ValueError, match=r"^determinism: auto_cp \("):
            flash_qla.determinism(given)


@pytest.mark.cpu_only
def test_build_info_declares_it():
    info = flash_qla.build_info()
    assert info["determinism"] == "repeatable"
    assert info["invariance"] == 'auto_cp=False; auto_cp="invariant"'
    assert info["cuda_architectures"] == "none" or "90a-real" in info["cuda_architectures"].split()


# --- repeatable ---

@cases(MODES)
def test_repeatable(mode, lengths, K, dtype):
    x = inputs(lengths, K, dtype)
    first = helpers.run(x, auto_cp=mode)
    for _ in range(3):
        for name, value in helpers.run(x, auto_cp=mode).items():
            assert_bitwise(name, value, first[name])


@pytest.mark.cuda
@cases(MODES)
def test_repeatable_on_another_stream_and_in_a_graph(mode, lengths, K, dtype):
    x = inputs(lengths, K, dtype)
    leaves = {name: getattr(x, name).requires_grad_() for name in x.DIFFERENTIABLE if getattr(x, name) is not None}

    def step():
        o, final_state = helpers.call(x, auto_cp=mode)
        gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [x.do, x.dht])
        return [o.detach(), final_state.detach(), *gradients]

    first = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, replayed = helpers.captured(step)
    for _ in range(3):
        graph.replay()
        for a, b, c in zip(first, beside, replayed):
            assert_bitwise("another stream", b, a)
            assert_bitwise("graph", c, a)


# --- invariant to the batch, to the heads of a card ---

@cases(["invariant", False])
def test_batch_invariant(mode, lengths, K, dtype):
    # Alone, in another order, and doubled.
    x = inputs(lengths, K, dtype)
    whole = helpers.run(x, auto_cp=mode)
    for chosen in ([0], [3], [3, 0], [2, 3, 1, 0], [0, 3, 3, 0, 2]):
        part, own = helpers.run(rows(x, lengths, chosen), auto_cp=mode), [lengths[n] for n in chosen]
        for i, n in enumerate(chosen):
            for name, value in part.items():
                if name in STATE_RESULTS:
                    assert_bitwise(name, value[i], whole[name][n])
                else:
                    assert_bitwise(name, value[:, tokens_of(own, i)], whole[name][:, tokens_of(lengths, n)])


@cases(["invariant", False])
@pytest.mark.parametrize("key_heads", [slice(0, 1), slice(1, 2), slice(1, 4)], ids=str)
def test_head_invariant(key_heads, mode, lengths, K, dtype):
    x = inputs(lengths, K, dtype, 4, 8)
    whole = helpers.run(x, auto_cp=mode)
    shard, values = heads(x, key_heads)
    for name, value in helpers.run(shard, auto_cp=mode).items():
        if name in STATE_RESULTS:
            assert_bitwise(name, value, whole[name][:, values])
        else:
            assert_bitwise(name, value, whole[name][:, :, key_heads if name in ("dq", "dk") else values])


# --- the modes, where nothing is cut ---

@low_precision
@pytest.mark.path("sm90", operations=("chunk_forward",))
@pytest.mark.parametrize("gate", [0.05, 4.0], ids=["mild", "strong"])
def test_modes_have_the_same_bits_where_nothing_is_cut(gate, dtype):
    # 160 sequences and heads, which are computed by one CTA each, and the first one alone, whose heads are by two.
    lengths = [230, 0, 65, 300] * 10
    x = inputs(lengths, 128, dtype)
    x = x.replace(g=gate * x.g / x.g.abs().max())
    whole = helpers.run(x, grads=False, auto_cp=False)
    for mode in MODES:
        for name, value in helpers.run(x, grads=False, auto_cp=mode).items():
            assert_bitwise(name, value, whole[name])
        alone = helpers.run(rows(x, lengths, [0]), grads=False, auto_cp=mode)
        assert_bitwise("o", alone["o"], whole["o"][:, tokens_of(lengths, 0)])
        assert_bitwise("final_state", alone["final_state"][0], whole["final_state"][0])


# --- prefill in parts ---

@cases([False])
def test_prefix_invariant(mode, lengths, K, dtype):
    T = max(lengths)
    x = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=dtype, grads=False)
    whole = helpers.run(x, grads=False, auto_cp=mode)
    for cut in (64, T // 2 // 64 * 64):
        state, parts = x.initial_state, []
        for tokens in (slice(0, cut), slice(cut, T)):
            part = x.replace(**{name: getattr(x, name)[:, tokens] for name in TOKENS[:5]}, initial_state=state)
            found = helpers.run(part, grads=False, auto_cp=mode)
            parts.append(found["o"])
            state = found["final_state"]
        assert_bitwise("o", torch.cat(parts, 1), whole["o"])
        assert_bitwise("final_state", state, whole["final_state"])


# --- the serving calls of a few tokens: as auto_cp=False ---

def serve(name, x, pool, slots):
    """(o, states afterwards) of decode or verify, the latter in a tree."""
    indices = torch.tensor(slots, device=pool.device)
    arguments = (x.q, x.k, x.v, x.g, x.beta)
    if name == "decode":
        pool = pool.clone()
        o = flash_qla.gated_delta_rule_decode(*arguments, pool, indices)
        return o, pool[indices]
    parents = torch.tensor([[-1, 0, 0, 1]] * len(slots), device=pool.device)
    states = torch.zeros(len(slots), 4, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    o = flash_qla.gated_delta_rule_verify(*arguments, pool, indices, parents=parents, states_out=states)
    return o, states


@every_dtype
@pytest.mark.parametrize("pool_dtype", helpers.FLOATS, ids=helpers.dtype_name)
@pytest.mark.parametrize("name", ["decode", "verify"])
@pytest.mark.parametrize("K", [64, 128])
def test_calls_of_a_few_tokens(K, name, pool_dtype, dtype):
    x = make_inputs(B=5, T=4, Hq=2, Hv=4, K=K, dtype=dtype, grads=False, state=False)
    pool = torch.randn(8, 4, K, K, generator=torch.Generator().manual_seed(3)).to(x.q.device, pool_dtype)
    slots = [6, 2, 7, 0, 3]
    o, states = serve(name, x, pool, slots)
    for _ in range(3):
        again = serve(name, x, pool, slots)
        assert_bitwise("o", again[0], o)
        assert_bitwise("states", again[1], states)
    for chosen in ([0], [4], [3, 1]):  # neighbours
        part = x.replace(**{key: getattr(x, key)[chosen] for key in TOKENS[:5]})
        found = serve(name, part, pool, [slots[n] for n in chosen])
        assert_bitwise("o", found[0], o[chosen])
        assert_bitwise("states", found[1], states[chosen])
    own = {key: getattr(x, key)[:, :, 1:] for key in ("q", "k")} | {key: getattr(x, key)[:, :, 2:] for key in ("v", "g", "beta")}
    found = serve(name, x.replace(**own), pool[:, 2:].contiguous(), slots)
    assert_bitwise("o", found[0], o[:, :, 2:])
    assert_bitwise("states", found[1], states[..., 2:, :, :])
