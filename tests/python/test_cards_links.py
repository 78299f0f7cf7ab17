"""The four operations under context parallelism over cards, one by one, and the contexts that are built of them."""

from types import SimpleNamespace

import helpers
import numpy as np
import oracle
import pytest
import torch

import flash_qla
from flash_qla import _ffi, distributed

NONE, CONSTANT, AFFINE = 0, 1, 2


def group(world, rank):
    """Ranks that never gather anything."""
    return SimpleNamespace(size=lambda: world, rank=lambda: rank)


def slow_cut(cu_seqlens, bounds):
    """Tokens of each part, as (sequence, position in the stream)."""
    owner = {}
    for n, (begin, end) in enumerate(zip(cu_seqlens, cu_seqlens[1:])):
        owner.update(dict.fromkeys(range(begin, end), n))
    return [[owner.get(token) for token in range(begin, end)] for begin, end in bounds]


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_sequence_cut_agrees_with_one_token_by_token(kind, device):
    if kind == "numpy" and device != "cpu":
        pytest.skip("numpy lies on the host")
    make = (lambda values: np.array(values, dtype=np.int64)) if kind == "numpy" else lambda values: torch.tensor(values, device=device)
    rng = np.random.default_rng(3)
    for draw in range(300):
        lengths = [int(n) for n in rng.integers(0, 6, rng.integers(0, 5))]
        cu = [0, *np.cumsum(lengths).tolist()] if lengths else [0]
        begin, middle, behind, end = sorted(int(x) for x in rng.integers(0, cu[-1] + 2, 4))
        bounds = [(begin, middle), (behind, end)]
        all_rows = bool(draw % 2)
        cut = distributed.sequence_cut(make(cu), make(bounds), all_rows=all_rows)
        cut = cut._replace(**{name: value.tolist() for name, value in cut._asdict().items()})
        local = [n for part in slow_cut(cu, bounds) for n in part if n is not None]
        found = [n for row, n in enumerate(cut.sequences) for _ in range(cut.local_cu_seqlens[row + 1] - cut.local_cu_seqlens[row])]
        assert found == local, draw
        for p, (part, (first, last)) in enumerate(zip(slow_cut(cu, bounds), bounds)):
            tokens = [n for n in part if n is not None]
            enters = bool(tokens) and cu[tokens[0]] < first
            leaves = bool(tokens) and cu[tokens[-1] + 1] > last
            assert (cut.enters[p], cut.leaves[p]) == (enters, leaves)
            assert cut.through[p] == (enters and leaves and tokens[0] == tokens[-1])
            assert cut.halo_tokens[p] == (first - cu[tokens[0]] if enters else 0)
            assert (cut.rows[p][0] >= 0) == bool(tokens)
            assert cut.entering_rows[p] == (cut.rows[p][0] if enters else -1)
            assert cut.leaving_rows[p] == (cut.rows[p][1] if leaves else -1)


def test_fields_of_a_context_are_fla_s():
    """What FLA's own test asks of its function."""
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12]), group(3, 1))
    assert context.cu_seqlens_cpu.tolist() == context.cu_seqlens.tolist() == [0, 1, 4]
    assert context.cu_seqlens.dtype == torch.int32
    assert (context.pre_num_conv_tokens, context.pre_num_ranks, context.post_num_ranks) == (4, 1, 1)
    assert not context.is_first_rank and not context.is_last_rank and context.is_inter and context.num_seqs == 2
    assert context.sequences.tolist() == [0, 1]
    assert context.starts_here.tolist() == [False, True] and context.ends_here.tolist() == [True, False]


def test_fields_of_a_zigzag_context_are_fla_s():
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12, 16]), group(2, 0), layout="zigzag")
    assert context.layout == "zigzag" and context.part_len == 4 and context.front_num_seqs == 1
    assert context.cu_seqlens.tolist() == [0, 4, 8]
    assert context.pre_num_ranks_by_part == (0, 0) and context.post_num_ranks_by_part == (1, 0)
    assert context.is_first_by_part == (True, True) and context.is_last_by_part == (False, True)
    assert context.pre_num_conv_tokens_by_part == (0, 0)


