"""Links of long parts, which a GPU makes in segments on all of its multiprocessors: against the recurrence in fp64, with other
sequences around the part, for any offsets, from run to run, and replayed from a graph."""

import functools

import helpers
import pytest
import torch

import flash_qla
from flash_qla import distributed, use_path

NONE, CONSTANT, AFFINE = 0, 1, 2
BEFORE, BEHIND = 37, 50  # tokens of the neighbours: the part starts off every grid
ORACLE = {"cpu": "reference", "cuda": "cuda_reference"}
# 64 chunks are the longest window that is looked for on a GPU.
TOKENS = helpers.with_cuda([1, 65, 400], [63, 64, 127, 128, 129, 1000, 4096, 5003, 9999])


def inputs(tokens, dtype, **options):
    """Three sequences, of which the middle one is the part's. Heads: one keeps all, one decays slowly, two forget."""
    x = helpers.make_inputs(seqlens=[BEFORE, tokens, BEHIND], Hq=2, Hv=4, dtype=dtype, **options)
    if not options.get("raw"):
        x.g[..., 0] = 0.0
        x.g[..., 1] *= 0.02  # of 9,999 tokens e^-10 is left
        x.g[..., 2:] = x.g[..., 2:] * 0.5 - 0.3
    return x


@functools.lru_cache
def on_device(values, device):
    """Made once: no tensor comes from the host while a graph is captured."""
    return torch.tensor(values, device=device)


def links_of(x, rows=((1, 1),), through=(True,), A=None):
    """Forward and backward links of parts."""
    crosses = on_device((True,) * len(through), x.q.device)
    rows, through = on_device(rows, x.q.device), on_device(through, x.q.device)
    options = dict(cu_seqlens=x.cu_seqlens, A_log=x.A_log, dt_bias=x.dt_bias, **x.options)
    scale = options.pop("scale", None)
    forward = distributed.chunk_summary(x.k, x.v, x.g, x.beta, rows, crosses, through, initial_state=x.initial_state, **options)
    backward = distributed.chunk_summary_backward(x.q, x.k, x.g, x.beta, x.do, rows, crosses, through, forward,
                                                  dht=x.dht, A=A, scale=scale, **options)
    return forward, backward


def check(x, found, wanted, dtype, tokens):
    bounds = (helpers.bound_for("final_state", dtype), helpers.bound_for("final_state", dtype), helpers.bound_for("dh0", dtype))
    forward, backward = wanted
    # A transition that is forgotten counts as zero: it is at most e^-16 of the identity.
    M = torch.where(found[0].kind[..., None, None] == AFFINE, forward.M, torch.zeros_like(forward.M))
    for name, ours, theirs, bound in zip("SMR", (found[0].S, found[0].M, found[1].S), (forward.S, M, backward.S), bounds):
        helpers.assert_close(name, ours, theirs, bound, 1, where=f"{tokens} tokens: ")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("through", [True, False], ids=["through", "begins"])
@pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
def test_a_part_between_others(tokens, through, dtype, device):
    x = inputs(tokens, dtype)
    found = links_of(x, through=(through,))
    keeps, forgets = (AFFINE if through else CONSTANT), (AFFINE if through and tokens < 63 else CONSTANT)
    assert found[0].kind.tolist() == found[1].kind.tolist() == [[keeps, keeps, forgets, forgets]]
    with use_path(ORACLE[device]):
        wanted = links_of(x, through=(through,))
    check(x, found, wanted, dtype, tokens)


@pytest.mark.parametrize("changes", [dict(raw=True), dict(raw=True, allow_neg_eigval=True), dict(state_v_first=True),
                                     dict(scale=0.3), dict(auto_cp=False), dict(auto_cp="invariant")], ids=str)
def test_options(changes, device):
    x = inputs(400, torch.bfloat16, **changes)
    for through in (True, False):
        found = links_of(x, through=(through,))
        with use_path(ORACLE[device]):
            wanted = links_of(x, through=(through,))
        check(x, found, wanted, torch.bfloat16, 400)


def test_A_of_the_forward_may_be_given(device):
    """What the forward has kept: the links that are made without it, but for rounding."""
    x = inputs(400, torch.bfloat16)
    A = flash_qla.chunk_gated_delta_rule_fwd(
        x.q, x.k, x.v, x.g, x.beta, scale=128**-0.5, initial_state=None, output_final_state=False, cu_seqlens=x.cu_seqlens)[1]
    with_A = links_of(x, A=A)[1]
    with use_path(ORACLE[device]):
        helpers.assert_close("R", with_A.S, links_of(x)[1].S, helpers.bound_for("dh0", torch.bfloat16), 1)


