"""Streams of tokens cut over simulated ranks: one process computes them one after another.

A gather of a simulated group gives what every rank has handed in so far, and zeros for those that have not come yet. The links of
a call do not depend on what a rank has received, so that in a second round every rank receives the right ones. That is how the
same cases run on one GPU, where ranks as threads would wait for each other in autograd's only thread of a device.
"""

from __future__ import annotations

import dataclasses

import helpers
import torch

import flash_qla


class Loop:
    """Ranks of one process. `corrupt`: a function that changes what a gather gives (its number in the call, tensor)."""

    def __init__(self, world, corrupt=None):
        self.world, self.corrupt = world, corrupt
        self.sent = {}  # (number of the gather in a rank's calls, rank) -> tensor
        self.gathers = [0] * world

    def group(self, rank):
        return Member(self, rank)

    def start(self, rank):
        """A rank begins anew: its next gather is the first one of its calls."""
        self.gathers[rank] = 0


class Member:
    """What a rank knows of its group: all that cp_context asks of one."""

    def __init__(self, loop, rank):
        self._loop, self._rank = loop, rank

    def rank(self):
        return self._rank

    def size(self):
        return self._loop.world

    def all_gather(self, x):
        loop = self._loop
        number = loop.gathers[self._rank]
        loop.gathers[self._rank] += 1
        loop.sent[number, self._rank] = x.detach().clone()
        gathered = torch.stack([loop.sent.get((number, rank), torch.zeros_like(x)) for rank in range(loop.world)])
        return gathered if loop.corrupt is None else loop.corrupt(number, gathered)


@dataclasses.dataclass
class Share:
    """What one rank has of a stream: its tokens among the stream's, and its rows among the sequences."""

    tokens: torch.Tensor  # [T of the rank]
    rows: torch.Tensor  # [R]


def share_of(context, x, rank_tokens=None):
    """The share of a context of this package. `x`: the whole stream's inputs."""
    device = x.q.device
    if context.cut is not None:
        spans = [context.cut.bounds[place] for place in context.cut.places]
        rows = context.sequences
    else:
        lengths = rank_tokens or [x.q.shape[1] // context.ranks.size] * context.ranks.size
        begin = sum(lengths[:context.ranks.rank])
        spans, rows = [(begin, begin + lengths[context.ranks.rank])], torch.arange(x.q.shape[0], device=device)
    return Share(torch.cat([torch.arange(*span, device=device) for span in spans]), rows.to(device))


def local_inputs(x, share):
    """A rank's own inputs and incoming gradients."""
    def tokens(t):
        return None if t is None else t[:, share.tokens].contiguous()

    def states(t):
        return None if t is None else t[share.rows].contiguous()

    return x.replace(q=tokens(x.q), k=tokens(x.k), v=tokens(x.v), g=tokens(x.g), beta=tokens(x.beta), do=tokens(x.do),
                     initial_state=states(x.initial_state), dht=states(x.dht), cu_seqlens=None)


# Results that have a row a token, in the stream's own tokens; the others are states, or sums over all tokens.
PER_TOKEN = ("o", "dq", "dk", "dv", "dg", "dbeta")
STATES = ("final_state", "dh0")


def merge(x, shares, results):
    """The whole stream's results from those of its ranks: tokens in their places, everything else added up."""
    N = x.num_sequences
    merged = {}
    for name in results[0]:
        parts = [result[name] for result in results]
        if name in PER_TOKEN:
            whole = parts[0].new_zeros((x.q.shape[0], x.q.shape[1], *parts[0].shape[2:]))
            for share, part in zip(shares, parts):
                whole[:, share.tokens] = part
        elif name in STATES:
            whole = parts[0].new_zeros((N, *parts[0].shape[1:]), dtype=torch.promote_types(parts[0].dtype, torch.float32))
            for share, part in zip(shares, parts):
                whole.index_add_(0, share.rows, part.to(whole.dtype))
            whole = whole.to(parts[0].dtype)
        else:
            whole = torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)
        merged[name] = whole
    return merged


def simulate(x, world, grads=True, corrupt=None, contexts=None, rounds=2, **arguments):
    """Results of a stream over simulated ranks, merged. `arguments`: of build_cp_context(); `contexts`: built before."""
    loop = Loop(world, corrupt)
    if contexts is None:
        contexts = [flash_qla.build_cp_context(x.cu_seqlens, loop.group(rank), **arguments) for rank in range(world)]
    shares = [share_of(context, x, arguments.get("rank_tokens")) for context in contexts]
    results = [None] * world
    for _ in range(rounds):
        for rank, (context, share) in enumerate(zip(contexts, shares)):
            loop.start(rank)
            results[rank] = helpers.run(local_inputs(x, share), grads, cp_context=context)
    return merge(x, shares, results)


def check(x, world, grads=True, only=None, bounds=None, oracle=helpers.reference, **arguments):
    """simulate(), held to the oracle. Returns (results, errors)."""
    got = simulate(x, world, grads, **arguments)
    return got, helpers.compare(got, oracle(x, grads), x.dtype, only, bounds)


def draw_cut(rng, total, parts, borders):
    """Lengths of `parts` parts of a stream, cut anywhere: on borders of sequences, a token beside them, within chunks."""
    cuts = []
    for _ in range(parts - 1):
        kind = rng.integers(4)
        near = int(rng.choice(borders)) + int(rng.choice([-65, -64, -63, -1, 1, 63, 64, 65]))
        cut = [int(rng.integers(total + 1)), int(rng.choice(borders)), near, int(rng.choice([0, total]))][kind]
        cuts.append(min(max(cut, 0), total))
    cuts = [0, *sorted(cuts), total]
    return [end - begin for begin, end in zip(cuts, cuts[1:])]


def rank_tokens(lengths, world, layout):
    """rank_tokens of build_cp_context() for parts of these lengths, in the stream's order."""
    if layout == "contiguous":
        return lengths
    return [(lengths[rank], lengths[2 * world - 1 - rank]) for rank in range(world)]
