"""One stream of tokens over ranks, all of them in one process (cards.py), held to one rank's token recurrence in fp64."""

import cards
import helpers
import numpy as np
import pytest
import torch

import flash_qla

# name: (lengths, padding, ranks, layout, rank_tokens)
STREAMS = {
    "none crosses": ([50, 30, 80], 0, 2, "contiguous", [80, 80]),
    "one cut": ([60, 90, 50], 0, 2, "contiguous", None),
    "all ranks": ([200], 0, 4, "contiguous", None),
    "over two of four": ([70, 60, 30, 80], 0, 4, "contiguous", None),
    "several on a rank": ([5, 9, 1, 20, 130, 7, 28], 0, 2, "contiguous", None),
    "ends on cuts": ([64, 64, 128], 0, 4, "contiguous", [64, 64, 64, 64]),
    "cuts within a chunk": ([300], 0, 5, "contiguous", [1, 63, 64, 65, 107]),
    "empty sequences on a cut": ([40, 0, 0, 60, 0], 0, 2, "contiguous", [40, 60]),
    "empty sequences beside cuts": ([0, 39, 0, 2, 0, 59, 0, 0], 0, 2, "contiguous", [40, 60]),
    "first rank empty": ([90, 40], 0, 3, "contiguous", [0, 50, 80]),
    "middle rank empty": ([90, 40], 0, 3, "contiguous", [50, 0, 80]),
    "last rank empty": ([90, 40], 0, 3, "contiguous", [50, 80, 0]),
    "ranks of one token": ([6], 0, 4, "contiguous", [1, 1, 1, 3]),
    "a rank beyond the offsets": ([70, 20], 60, 3, "contiguous", None),
    "padding": ([70, 20], 3, 2, "contiguous", [46, 47]),
    "no tokens": ([0, 0], 0, 3, "contiguous", [0, 0, 0]),
    "zigzag, one sequence": ([240], 0, 3, "zigzag", None),
    "zigzag, several": ([100, 20, 0, 80, 40], 0, 2, "zigzag", None),
    "zigzag, neighbours on the last rank": ([20, 200, 20], 0, 2, "zigzag", [(60, 60), (70, 50)]),
    "zigzag, empty parts": ([100, 60], 5, 2, "zigzag", [(0, 40), (125, 0)]),
    "zigzag, odd halves": ([77], 0, 2, "zigzag", [38, 39]),
}


def stream(name, **options):
    lengths, padding, world, layout, rank_tokens = STREAMS[name]
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=lengths, padding=padding, **options)
    return x, world, dict(layout=layout, rank_tokens=rank_tokens)


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("dtype, all_rows", [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
                         ids=["float32", "float32, all_rows", "bfloat16"])
def test_every_cut_gives_the_results_of_one_rank(name, dtype, all_rows):
    x, world, cut = stream(name, dtype=dtype, seed=len(name))
    cards.check(x, world, all_rows=all_rows, **cut)


def check_random_cut(rng, draw, dtype, K, V, longest):
    """One draw of lengths, ranks and cuts, held to the token recurrence."""
    world = int(rng.integers(1, 5)) + 1
    layout = str(rng.choice(["contiguous", "zigzag"]))
    lengths = [0 if rng.random() < 0.2 else int(rng.integers(0, longest)) for _ in range(int(rng.integers(1, 5)))]
    padding = int(rng.integers(0, 9)) if rng.random() < 0.3 else 0
    borders = np.concatenate([[0], np.cumsum(lengths)])
    parts = cards.draw_cut(rng, int(borders[-1]) + padding, world if layout == "contiguous" else 2 * world, borders)
    x = helpers.make_inputs(Hq=1, Hv=int(rng.integers(1, 3)), K=K, V=V, seqlens=lengths, padding=padding, dtype=dtype, seed=draw,
                            state=bool(rng.integers(2)), auto_cp=[True, False, "invariant"][int(rng.integers(3))])
    try:
        cards.check(x, world, layout=layout, rank_tokens=cards.rank_tokens(parts, world, layout), all_rows=bool(rng.integers(2)))
    except AssertionError as error:
        raise AssertionError(f"draw {draw}: {lengths} + {padding} over {layout} {parts}: {error}") from error


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=helpers.dtype_name)
def test_random_cuts(dtype, device):
    if dtype not in helpers.DEVICE_DTYPES[device]:
        pytest.skip("fp64 is for the CPU")
    rng = np.random.default_rng(11)
    for draw in range(60):
        check_random_cut(rng, draw, dtype, int(rng.choice([3, 8])), int(rng.choice([1, 5])), 140)