@pytest.mark.parametrize("total, world, layout, says", [
    (10, 3, "contiguous", r"`total_tokens` \(10\) must be divisible by `world_size` \(3\)"),
    (2, 3, "contiguous", r"`total_tokens` \(2\) must be at least `world_size` \(3\)"),
    (14, 4, "zigzag", r"`total_tokens` \(14\) must be divisible by `2 \* world_size` \(8\)"),
    (3, 2, "zigzag", r"`total_tokens` \(3\) must be at least `2 \* world_size` \(4\)")])
def test_equal_shares_must_divide(total, world, layout, says):
    with pytest.raises(ValueError, match=says):
        flash_qla.build_cp_context(torch.tensor([0, total]), group(world, 0), layout=layout)


REFUSALS = {
    "rank_tokens of another group": (dict(rank_tokens=[4, 4]), r"the length of rank_tokens \(2\) must be the number of ranks \(3\)"),
    "too few tokens": (dict(rank_tokens=[4, 4, 3]), r"the sum of rank_tokens \(11\) must be at least the last of cu_seqlens \(12\)"),
    "negative tokens": (dict(rank_tokens=[14, -4, 2]), r"rank_tokens\[1\] \(-4\) must be"),
    "three halves": (dict(rank_tokens=[(4, 4, 4), 0, 0], layout="zigzag"), r"rank_tokens\[0\] \(\(4, 4, 4\)\) must be"),
    "layout": (dict(layout="ring"), r"layout \('ring'\) must be"),
    "exchange": (dict(exchange="mail"), r"exchange \('mail'\) must be"),
    "offsets that go back": (dict(cu_seqlens=[0, 7, 5, 12]), r"cu_seqlens\[2\] \(5\) must not be below cu_seqlens\[1\] \(7\)"),
    "offsets not from zero": (dict(cu_seqlens=[1, 12]), r"cu_seqlens\[0\] \(1\) must be 0"),
    "other offsets on the host": (dict(cu_seqlens_cpu=[0, 12]), r"cu_seqlens_cpu.shape\[0\] \(2\) must be that of cu_seqlens \(3\)"),
    "all rows of a batch": (dict(cu_seqlens=None, all_rows=True), r"all_rows \(True\) must come with cu_seqlens"),
    "zigzag of a batch": (dict(cu_seqlens=None, layout="zigzag"), r"layout \('zigzag'\) must come with cu_seqlens"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_context_that_cannot_be_built(name):
    changes, says = REFUSALS[name]
    arguments = dict(cu_seqlens=[0, 5, 12], group=group(3, 0)) | changes
    if arguments["cu_seqlens"] is not None:
        arguments["cu_seqlens"] = torch.tensor(arguments["cu_seqlens"])
    with pytest.raises(ValueError, match=f"^build_cp_context: {says}"):
        flash_qla.build_cp_context(**arguments)


def test_a_call_must_have_the_tokens_of_its_rank():
    x = helpers.make_inputs(T=5, Hq=1, Hv=1, K=8)
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12]), group(3, 1))
    with pytest.raises(ValueError, match=r"q.shape\[1\] \(5\) must be the tokens that cp_context gives this rank \(4\)"):
        helpers.call(x.replace(initial_state=None), cp_context=context)
    batch = helpers.make_inputs(B=2, T=4, Hq=1, Hv=1, K=8)
    with pytest.raises(ValueError, match=r"q.shape\[0\] \(2\) must be 1 with the cu_seqlens of cp_context"):
        helpers.call(batch.replace(initial_state=None), cp_context=context)


