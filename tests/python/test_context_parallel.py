"""Sequences that are cut into segments (auto_cp): as exact as whole, the same alone as packed, and no more dropped than promised.

A path that ignores the mode would be compared with itself: these run where a path cuts, and explain() must say "planned".
"""

import helpers
import pytest
import torch
from helpers import assert_bitwise, assert_close, make_inputs

import flash_qla

CHUNK = 64
low_precision = pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
MODES = {"auto": dict(auto_cp=True), "invariant": dict(auto_cp="invariant"), "forced": dict(force_intra_cp=True)}
modes = pytest.mark.parametrize("mode", MODES)
cut = pytest.mark.path("sm90", planned=True)
forward_cut = pytest.mark.path("sm90", operations=("chunk_forward",), planned=True)


@cut
@low_precision
@modes
@pytest.mark.parametrize("seqlens", [[4096], [5000, 65]], ids=str)
def test_a_cut_is_as_exact_as_none(seqlens, mode, dtype):
    x = make_inputs(seqlens=seqlens, Hq=1, Hv=2, dtype=dtype)
    want = helpers.library_reference(x)
    whole, split = (helpers.run(x, **options) for options in (dict(auto_cp=False), MODES[mode]))
    errors = [helpers.compare(got, want, dtype) for got in (whole, split)]
    for name in want:
        if name in ("dg", "dbeta"):  # of a head single numbers may decide: all heads together
            before, after = (helpers.relative_error(got[name].double(), want[name])[0] for got in (whole, split))
        else:
            before, after = (error[name] for error in errors)
        assert after <= 1.1 * before + 1e-12, (name, after, before)


@cut
@low_precision
def test_invariant_cuts_are_invariant_to_company(dtype):
    # Planned from a sequence's own length: the same bits alone, packed, and packed with others elsewhere.
    x = make_inputs(seqlens=[4200, 300, 0, 6200], Hq=1, Hv=2, dtype=dtype)
    packed, whole = helpers.run(x, auto_cp="invariant"), helpers.run(x, auto_cp=False)
    names = ("q", "k", "v", "g", "beta", "do")
    for n, begin, end in ((0, 0, 4200), (3, 4500, 10_700)):
        own = {name: getattr(x, name)[:, begin:end] for name in names}
        states = {name: getattr(x, name)[n:n + 1] for name in ("initial_state", "dht")}
        alone = helpers.run(x.replace(**own, **states, cu_seqlens=None), auto_cp="invariant")
        others = make_inputs(seqlens=[65], Hq=1, Hv=2, dtype=dtype, seed=9)
        behind = x.replace(**{name: torch.cat([getattr(others, name), t], 1) for name, t in own.items()},
                           **{name: torch.cat([getattr(others, name), t]) for name, t in states.items()},
                           cu_seqlens=helpers.offsets([65, end - begin]))
        behind = helpers.run(behind, auto_cp="invariant")
        for name, value in alone.items():
            if name in ("final_state", "dh0"):
                assert_bitwise(name, value[0], packed[name][n])
                assert_bitwise(name, value[0], behind[name][1])
            else:
                assert_bitwise(name, value, packed[name][:, begin:end])
                assert_bitwise(name, value, behind[name][:, 65:])
    assert not torch.equal(packed["o"][:, 2048:4200], whole["o"][:, 2048:4200]), "nothing was cut"
    assert_bitwise("o of a sequence that is not cut", packed["o"][:, 4200:4500], whole["o"][:, 4200:4500])


@cut
@low_precision
@pytest.mark.parametrize("raw", [False, True], ids=["plain", "raw"])
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
def test_options_of_calls_that_are_cut(v_first, raw, dtype):
    x = make_inputs(seqlens=[700, 0, 5, 395], padding=70, Hq=1, Hv=2, dtype=dtype, raw=raw, state_v_first=v_first)
    helpers.check(x, force_intra_cp=True)


