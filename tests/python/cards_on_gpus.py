"""What the ranks of test_cards_gpus.py compute: functions that every process of an NCCL group runs, with a GPU of its own."""

from __future__ import annotations

import os

import cards
import cards_on_ranks
import helpers
import torch

import flash_qla


def local_of(rank, case, cut):
    """This rank's context, share and inputs."""
    x = cards_on_ranks.inputs_of(case)
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group, **cut)
    share = cards.share_of(context, x, cut.get("rank_tokens"))
    return context, share, cards.local_inputs(x, share)


def differing(rank, case, cut, runs):
    """The tensors that differ in bits from the first of so many calls, forward and backward."""
    context, _, x = local_of(rank, case, cut)
    first = helpers.run(x, cp_context=context)
    differ = set()
    for _ in range(runs - 1):
        again = helpers.run(x, cp_context=context)
        differ |= {name for name, value in first.items() if not torch.equal(value, again[name])}
    return differ


def captured(rank, case, changes):
    """A forward and a backward pass in a graph, replayed with other lengths and gates, [(lengths, gate), ..]: for each this
    rank's share and results."""
    context, share, x = local_of(rank, case, dict(all_rows=True))
    graph, found = helpers.captured(lambda: helpers.run(x, cp_context=context))
    answers = []
    for lengths, gate in changes:
        context.refresh(helpers.offsets(lengths))
        x.g[..., 1] = gate
        for value in found.values():
            value.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        answers.append(cards_on_ranks.brought(share, found))
    return answers


def fails(rank, case, how):
    """A call that all ranks make, then one that rank 1 does not come to."""
    context, _, x = local_of(rank, case, {})
    helpers.call(x, cp_context=context)
    torch.cuda.synchronize()
    if rank.rank == 1:
        if how == "dies":
            os._exit(3)
        return None  # never comes
    helpers.call(x, cp_context=context)
    torch.cuda.synchronize()
    return "an answer without rank 1"


def of_other_streams(rank, case, cut):
    """A call in a stream of its own, behind work that makes its inputs there: this rank's share and results."""
    context, share, x = local_of(rank, case, cut)
    late = x.replace(v=torch.full_like(x.v, float("nan")))
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.v.copy_(x.v)
        found = helpers.run(late, cp_context=context)
    stream.synchronize()
    return cards_on_ranks.brought(share, found)