def test_a_refusal_comes_before_any_gather():
    """The group has no all_gather(): a call that came to it would fail in another way."""
    x = helpers.make_inputs(T=4, Hq=1, Hv=2, K=8)
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12]), group(3, 1))
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule: v.dtype \(bfloat16\) must be that of q"):
        helpers.call(x.replace(initial_state=None, v=x.v.bfloat16()), cp_context=context)


def test_explain_exchanges_nothing():
    x = helpers.make_inputs(T=4, Hq=1, Hv=2, K=8)
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12]), group(3, 1))
    text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, cp_context=context)
    assert text.startswith("path: ") and "workspace: " in text


@pytest.mark.cpu_only
def test_arrays_and_several_cards():
    x = helpers.make_inputs(T=4, Hq=1, Hv=2, K=8, grads=False)
    context = flash_qla.build_cp_context(torch.tensor([0, 5, 12]), group(3, 1))
    arrays = [t.numpy() for t in (x.q, x.k, x.v, x.g, x.beta)]
    with pytest.raises((NotImplementedError, TypeError), match="^chunk_gated_delta_rule: "):
        flash_qla.chunk_gated_delta_rule(*arrays, cp_context=context)


def test_refresh_needs_shapes_that_depend_on_no_offsets():
    offsets = torch.tensor([0, 5, 12])
    with pytest.raises(ValueError, match=r"^refresh: all_rows \(False\) must be True"):
        flash_qla.build_cp_context(offsets, group(3, 0)).refresh(offsets)
    context = flash_qla.build_cp_context(offsets, group(3, 0), all_rows=True)
    with pytest.raises(ValueError, match=r"^refresh: cu_seqlens.shape \(\(2,\)\) must be that of the context \(\(3,\)\)"):
        context.refresh(torch.tensor([0, 12]))
    kept = context.copy_for_backward()
    context.refresh(torch.tensor([0, 3, 12]))
    assert context.cu_seqlens.tolist() == [0, 3, 4] and kept.cu_seqlens.tolist() == [0, 4, 4]
    assert context.ends_here.tolist() == [True, False] and kept.ends_here.tolist() == [False, False]


# --- summaries ---

def _parts(x, first, last):
    """A rank's one part: the tokens [first, last) of the whole batch row, in its own tensors."""
    def tokens(t):
        return None if t is None else t[:, first:last]

    return x.replace(q=tokens(x.q), k=tokens(x.k), v=tokens(x.v), g=tokens(x.g), beta=tokens(x.beta), do=tokens(x.do))


def _flags(device, *values):
    return [torch.tensor([value], device=device) for value in values]


OPTIONS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "allow_neg_eigval", "state_v_first", "auto_cp")


def _summaries(x, rows, leaves, through, enters):
    options = {name: value for name, value in x.options.items() if name in OPTIONS}
    common = dict(cu_seqlens=x.cu_seqlens, A_log=x.A_log, dt_bias=x.dt_bias, **options)
    forward = distributed.chunk_summary(x.k, x.v, x.g, x.beta, rows, leaves, through, initial_state=x.initial_state, **common)
    backward = distributed.chunk_summary_backward(x.q, x.k, x.g, x.beta, x.do, rows, enters, through, forward, dht=x.dht,
                                                  scale=x.options.get("scale"), **common)
    return forward, backward