@cut
@low_precision
@pytest.mark.parametrize("auto_cp", [True, "invariant"])
def test_the_low_level_pair_where_sequences_are_cut(auto_cp, dtype):
    x = make_inputs(seqlens=[4500, 300], padding=9, Hq=1, Hv=2, dtype=dtype)
    states = dict(initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)

    def pair(x, **options):
        g, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v, x.g, x.beta, output_h=True, **states, **options)
        gradients = flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, g, x.beta, A, x.do, dht=x.dht, **states, **options)
        named = dict(zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), gradients))
        return named | {"o": o, "final_state": final_state, "h": h.reshape(-1, *h.shape[-3:])}

    got = pair(x, auto_cp=auto_cp)
    with helpers.use_path(helpers.fp64_path(x)):
        want = pair(x.replace(**{name: getattr(x, name).float() for name in ("q", "k", "v", "do")}))
    # That pair's gradients come by way of a float32 cumsum, whose rounding is far below these bounds.
    helpers.compare(got, {name: value.double() for name, value in want.items()}, dtype)


@forward_cut
@low_precision
@pytest.mark.parametrize("auto_cp", [True, "invariant"])
@pytest.mark.parametrize("final", [[2, 7], [4, 0]], ids=["in place", "other slots"])
def test_pools_and_checkpoints_of_calls_that_are_cut(final, auto_cp, dtype):
    x = make_inputs(seqlens=[4500, 300], padding=9, Hq=1, Hv=2, dtype=dtype, grads=False)
    before = torch.randn(8, 2, 128, 128, generator=torch.Generator().manual_seed(1)).to(x.q.device)

    def index(values):
        return torch.tensor(values, dtype=torch.int32, device=x.q.device)

    def serve(x, **options):
        pool, checkpoints = before.clone(), torch.full((4500 // 128 + 300 // 128, 2, 128, 128), torch.nan, device=x.q.device)
        o = flash_qla.gated_delta_rule_prefill(
            x.q, x.k, x.v, x.g, x.beta, pool, index([2, 7]), index(final), cu_seqlens=x.cu_seqlens, checkpoint_every=128,
            checkpoints=checkpoints, checkpoint_cu_starts=index([0, 35, 37]), checkpoint_offsets=index([64, 3000, 4500]),
            checkpoint_indices=index([3, 6, -1]), **options)
        return {"o": o, "pool": pool, "checkpoints": checkpoints}

    got = serve(x, auto_cp=auto_cp)
    with helpers.use_path(helpers.fp64_path(x)):
        want = serve(x.replace(**{name: getattr(x, name).float() for name in ("q", "k", "v")}))
    helpers.compare(got, {name: value.double() for name, value in want.items()}, dtype)
    unused = [slot for slot in range(8) if slot not in (*final, 3, 6)]
    assert_bitwise("pool", got["pool"][unused], before[unused])


@cut
@low_precision
@modes
@pytest.mark.parametrize("where", ["v", "initial_state", "g", "k", "beta"])
def test_nan_before_a_cut(where, mode, dtype):
    """NaN stays in its own sequence. In it, what v or a state contributed before a warm-up, NaN included, may be dropped: what
    is finite then begins with a chunk, and is what follows from the rest. (NaN of g, k and beta gets there by the state.)"""
    x = make_inputs(seqlens=[4500, 300], Hq=1, Hv=2, dtype=dtype)
    token, poisoned = 100, getattr(x, where).clone()
    poisoned[(slice(0, 1), token) if where != "initial_state" else 0] = torch.nan
    first = token if where != "initial_state" else 0
    want = helpers.library_reference(x)
    got, whole = (helpers.run(x.replace(**{where: poisoned}), **options) for options in (MODES[mode], dict(auto_cp=False)))
    for name, value in got.items():  # the other sequence
        part = (lambda t: t[1:]) if name in ("final_state", "dh0") else (lambda t: t[:, 4500:])
        assert_close(name, part(value), part(want[name]), helpers.bound_for(name, dtype), helpers.TENSORS[name][1])
    assert whole["o"][:, first:4500].isnan().all() and whole["final_state"][0].isnan().all(), "whole sequences drop nothing"
    for head in range(2):
        o, reference = got["o"][0, :4500, head], want["o"][0, :4500, head]
        assert_close("o before it", o[:first // CHUNK * CHUNK], reference[:first // CHUNK * CHUNK], helpers.bound_for("o", dtype))
        finite = o.isfinite().all(-1)
        assert torch.equal(finite, o.isfinite().any(-1)), "part of a token's output is NaN"
        behind = finite[first:].nonzero()
        end = first + int(behind[0]) if len(behind) else 4500
        begins_a_chunk = end % CHUNK == 0 and end // CHUNK > first // CHUNK
        assert begins_a_chunk or end == 4500, f"NaN is lost from token {end} on, which begins no segment"
        assert finite[end:].all(), "NaN comes back"
        assert_close("o behind a cut", o[end:], reference[end:], helpers.bound_for("o", dtype))
        final_state = got["final_state"][0, head]
        if end == 4500 and final_state.isnan().any():
            assert final_state.isnan().all()
        else:
            assert_close("final_state", final_state, want["final_state"][0, head], helpers.bound_for("final_state", dtype))


@cut
@low_precision
@modes
def test_nan_of_a_query_is_its_own_tokens(mode, dtype):
    x = make_inputs(seqlens=[4500], Hq=1, Hv=2, dtype=dtype)
    q = x.q.clone()
    q[:, 100] = torch.nan
    got, want = helpers.run(x.replace(q=q), grads=False, **MODES[mode]), helpers.library_reference(x, grads=False)
    want["o"][:, 100] = torch.nan
    helpers.compare(got, want, dtype)


# --- cp_tolerance ---

# Of the largest norm that a state has had: what a cut may drop where nothing else is asked for.
DEFAULT_TOLERANCE = 1.2e-7
# In bf16: of fp16's numbers the largest is 1e12 times the smallest, and a state must be read when it has all but decayed.
BF16 = torch.bfloat16
tolerances = pytest.mark.parametrize(
    "tolerance, dtype", [(None, BF16), (1e-10, BF16), (None, torch.float16)], ids=["bf16", "1e-10-bf16", "fp16"])


@pytest.mark.parametrize("given", [1e-6, 5.0, float("inf")])
def test_a_tolerance_above_the_default_is_refused(given):
    x = make_inputs(T=70, Hq=1, Hv=2, K=16)
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: cp_tolerance (\(\S+\) must|must .*\(\S+\))"):
        helpers.call(x, cp_tolerance=given)


@pytest.mark.parametrize("given", [1e-7, 1e-10, 1e-30])
def test_a_tolerance_below_the_default_is_taken(given):
    helpers.check(make_inputs(T=70, Hq=1, Hv=2, K=16), cp_tolerance=given)


HUGE = 1e3


def impulses(T, chunks, decay, dtype, key_norm=1.0, beta=0.5, seed=0):
    """A head for each of `chunks`, whose values are huge and there in that chunk alone, and a last one with a huge initial state
    and no values. Every head's state decays by e^-decay a chunk."""
    heads = len(chunks) + 1
    x = make_inputs(T=T, Hq=heads, Hv=heads, dtype=dtype, seed=seed)
    v, state = torch.zeros_like(x.v), torch.zeros_like(x.initial_state)
    for head, chunk in enumerate(chunks):
        tokens = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        v[:, tokens, head] = HUGE * x.v[:, tokens, head]
    state[:, -1] = HUGE * x.initial_state[:, -1]
    return x.replace(v=v, initial_state=state, k=(key_norm * x.k.float()).to(dtype), g=torch.full_like(x.g, -decay / CHUNK),
                     beta=torch.full_like(x.beta, beta), dht=torch.zeros_like(x.dht))


def by_chunk(t):
    """Norm of each chunk and head of a [1, T, H, ..] tensor: [chunks, H]."""
    return t.double().reshape(-1, CHUNK, *t.shape[2:]).pow(2).sum((1, 3)).sqrt()


def largest_states(x):
    """The largest norm, at a chunk's edge, of each head's state."""
    with helpers.use_path(helpers.fp64_path(x)):
        _, _, _, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(
            *(t.float() for t in (x.q, x.k, x.v)), x.g, x.beta, initial_state=x.initial_state, output_h=True)
    states = torch.cat([h.reshape(-1, *h.shape[-3:]), final_state])
    return states.double().flatten(2).norm(dim=2).amax(0)


def assert_little_is_dropped(name, got, want, largest, reads, tolerance, unsplit, rounding=None):
    """Each chunk's error: at most what the tolerance allows of the largest state, which a token reads with a vector of norm
    `reads`, beside the error of the unsplit result and the rounding of what is there: twice the bound, in one chunk of many, if
    not given."""
    tolerance = DEFAULT_TOLERANCE if tolerance is None else tolerance
    error, before = by_chunk(got.double() - want), by_chunk(unsplit.double() - want)
    rounding = 2 * helpers.bound_for(name, unsplit.dtype) if rounding is None else rounding
    limit = 1.1 * before + rounding * by_chunk(want) + tolerance * CHUNK**0.5 * reads * largest
    excess = (error / limit).nan_to_num(torch.inf)
    at = tuple((excess == excess.max()).nonzero()[0].tolist())
    assert excess.max() <= 1, (
        f"{name}, chunk {at[0]}, head {at[1]}: {error[at]:.2e} is lost of a largest state of {largest[at[1]]:.2e}: {limit[at]:.2e} may be")


FORCED = (1088, [0, 1, 2, 3, 4, 5, 6, 7, 8, 11, 14])
# A sequence of 4,544 tokens "invariant" cuts before chunk 35 alone.
INVARIANT = (4544, [10, 30, 31, 32, 33, 34, 35, 36, 50])


@cut
@tolerances
@pytest.mark.parametrize("decay", [8.4, 5.4, 1.7])
@pytest.mark.parametrize("mode, sizes", [("forced", FORCED), ("invariant", INVARIANT)], ids=["forced", "invariant"])
def test_no_more_of_a_state_is_dropped_than_the_tolerance(mode, sizes, decay, tolerance, dtype):
    # Warm-ups of 2, 3 and 10 chunks by default, 3, 5 and 14 with the smaller tolerance.
    x = impulses(*sizes, decay, dtype)
    want, largest = helpers.library_reference(x), largest_states(x)
    whole, got = helpers.run(x, auto_cp=False), helpers.run(x, cp_tolerance=tolerance, **MODES[mode])
    scale = x.q.shape[3] ** -0.5
    assert_little_is_dropped("o", got["o"], want["o"], largest, scale, tolerance, whole["o"])
    assert_little_is_dropped("dq", got["dq"], want["dq"], largest, scale * by_chunk(x.do).max() / CHUNK**0.5, tolerance, whole["dq"])


@cut
@pytest.mark.parametrize("tolerance", [None, 1e-10])
@pytest.mark.parametrize("decay", [8.4, 5.4, 1.7])
def test_no_more_of_a_states_gradient_is_dropped_than_the_tolerance(decay, tolerance):
    # The same with gradients of o that are there in one chunk alone, and a huge one of the final state. dv reads dS alone.
    T, chunks = FORCED
    x = impulses(T, chunks, decay, BF16)
    x = x.replace(initial_state=torch.zeros_like(x.initial_state))
    do, dht = torch.zeros_like(x.do), torch.zeros_like(x.dht)
    largest = torch.empty(len(chunks) + 1, dtype=torch.float64, device=x.q.device)
    for head, chunk in enumerate(chunks):
        tokens, at = slice(chunk * CHUNK, (chunk + 1) * CHUNK), slice(head, head + 1)
        do[:, tokens, head] = HUGE * x.do[:, tokens, head]
        # The gradient of the state before that chunk is what leaves it.
        part = {name: t[:, tokens, at] for name, t in dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, do=do).items()}
        alone = x.replace(**part, initial_state=x.initial_state[:, at], dht=x.dht[:, at])
        largest[head] = helpers.library_reference(alone)["dh0"].norm()
    dht[:, -1] = HUGE
    largest[-1] = dht[:, -1].norm()
    x = x.replace(do=do, dht=dht)
    want, whole = helpers.library_reference(x), helpers.run(x, auto_cp=False)
    got = helpers.run(x, cp_tolerance=tolerance, force_intra_cp=True)
    assert_little_is_dropped("dv", got["dv"], want["dv"], largest, 0.5, tolerance, whole["dv"])


@cut
@tolerances
@pytest.mark.parametrize("mode, sizes", [("forced", FORCED), ("invariant", INVARIANT)], ids=["forced", "invariant"])
def test_growing_keys_keep_what_gates_alone_would_drop(mode, sizes, tolerance, dtype):
    # Keys of norm 2 with beta 2: a token multiplies the state along its key by -7. A decay of e^-17 a chunk, by which a warm-up of
    # one chunk would do, is not the state's: that falls by e^-7 a chunk. Rounding alone takes up to 5 % of what is there (emulation.py).
    x = impulses(*sizes, 17.0, dtype, key_norm=2.0, beta=2.0)
    want, largest = helpers.library_reference(x), largest_states(x)
    whole, got = helpers.run(x, auto_cp=False), helpers.run(x, cp_tolerance=tolerance, **MODES[mode])
    assert_little_is_dropped("o", got["o"], want["o"], largest, x.q.shape[3] ** -0.5, tolerance, whole["o"], rounding=0.1)