@pytest.mark.parametrize("K, V", [(64, 96), (128, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=helpers.dtype_name)
def test_random_cuts_of_16_bits(dtype, K, V, device):
    """On a GPU links and calls are those of paths sm80 and sm90: parts of more than a chunk, heads that forget and that do not."""
    rng = np.random.default_rng(K)
    for draw in range(8):
        check_random_cut(rng, draw, dtype, K, V, 700 if device == "cuda" else 150)


@pytest.mark.parametrize("B, rank_tokens", [(1, None), (3, None), (2, [70, 0, 1, 49]), (2, [0, 40, 80, 0])], ids=str)
def test_rows_of_a_batch(B, rank_tokens):
    x = helpers.make_inputs(B=B, T=120, Hq=1, Hv=2, K=8, V=6)
    cards.check(x, 4, rank_tokens=rank_tokens)


def test_a_batch_without_tokens_keeps_its_states():
    x = helpers.make_inputs(B=2, T=0, Hq=1, Hv=2, K=8, V=6)
    got, _ = cards.check(x, 3)
    helpers.assert_bitwise("final_state", got["final_state"], x.initial_state)


@pytest.mark.parametrize("Hq, Hv, K, V", [(2, 2, 1, 1), (1, 2, 64, 64), (1, 4, 96, 192), (1, 1, 128, 128), (1, 1, 256, 256)])
def test_head_dimensions_and_groups(Hq, Hv, K, V):
    x = helpers.make_inputs(Hq=Hq, Hv=Hv, K=K, V=V, seqlens=[150, 40], seed=K)
    cards.check(x, 3, rank_tokens=[70, 30, 90])


OPTIONS = {
    "in-kernel": dict(raw=True),
    "negative eigenvalues": dict(raw=True, allow_neg_eigval=True),
    "v first": dict(state_v_first=True),
    "v first, bf16 states": dict(state_v_first=True, state_dtype=torch.bfloat16),
    "scale": dict(scale=0.3),
    "no scale": dict(scale=0.0),
    "bf16 gates": dict(gate_dtype=torch.bfloat16, beta_dtype=torch.bfloat16),
    "no state": dict(state=False),
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_options(name, dtype):
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[30, 160, 10], dtype=dtype, **OPTIONS[name])
    cards.check(x, 4, rank_tokens=[60, 50, 45, 45])


@pytest.mark.parametrize("absent", [("g",), ("beta",), ("g", "beta"), ("dht",), ("do",)], ids=str)
def test_absent_inputs_and_gradients(absent):
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=[30, 160, 10]).replace(**dict.fromkeys(absent))
    cards.check(x, 3, rank_tokens=[60, 80, 60])


def test_a_loss_on_the_last_rank_alone_reaches_the_first():
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, T=120, seed=4)
    x.do[:, :90] = 0
    got, _ = cards.check(x.replace(dht=torch.zeros_like(x.dht)), 4)
    assert got["dv"][:, :30].abs().max() > 1e-6


