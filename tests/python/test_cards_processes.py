"""Streams of tokens cut over the ranks of torch.distributed groups: gloo processes on the CPU, and with --device cuda NCCL
processes with a GPU each, as many as there are."""

import time

import cards
import cards_on_ranks
import helpers
import numpy as np
import processes
import pytest
import torch
from test_cards import STREAMS

pytestmark = pytest.mark.early


@pytest.fixture(scope="module")
def ranks():
    with processes.Processes(4) as found:
        yield found


CASE = dict(Hq=1, Hv=2, K=8, V=6)


def whole(case):
    """The whole stream on the CPU."""
    return cards_on_ranks.inputs_of({**case, "device": "cpu"})


def fitted(ranks, world, cut):
    """The same stream on fewer ranks, where there are not as many: the last one has what the missing ones would."""
    fewer, tokens = min(world, ranks.size), cut.get("rank_tokens")
    if tokens is None or fewer == world:
        return fewer, cut
    rest = tokens[fewer - 1:]
    return fewer, {**cut, "rank_tokens": [*tokens[:fewer - 1], sum(rest) if isinstance(rest[0], int) else tuple(map(sum, zip(*rest)))]}


def held_to_one_rank(ranks, world, case, cut, function="call"):
    world, cut = fitted(ranks, world, cut)
    found = ranks.run(cards_on_ranks.results, world, case, cut, function)
    x = whole(case)
    got = cards.merge(x, *zip(*found))
    helpers.compare(got, helpers.reference(x), x.dtype)
    return got


@pytest.mark.parametrize("name", STREAMS)
def test_every_cut(ranks, name):
    lengths, padding, world, layout, rank_tokens = STREAMS[name]
    if world > 4:
        lengths, world, rank_tokens = [235], 4, [1, 63, 64, 107]
    held_to_one_rank(ranks, world, dict(CASE, seqlens=lengths, padding=padding), dict(layout=layout, rank_tokens=rank_tokens))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=helpers.dtype_name)
def test_dtypes_and_options(ranks, world, dtype):
    if dtype not in helpers.DEVICE_DTYPES[helpers.settings.device]:
        pytest.skip("no path on a GPU takes fp64")
    case = dict(CASE, seqlens=[100, 0, 140], dtype=dtype, raw=True, state_v_first=world % 2 == 0)
    held_to_one_rank(ranks, world, case, dict(layout="zigzag" if world == 3 else "contiguous"))


@pytest.mark.parametrize("seed", range(6))
def test_random_cuts(ranks, seed):
    rng = np.random.default_rng(seed)
    world, layout = 2 + seed % 3, ["contiguous", "zigzag"][seed // 3]
    lengths = [int(rng.integers(0, 120)) for _ in range(4)]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    parts = cards.draw_cut(rng, int(borders[-1]), world * (1 if layout == "contiguous" else 2), borders)
    cut = dict(layout=layout, rank_tokens=cards.rank_tokens(parts, world, layout), all_rows=bool(seed % 2))
    held_to_one_rank(ranks, world, dict(CASE, seqlens=lengths, seed=seed), cut)


def test_rows_of_a_batch(ranks):
    held_to_one_rank(ranks, 3, dict(CASE, B=2, T=90), {})


def test_a_huge_initial_state(ranks):
    case = dict(CASE, seqlens=[300])
    x = whole(case)
    assert x.initial_state.norm() < 100
    found = ranks.run(huge_results, ranks.size, case)
    x = huge(x)
    helpers.compare(cards.merge(x, *zip(*found)), helpers.reference(x), x.dtype)


def huge(x):
    x.g[:] = 0.0
    return x.replace(initial_state=x.initial_state * 1e4 / x.initial_state.norm())


def huge_results(rank, case):
    import flash_qla

    x = huge(cards_on_ranks.inputs_of(case))
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group)
    share = cards.share_of(context, x)
    return cards_on_ranks.brought(share, helpers.run(cards.local_inputs(x, share), cp_context=context))


@pytest.mark.parametrize("cut", [{}, dict(layout="zigzag"), dict(rank_tokens=[120, 20, 76])], ids=str)
def test_a_compiled_call_has_the_eager_bits(ranks, cut):
    case = dict(CASE, seqlens=[130, 86])  # which 2, 3 and 4 ranks divide, in halves as well
    compiled = held_to_one_rank(ranks, 3, case, cut, "compiled")
    eager = held_to_one_rank(ranks, 3, case, cut)
    for name, value in eager.items():
        helpers.assert_bitwise(name, compiled[name], value)


def test_checkpointing(ranks):
    case, cut = dict(CASE, seqlens=[130, 80]), {}
    again, once = (held_to_one_rank(ranks, 2, case, cut, function) for function in ("checkpointed", "call"))
    for name, value in once.items():
        helpers.assert_bitwise(name, again[name], value)


def test_autocast(ranks):
    case = dict(CASE, seqlens=[130, 80], grads=False)
    found = ranks.run(cards_on_ranks.autocast_results, 2, case, {})
    x = whole(case)
    rounded = x.replace(q=x.q.bfloat16(), k=x.k.bfloat16(), v=x.v.bfloat16())
    helpers.compare(cards.merge(x, *zip(*found)), helpers.reference(rounded, False), torch.bfloat16, only=("o",))