LINKS = {"plain": {}, "in-kernel": dict(raw=True), "negative eigenvalues": dict(raw=True, allow_neg_eigval=True),
         "v first": dict(state_v_first=True), "scale": dict(scale=0.3), "strides": {}}


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_a_link_says_what_a_state_becomes(name, dtype, device):
    """S_out = M S_in + S and dS_left = M^T dS_right + R, against the recurrence from two states."""
    if dtype not in helpers.DEVICE_DTYPES[device]:
        pytest.skip("fp64 is for the CPU")
    x = helpers.make_inputs(T=100, Hq=1, Hv=2, K=12, V=10, dtype=dtype, **LINKS[name])
    if name == "strides":
        x = x.replace(k=x.k.transpose(1, 2).contiguous().transpose(1, 2), v=torch.cat((x.v, x.v), -1)[..., ::2])
    rows = torch.zeros((1, 2), dtype=torch.int64, device=x.q.device)
    yes = torch.tensor([True], device=x.q.device)
    forward, backward = _summaries(x, rows, yes, yes, yes)
    assert forward.kind.tolist() == backward.kind.tolist() == [[AFFINE, AFFINE]]
    S, M, R = (helpers.to_numpy(t)[0] for t in (forward.S, forward.M, backward.S))
    want = helpers.reference(x)
    k_first = (lambda t: np.swapaxes(t, -1, -2)) if x.options.get("state_v_first") else lambda t: t
    bound = helpers.bound_for("final_state", dtype)
    h0, dht = (k_first(helpers.to_numpy(t)[0]) for t in (x.initial_state, x.dht))
    helpers.assert_close("final_state", M @ h0 + S, k_first(want["final_state"][0]), bound, 0)
    helpers.assert_close("dh0", np.swapaxes(M, -1, -2) @ dht + R, k_first(want["dh0"][0]), helpers.bound_for("dh0", dtype), 0)
    assert not forward.packed[..., -3:].any() and not backward.packed[..., -3:].any()


def test_links_of_other_kinds(device):
    """Of a part without tokens, of one that no sequence leaves, and of one in which the last sequence begins."""
    x = helpers.make_inputs(seqlens=[30, 50], Hq=1, Hv=2, K=8, V=6)
    rows = torch.tensor([[-1, -1], [0, 1], [0, 1], [7, 9]], device=x.q.device)
    no, yes = False, True
    leaves, through, enters = (torch.tensor(flags, device=x.q.device) for flags in
                               ([no, no, yes, yes], [no, no, no, yes], [no, no, yes, yes]))
    forward, backward = _summaries(x, rows, leaves, through, enters)
    assert forward.kind[:, 0].tolist() == backward.kind[:, 0].tolist() == [NONE, CONSTANT, CONSTANT, NONE]
    want = helpers.reference(x)
    helpers.assert_close("final_state", forward.S[2], want["final_state"][1], 1e-5, 0)
    helpers.assert_close("dh0", backward.S[2], want["dh0"][0], 1e-5, 0)
    for links in (forward, backward):
        assert not links.M.any() and not links.S[[0, 1, 3]].any()


def test_what_is_forgotten_is_one_decision(device):
    """A head forgets where its state has decayed at the end and its gradient at the start; else nothing is dropped."""
    x = helpers.make_inputs(T=320, Hq=1, Hv=4, K=8, V=6)
    x.g[:] = 0.0
    x.g[:, :64, [1, 3]] = -20 / 64  # e^-20 in the first chunk
    x.g[:, 256:, [2, 3]] = -20 / 64  # and in the last
    x.g[:, 64:128, [1, 2]] = 6 / 64  # growth, which leaves e^-14 of it all: the state or the gradient is not forgotten
    rows, yes = torch.zeros((1, 2), dtype=torch.int64, device=x.q.device), torch.tensor([True], device=x.q.device)
    forward, backward = _summaries(x.with_options(auto_cp=True), rows, yes, yes, yes)
    assert forward.kind.tolist() == backward.kind.tolist() == [[AFFINE, AFFINE, AFFINE, CONSTANT]]
    want = helpers.reference(x.replace(initial_state=torch.zeros_like(x.initial_state), dht=torch.zeros_like(x.dht)))
    # float32, and what is forgotten of the tokens before the window
    helpers.assert_close("final_state", forward.S[0], want["final_state"][0], 1e-5, 0)
    helpers.assert_close("dh0", backward.S[0], want["dh0"][0], 1e-5, 0)
    kept, _ = _summaries(x.with_options(auto_cp=False), rows, yes, yes, yes)
    assert kept.kind.tolist() == [[AFFINE] * 4]


