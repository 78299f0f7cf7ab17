"""Streams of tokens cut over several GPUs, by NCCL: what the CPU's groups (test_cards_processes.py) cannot show."""

import time

import cards
import cards_on_gpus
import cards_on_ranks
import helpers
import numpy as np
import processes
import pytest
import torch
from test_cards_processes import held_to_one_rank, whole

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def ranks():
    with processes.Processes(8) as found:
        yield found


# What the fastest kernels take.
CASE = dict(Hq=2, Hv=4, K=128, seqlens=[700, 0, 324, 1], dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=helpers.dtype_name)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("options", [{}, dict(raw=True, state_v_first=True)], ids=["plain", "raw"])
def test_random_cuts(ranks, dtype, layout, options):
    rng = np.random.default_rng(0)
    borders = np.concatenate([[0], np.cumsum(CASE["seqlens"])])
    for world in range(2, ranks.size + 1):
        parts = cards.draw_cut(rng, int(borders[-1]), world * (1 if layout == "contiguous" else 2), borders)
        cut = dict(layout=layout, rank_tokens=cards.rank_tokens(parts, world, layout))
        held_to_one_rank(ranks, world, dict(CASE, dtype=dtype, **options), cut)


def errors_beside_one_card(ranks, case):
    """By name: the error over two ranks in that of one card, of all heads together, and what it may be."""
    x = whole(case)
    got = cards.merge(x, *zip(*ranks.run(cards_on_ranks.results, 2, case, {})))
    alone = {name: value.cpu() for name, value in helpers.run(cards_on_ranks.inputs_of(case)).items()}
    for name, want in helpers.library_reference(x).items():
        error, of_one = ((found[name].double() - want).norm() / want.norm() for found in (got, alone))
        yield name, float(error / of_one), 1.3 if name == "dg" else 1.1


def test_the_error_is_that_of_one_card(ranks):
    for name, times, most in errors_beside_one_card(ranks, dict(CASE, seqlens=[4096])):
        assert times <= most, (name, times)


def test_the_error_of_many_heads_is_that_of_one_card(ranks):
    """Of one head without decay dg's errors are a few draws, by chance larger or smaller than those of one card; of eight such
    heads chance says little (docs/numerics.md)."""
    for name, times, most in errors_beside_one_card(ranks, dict(CASE, Hq=16, Hv=32, seqlens=[4096])):
        assert times <= most, (name, times)


@pytest.mark.parametrize("cut", [{}, dict(layout="zigzag"), dict(rank_tokens=[1000, 24])], ids=str)
def test_a_thousand_calls_have_the_same_bits(ranks, cut):
    for _ in range(10):  # no answer takes longer than processes.ANSWER_TIMEOUT
        assert ranks.run(cards_on_gpus.differing, 2, dict(CASE, seqlens=[700, 1, 323]), cut, 101) == [set(), set()]


def test_a_graph_with_refreshed_lengths_and_gates(ranks):
    changes = [([700, 0, 324, 0], -0.01), ([0, 1024, 0, 0], -1.0), ([1024, 0, 0, 0], 0.0), ([511, 2, 1, 510], -0.5), ([0, 0, 0, 0], 0.0)]
    case = dict(CASE, seqlens=changes[0][0])
    answers = ranks.run(cards_on_gpus.captured, 2, case, changes)
    for (lengths, gate), found in zip(changes, zip(*answers)):
        x = whole(case).replace(cu_seqlens=helpers.offsets(lengths, device="cpu"))
        x.g[..., 1] = gate
        helpers.compare(cards.merge(x, *zip(*found)), helpers.reference(x), x.dtype)


def test_another_stream(ranks):
    x = whole(CASE)
    found = ranks.run(cards_on_gpus.of_other_streams, 2, CASE, dict(rank_tokens=[512, 513]))
    helpers.compare(cards.merge(x, *zip(*found)), helpers.reference(x), x.dtype)


@pytest.mark.parametrize("how", ["dies", "never comes"])
def test_a_rank_that_fails_leaves_nobody_waiting(how):
    """torch.distributed's watchdog ends the others by the group's time-out: an error, or the process."""
    with processes.Processes(2, timeout=10) as ranks:
        start = time.monotonic()
        found = ranks.answers(cards_on_gpus.fails, 2, dict(CASE, seqlens=[90], grads=False), how)
        elapsed = time.monotonic() - start
        ranks.kill()
    assert found[1][0] == ("gone" if how == "dies" else "ok")
    assert found[0][0] in ("gone", "error"), found[0]
    assert elapsed < 50