# log decays a token; 200 tokens over 5 ranks
GATES = {"none": 0.0, "mild": -0.01, "some forget": -0.5, "strong": -6.0, "beyond measure": -1e4, "growing": 0.02}


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_gates(gates, dtype):
    x = helpers.make_inputs(Hq=1, Hv=4, K=8, V=6, seqlens=[200], dtype=dtype)
    x.g[:] = GATES[gates]
    x.g[..., 0] = 0
    cards.check(x, 5)


def test_a_head_that_decays_needs_nothing_from_afar():
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=[400])
    x.g[..., 0], x.g[..., 1] = -0.5, 0.0
    kinds = {}

    def look(number, gathered):
        kinds[number] = gathered[:, 0, :, 8 * (6 + 8)].long().tolist()
        return gathered

    cards.simulate(x, 4, corrupt=look)
    constant, affine = 1, 2
    forward = [[constant, constant], [constant, affine], [constant, affine], [constant, constant]]
    assert kinds == {0: forward, 1: [[constant, constant], [constant, affine], [constant, affine], [constant, constant]]}
    kinds.clear()
    cards.simulate(x.with_options(auto_cp=False), 4, corrupt=look)
    assert kinds[0] == [[constant, constant], [affine, affine], [affine, affine], [constant, constant]]


def test_growth_between_decays_is_not_forgotten():
    """The window at the end has decayed, that at the start has not: the gradient still needs what lies beyond."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=[600])
    x.g[:] = 0.0
    x.g[:, 200:264] = 0.25  # e^16 at the second rank's start
    x.g[:, 336:400] = -0.5  # e^-32 at its end
    cards.check(x, 3)


@pytest.mark.parametrize("decay", [0.0, -0.3], ids=["stays", "decays"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_a_huge_initial_state(decay, dtype):
    """Norm 1e4: what is exchanged may not lose the digits below it. A head that forgets drops 1.2e-7 of it at most."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[500, 12], dtype=dtype)
    x.g[:] = decay
    x = x.replace(initial_state=x.initial_state * 1e4 / x.initial_state.norm())
    if decay == 0.0:
        cards.check(x, 4)
        return
    got, want = cards.simulate(x, 4), helpers.reference(x)
    for name, bound in (("o", 1e-5), ("final_state", 1e-5)):
        bound = max(bound, helpers.bound_for(name, dtype))
        error = np.linalg.norm(helpers.to_numpy(got[name]) - want[name])
        assert error <= bound * np.linalg.norm(want[name]) + 1.2e-7 * 1e4


def test_nan_stays_in_its_sequence():
    x, world, cut = stream("several on a rank")
    clean = cards.simulate(x, world, **cut)
    spoilt = x.replace(v=x.v.clone(), do=x.do.clone())
    spoilt.v[:, 40:50] = torch.nan  # of the sequence that crosses the cut
    spoilt.do[:, 40:50] = torch.inf
    found = cards.simulate(spoilt, world, **cut)
    sequence = slice(35, 165)
    for name in cards.PER_TOKEN:
        for part in (slice(0, 35), slice(165, None)):
            helpers.assert_bitwise(name, found[name][:, part], clean[name][:, part])
        assert not found[name][:, sequence].isfinite().all()
    for name in cards.STATES:
        others = torch.tensor([n for n in range(7) if n != 4])
        helpers.assert_bitwise(name, found[name][others], clean[name][others])