def test_a_tolerance_of_less_forgets_later(device):
    x = helpers.make_inputs(T=64, Hq=1, Hv=1, K=8, V=6)
    x.g[:] = -20.0 / 64
    rows, yes = torch.zeros((1, 2), dtype=torch.int64, device=x.q.device), torch.tensor([True], device=x.q.device)
    kinds = [distributed.chunk_summary(x.k, x.v, x.g, x.beta, rows, yes, yes, cp_tolerance=tolerance).kind.item()
             for tolerance in (None, 1e-8, 1e-10)]
    assert kinds == [CONSTANT, CONSTANT, AFFINE]


def test_a_gate_of_nan_forgets_nothing(device):
    x = helpers.make_inputs(T=64, Hq=1, Hv=1, K=8, V=6)
    x.g[:] = -9.0
    x.g[:, 40] = torch.nan
    rows, yes = torch.zeros((1, 2), dtype=torch.int64, device=x.q.device), torch.tensor([True], device=x.q.device)
    links = distributed.chunk_summary(x.k, x.v, x.g, x.beta, rows, yes, yes)
    assert links.kind.item() == AFFINE and links.M.isnan().any()


# --- combine ---

def _random_links(rng, L, C=2, Hv=2, K=5, V=3):
    kinds = rng.integers(0, 3, (L, C, Hv))
    S, M = rng.standard_normal((L, C, Hv, K, V)), 0.5 * rng.standard_normal((L, C, Hv, K, K))
    M[kinds != AFFINE], S[kinds == NONE] = np.nan, np.nan  # nobody may read them
    return S, M, kinds.astype(np.float64)


def _chain(S, M, kinds, place, backward):
    """What enters at a place, one link after another."""
    L, C, Hv = kinds.shape
    state = np.zeros(S.shape[1:])
    for i in range(L - 1, place, -1) if backward else range(place):
        for c in range(C):
            for h in range(Hv):
                if kinds[i, c, h] == CONSTANT:
                    state[c, h] = S[i, c, h]
                elif kinds[i, c, h] == AFFINE:
                    state[c, h] = (M[i, c, h].T if backward else M[i, c, h]) @ state[c, h] + S[i, c, h]
    return state


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_summary_combine(kind, backward, device):
    if kind == "numpy" and device != "cpu":
        pytest.skip("numpy lies on the host")
    make = (lambda x: x) if kind == "numpy" else lambda x: torch.from_numpy(x).to(device)
    rng = np.random.default_rng(5)
    for draw in range(20):
        dtype = np.float32 if device != "cpu" or draw % 2 else np.float64
        S, M, kinds = (x.astype(dtype) for x in _random_links(rng, 6))
        place = rng.integers(-1, 6, 3) if backward else rng.integers(0, 7, 3)  # one of them is beyond the last link
        wanted = rng.integers(0, 2, 3).astype(bool)
        order = rng.permutation(6)
        shuffled = np.argsort(order)  # row r of what is handed in is the link of place shuffled[r]
        links = distributed.Links(*(make(np.ascontiguousarray(x[shuffled])) for x in (S, M, kinds)))
        state = distributed.summary_combine(links, make(place), make(wanted), order=make(order), backward=backward)
        for p in range(3):
            want = _chain(S, M, kinds, place[p], backward) if wanted[p] else np.zeros(S.shape[1:])
            np.testing.assert_allclose(np.asarray(state[p].cpu() if kind == "torch" else state[p]), want,
                                       rtol=0, atol=1e-12 if dtype == np.float64 else 1e-4)


@pytest.mark.parametrize("backward", [False, True])
def test_links_of_one_machine_compose(backward, device):
    dtype = torch.float64 if device == "cpu" else torch.float32
    rng = np.random.default_rng(6)
    for _ in range(10):
        links = distributed.Links(*(torch.from_numpy(x).to(device, dtype) for x in _random_links(rng, 6)))
        halves = [distributed.compose_links(distributed.Links(*(x[part] for x in links[:3])), backward=backward)
                  for part in (slice(0, 3), slice(3, 6))]
        machines = distributed.Links(*(torch.stack([half[i] for half in halves]) for i in range(3)))
        whole = distributed.summary_combine(links, torch.tensor([2 if backward else 3], device=device), backward=backward)
        found = distributed.summary_combine(machines, torch.tensor([0 if backward else 1], device=device), backward=backward)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-4)