def test_one_gather_each_way_and_none_where_nothing_crosses(ranks):
    case = dict(CASE, seqlens=[100, 60, 80])
    row = 8 * (6 + 8) + 4
    assert ranks.run(cards_on_ranks.gathers_of, 2, case, {}) == [[(1, 2, row)] * 2] * 2
    assert ranks.run(cards_on_ranks.gathers_of, 2, case, dict(layout="zigzag")) == [[(2, 2, row)] * 2] * 2
    assert ranks.run(cards_on_ranks.gathers_of, 2, case, dict(rank_tokens=[100, 140])) == [[], []]


def test_serial_exchange_has_the_bits_of_one_rank(ranks):
    case = dict(CASE, seqlens=[320, 64], auto_cp=False)
    got = held_to_one_rank(ranks, 3, case, dict(exchange="serial", rank_tokens=[128, 192, 64]))
    alone = helpers.run(cards_on_ranks.inputs_of(case))
    for name in ("o", "final_state", "dh0"):
        helpers.assert_bitwise(name, got[name], alone[name].cpu())


@pytest.mark.parametrize("fields", [{}, dict(layout="zigzag")], ids=["contiguous", "zigzag"])
def test_contexts_of_fla_s_fields(ranks, fields):
    case = dict(CASE, seqlens=[70, 100, 70], state=False)
    found = ranks.run(cards_on_ranks.fla_context, 3, case, fields)
    x = whole(case)
    helpers.compare(cards.merge(x, *zip(*found)), helpers.reference(x), x.dtype)


# FLA's own cases of this test (lengths over ranks, width), at an eighth of their tokens; short tails on every rank.
HALOS = [([64, 64], 2, 4), ([65, 63], 2, 4), ([66, 62], 2, 4), ([33, 31, 33, 31], 4, 4), ([25, 40, 63], 2, 4), ([64, 1, 63], 2, 4),
         ([33, 29, 33, 33], 4, 4), ([33, 1, 29, 33, 1, 29, 2], 4, 4), ([128], 4, 1), ([5, 3], 4, 4), ([0, 60, 0, 68], 4, 2)]


@pytest.mark.parametrize("lengths, world, width", HALOS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_halo_of_a_convolution(ranks, lengths, world, width, layout):
    for error, of_gradient in ranks.run(cards_on_ranks.convolved, world, lengths, dict(layout=layout), width):
        assert error < 1e-12 and of_gradient < 1e-12


@pytest.mark.parametrize("tokens", [[1, 0, 2, 40], [3, 1, 1, 38], [0, 43, 0, 0]], ids=str)
def test_halo_over_several_short_ranks(ranks, tokens):
    for error, of_gradient in ranks.run(cards_on_ranks.convolved, 4, [30, 13], dict(rank_tokens=tokens), 5):
        assert error < 1e-12 and of_gradient < 1e-12


@pytest.mark.parametrize("change, says", [("heads", "v.shape[2] (4 on rank 1) must be that of the other ranks (2)"),
                                          ("option", "scale, by its check sum"), ("dtype", "the dtype of g")])
def test_a_check_names_the_rank_that_differs(ranks, change, says):
    found = ranks.run(cards_on_ranks.refused, 3, dict(CASE, seqlens=[90], grads=False), {}, change, True)
    assert all(text.startswith("ValueError: chunk_gated_delta_rule: ") and says in text and "on rank 1" in text for text in found)


def test_a_check_tells_everybody_of_a_refusal(ranks):
    found = ranks.run(cards_on_ranks.refused, 3, dict(CASE, seqlens=[90], grads=False), {}, "wrong", True)
    assert "beta.shape[1] (29) must be q.shape[1] (30)" in found[1]
    for rank in (0, 2):
        assert found[rank] == "ValueError: chunk_gated_delta_rule: rank 1 must not refuse the call (it did: see its own error)"


def test_a_check_lets_equal_calls_pass(ranks):
    assert ranks.run(cards_on_ranks.refused, 2, dict(CASE, seqlens=[90], grads=False), {}, "option", False) == [None, None]


@pytest.mark.cpu_only
@pytest.mark.parametrize("how", ["dies", "never comes"])
def test_a_rank_that_fails_is_an_error_everywhere(how):
    """Within the group's own time-out; no clock of this library's."""
    timeout = 3
    with processes.Processes(3, timeout=timeout) as ranks:
        start = time.monotonic()
        found = ranks.answers(cards_on_ranks.dies_or_waits, 3, dict(CASE, seqlens=[90], grads=False), how)
        elapsed = time.monotonic() - start
        ranks.kill()
    assert found[1][0] == ("gone" if how == "dies" else "ok")
    for rank in (0, 2):
        kind, value = found[rank]
        assert kind == "error" and value[0] == "RuntimeError", found[rank]
        assert value[1].startswith(f"chunk_gated_delta_rule: rank {rank} of 3, all-gather of forward links: "), value[1]
    assert elapsed < 2 * timeout + 10