def test_nan_beside_empty_and_constant_links():
    """A rank without tokens, and one in which a sequence begins, hand on no NaN of a matrix that nobody reads."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=[50, 70])
    x.k[:, :50], x.v[:, :50] = torch.nan, torch.nan
    found = cards.simulate(x, 4, rank_tokens=[30, 0, 40, 50])
    assert found["o"][:, 50:].isfinite().all() and found["dk"][:, 50:].isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_the_same_bits_each_time(layout):
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[130, 7, 103])
    first, second = (cards.simulate(x, 3, layout=layout) for _ in range(2))
    for name, value in first.items():
        helpers.assert_bitwise(name, value, second[name])


@pytest.mark.parametrize("auto_cp", [False, "invariant"])
def test_a_sequence_on_one_rank_has_the_bits_of_a_call_without_ranks(auto_cp):
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[130, 70, 100, 60], auto_cp=auto_cp)
    whole, parts = helpers.run(x), cards.simulate(x, 2, rank_tokens=[264, 96])
    alone = [0, 1, 3]  # the third crosses the cut
    for name in cards.STATES:
        helpers.assert_bitwise(name, parts[name][alone], whole[name][alone])
    for name in cards.PER_TOKEN:
        for part in (slice(0, 200), slice(300, None)):
            helpers.assert_bitwise(name, parts[name][:, part], whole[name][:, part])
    # With False also a cut one has them in the whole chunks before its first cut, forward.
    if auto_cp is False:
        helpers.assert_bitwise("o", parts["o"][:, :264], whole["o"][:, :264])


def test_nothing_is_gathered_where_nothing_crosses():
    x, world, cut = stream("none crosses")

    def refuse(number, gathered):
        raise AssertionError("a gather")

    whole, parts = helpers.run(x), cards.simulate(x, world, corrupt=refuse, **cut)
    for name, value in whole.items():
        helpers.assert_bitwise(name, parts[name], value)


def test_sequences_without_neighbours_are_computed_while_links_are_gathered():
    """A second call is made for them where they have a quarter of the tokens; results are the same to the bit."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[90, 60, 150, 100], raw=True)
    cut = dict(rank_tokens=[100, 200, 100])
    halves, together = (cards.simulate(x, 3, all_rows=all_rows, **cut) for all_rows in (False, True))
    for name, value in together.items():
        if name not in ("dA_log", "ddt_bias"):  # sums over the calls
            helpers.assert_bitwise(name, halves[name], value)
    cards.check(x, 3, **cut)


def test_lengths_and_gates_that_change_in_a_context():
    """refresh() writes other offsets in place, gates flip the kind of a head's links: nothing is decided on the host."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=8, V=6, seqlens=[100, 60, 80])
    loop = cards.Loop(3)
    contexts = [flash_qla.build_cp_context(x.cu_seqlens, loop.group(rank), all_rows=True) for rank in range(3)]
    tensors = [context.cu_seqlens for context in contexts]
    for lengths, gate in (([100, 60, 80], -0.01), ([0, 240, 0], -1.0), ([240, 0, 0], 0.0), ([79, 1, 155], -0.5), ([0, 0, 0], 0.0)):
        offsets = helpers.offsets(lengths)
        x.g[..., 1] = gate
        changed = x.replace(cu_seqlens=offsets)
        for context, tensor in zip(contexts, tensors):
            context.refresh(offsets)
            assert context.cu_seqlens is tensor
        loop.sent.clear()
        got = _run_in(loop, contexts, changed)
        helpers.compare(got, helpers.reference(changed), changed.dtype)


def _run_in(loop, contexts, x):
    shares = [cards.share_of(context, x) for context in contexts]
    for _ in range(2):
        results = []
        for rank, (context, share) in enumerate(zip(contexts, shares)):
            loop.start(rank)
            results.append(helpers.run(cards.local_inputs(x, share), cp_context=context))
    return cards.merge(x, shares, results)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", [{}, dict(state_v_first=True), dict(raw=True)], ids=str)
def test_states_from_rank_to_rank(layout, options):
    """exchange="serial": the bits of one rank, where parts begin at multiples of 64 tokens."""
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, seqlens=[320, 64, 128], auto_cp=False, **options)
    parts = dict(contiguous=[128, 0, 192, 192], zigzag=[(64, 128), (0, 64), (128, 64), (64, 0)])[layout]
    # A state crosses one cut a round.
    got = cards.simulate(x, 4, layout=layout, rank_tokens=parts, exchange="serial", rounds=9)
    whole = helpers.run(x)
    for name in ("o", "final_state", "dh0"):
        helpers.assert_bitwise(name, got[name], whole[name])
    helpers.compare(got, helpers.reference(x), x.dtype)


def test_rows_of_a_batch_from_rank_to_rank():
    x = helpers.make_inputs(B=2, T=192, Hq=1, Hv=2, K=16, V=8, auto_cp=False)
    got, whole = cards.simulate(x, 3, exchange="serial", rounds=6), helpers.run(x)
    for name in ("o", "final_state", "dh0"):
        helpers.assert_bitwise(name, got[name], whole[name])


# What is wrong in each must be seen. A defect is put into what a gather gives: S or R, then M, then the kind.
K, V = 16, 8


def _transposed(number, gathered):
    """M for M^T."""
    M = gathered[..., K * V:K * (V + K)].unflatten(-1, (K, K))
    gathered[..., K * V:K * (V + K)] = M.transpose(-1, -2).flatten(-2)
    return gathered


def _transposed_backward(number, gathered):
    return _transposed(number, gathered) if number == 1 else gathered


def _not_restarted(number, gathered):
    """A sequence that begins in the stream goes on from the one before it: constant links are affine, as M is the identity."""
    kinds = gathered[..., K * (V + K)]
    gathered[..., K * V:K * (V + K)] = torch.where(
        (kinds == 1)[..., None], torch.eye(K, dtype=gathered.dtype, device=gathered.device).flatten(), gathered[..., K * V:K * (V + K)])
    kinds[kinds == 1] = 2
    return gathered


def _rounded(number, gathered):
    """Links in bf16."""
    kinds = gathered[..., K * (V + K)].clone()
    gathered = gathered.bfloat16().to(gathered.dtype)
    gathered[..., K * (V + K)] = kinds
    return gathered


def _doubled(number, gathered):
    """What the last part's final state asks for counts twice: in its link, and once more."""
    if number == 1:
        gathered[-1, ..., :K * V] *= 2
    return gathered