@pytest.mark.cpu_only
def test_arrays_make_the_links_that_tensors_make():
    x = helpers.make_inputs(T=70, Hq=1, Hv=2, K=8, V=6, dtype=torch.float32)
    rows, yes = torch.zeros((1, 2), dtype=torch.int64), torch.tensor([True])
    forward, backward = _summaries(x, rows, yes, yes, yes)
    arrays = {name: getattr(x, name).numpy() for name in ("q", "k", "v", "g", "beta", "do", "initial_state", "dht")}
    given = (rows.numpy(), yes.numpy(), yes.numpy())
    found = distributed.chunk_summary(arrays["k"], arrays["v"], arrays["g"], arrays["beta"], *given,
                                      initial_state=arrays["initial_state"])
    back = distributed.chunk_summary_backward(arrays["q"], arrays["k"], arrays["g"], arrays["beta"], arrays["do"], *given, found,
                                              dht=arrays["dht"])
    for ours, theirs in zip((*forward[:3], *backward[:3]), (*found[:3], *back[:3])):
        assert isinstance(theirs, np.ndarray) and np.array_equal(ours.numpy(), theirs)


def test_a_gathered_buffer_is_read_in_place(device):
    """Links of several ranks, as they lie behind each other in what a collective has written."""
    x = helpers.make_inputs(T=128, Hq=1, Hv=2, K=8, V=6)
    links = []
    for rank in range(2):
        part = _parts(x, 64 * rank, 64 * rank + 64)
        rows = torch.zeros((1, 2), dtype=torch.int64, device=x.q.device)
        yes, through = torch.tensor([True], device=x.q.device), torch.tensor([rank > 0], device=x.q.device)
        links.append(distributed.chunk_summary(part.k, part.v, part.g, part.beta, rows, yes, through,
                                               initial_state=x.initial_state if rank == 0 else None))
    gathered = torch.stack([link.packed for link in links])  # [ranks, P = 1, Hv, row]
    state = distributed.summary_combine(distributed.unpack_links(gathered, 8, 6), torch.tensor([1], device=x.q.device))
    _, want, _ = oracle.forward(*(helpers.to_numpy(t)[:, :64] for t in (x.q, x.k, x.v, x.g, x.beta)),
                                initial_state=helpers.to_numpy(x.initial_state))
    helpers.assert_close("state", state[0, 0], want[0], 1e-5, 0)


@pytest.mark.parametrize("K, dtype, on_hopper", [
    (128, torch.bfloat16, "sm90"), (128, torch.float16, "sm90"), (64, torch.bfloat16, "sm80"), (64, torch.float32, "cuda_generic")],
    ids=str)
def test_the_fastest_path_makes_the_links(K, dtype, on_hopper, device):
    """No result would tell: kernels that step through tokens make the same links."""
    x = helpers.make_inputs(T=130, Hq=1, Hv=2, K=K, dtype=dtype)
    rows, crosses = torch.tensor([[0, 0]], device=device), torch.tensor([True], device=device)
    with _ffi.explaining() as texts:
        links = distributed.chunk_summary(x.k, x.v, x.g, x.beta, rows, crosses, crosses)
        distributed.chunk_summary_backward(x.q, x.k, x.g, x.beta, x.do, rows, crosses, crosses, links)
    hopper = device == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    expected = "cpu" if device == "cpu" else on_hopper if hopper else on_hopper.replace("sm90", "sm80")
    assert [text.splitlines()[0] for text in texts] == [f"path: {expected}"] * 2