def test_two_parts_and_parts_without_tokens(device):
    x = inputs(400, torch.bfloat16)
    rows, through = ((1, 1), (-1, -1), (2, 2), (7, 9)), (True, True, True, True)
    found = links_of(x, rows, through)
    assert found[0].kind[1:, 0].tolist() == [NONE, AFFINE, NONE]
    with use_path(ORACLE[device]):
        wanted = links_of(x, rows, through)
    check(x, found, wanted, torch.bfloat16, 400)


def test_rows_of_a_batch(device):
    x = helpers.make_inputs(B=3, T=500, Hq=1, Hv=2, dtype=torch.bfloat16)
    rows, through = ((0, 0), (1, 1), (2, 2)), (True, False, True)
    found = links_of(x, rows, through)
    with use_path(ORACLE[device]):
        wanted = links_of(x, rows, through)
    check(x, found, wanted, torch.bfloat16, 500)


@pytest.mark.parametrize("tokens", [1, 65, 700])
def test_nothing_of_the_neighbours_comes_in(tokens, device):
    """NaN everywhere around the part, in all of its inputs: the same bits."""
    x = inputs(tokens, torch.bfloat16)
    clean = links_of(x)
    for t in (x.q, x.k, x.v, x.g, x.beta, x.do):
        t[:, :BEFORE] = torch.nan
        t[:, BEFORE + tokens :] = torch.nan
    for t in (x.initial_state, x.dht):
        t[0], t[2] = torch.nan, torch.nan
    for ours, theirs in zip(links_of(x), clean):
        assert torch.equal(ours.packed, theirs.packed)


def test_nan_of_a_token_stays_in_its_head(device):
    x = inputs(700, torch.bfloat16)
    clean = links_of(x)
    x.v[:, BEFORE + 300, 0] = torch.nan
    forward, backward = links_of(x)
    assert forward.S[0, 0].isnan().any() and not forward.M.isnan().any()
    assert torch.equal(forward.S[0, 1:], clean[0].S[0, 1:]) and torch.equal(backward.packed, clean[1].packed)


@pytest.mark.cuda
def test_the_same_bits_again_and_again():
    x = inputs(5003, torch.bfloat16)
    first = links_of(x)
    for _ in range(50):
        for ours, theirs in zip(links_of(x), first):
            assert torch.equal(ours.packed, theirs.packed)


@pytest.mark.cuda
def test_heads_do_not_depend_on_each_other():
    """With "invariant" a chain is cut by its own length: another head's gates do not change its bits."""
    x = inputs(5003, torch.bfloat16, auto_cp="invariant")
    first = links_of(x)
    x.g[..., 1] = -1.0
    for ours, theirs in zip(links_of(x), first):
        assert torch.equal(ours.packed[:, [0, 2, 3]], theirs.packed[:, [0, 2, 3]])


@pytest.mark.cuda
def test_a_graph_replays_with_other_lengths_and_gates():
    x = inputs(3000, torch.bfloat16)
    gates, offsets = x.g.clone(), x.cu_seqlens.clone()
    graph, (forward, backward) = helpers.captured(lambda: links_of(x))
    generator = torch.Generator().manual_seed(1)
    for length in (3000, 1, 64, 777, 2999, 0):
        start = int(torch.randint(0, 3000 - length + 1, (1,), generator=generator))
        x.cu_seqlens.copy_(torch.tensor([0, start, start + length, start + length + 1]))
        x.g.copy_(gates[..., torch.randperm(4, generator=generator).to(gates.device)])
        graph.replay()
        for ours, theirs in zip((forward, backward), links_of(x)):
            assert torch.equal(ours.packed, theirs.packed), length
    x.cu_seqlens.copy_(offsets)


@pytest.mark.cuda
@pytest.mark.parametrize("offsets", [[0, 9000, -5, 12], [5000, 3, 100, 4000], [-(2**62), 2**62, 7, 0], [0, 3087, 0, 3087]], ids=str)
def test_offsets_out_of_order_harm_nobody(offsets):
    """Any numbers are taken for some tokens within the tensors; what is written outside compute-sanitizer sees."""
    x = inputs(3000, torch.bfloat16)
    x.cu_seqlens.copy_(torch.tensor(offsets))
    for forward in (links_of(x)[0], links_of(x, ((0, 2), (1, 1), (2, 0)), (True, True, True))[0]):
        torch.cuda.synchronize()
        assert set(forward.kind.unique().tolist()) <= {NONE, CONSTANT, AFFINE}