@pytest.mark.parametrize("defect", [_transposed, _transposed_backward, _not_restarted, _rounded, _doubled],
                         ids=lambda f: f.__name__)
def test_planted_defects_are_seen(defect):
    lengths = [150, 250] if defect is _not_restarted else [400]
    x = helpers.make_inputs(Hq=1, Hv=2, K=K, V=V, seqlens=lengths)
    x.g[:] = 0.0
    if defect is _rounded:
        x = x.replace(initial_state=x.initial_state * 1e4 / x.initial_state.norm())
    with pytest.raises(AssertionError, match="exceeds"):
        cards.check(x, 4, corrupt=defect)
    cards.check(x, 4)


def test_a_gradient_link_of_the_forwards_window_is_seen():
    """A head that forgets has its state from the last chunks of a part, and the state's gradient from its first ones."""
    x = helpers.make_inputs(Hq=1, Hv=1, K=K, V=V, seqlens=[600])
    x.g[:] = -0.5

    def wrong_window(number, gathered):
        if number == 1:
            # Of the second of three ranks: only its last 64 tokens count.
            late = x.replace(do=x.do.clone())
            late.do[:, :336] = 0
            late.do[:, 400:] = 0
            part = slice(200, 400)
            q, k, g, beta, do = (t[:, part] for t in (late.q, late.k, late.g, late.beta, late.do))
            index = torch.tensor([[0, 0]], device=x.q.device)
            yes = torch.tensor([True], device=x.q.device)
            forward = flash_qla.distributed.chunk_summary(k, x.v[:, part], g, beta, index, yes, yes, cu_seqlens=helpers.offsets([200]))
            link = flash_qla.distributed.chunk_summary_backward(q, k, g, beta, do, index, yes, yes, forward,
                                                                cu_seqlens=helpers.offsets([200]))
            gathered[1] = link.packed
        return gathered

    with pytest.raises(AssertionError, match="exceeds"):
        cards.check(x, 3, corrupt=wrong_window)
