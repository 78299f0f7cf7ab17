"""Requirement 3, swept: dg and dbeta of the Hopper backward, by length, decay, final state's gradient and auto_cp.

dg and dbeta are one inner product of rounded factors for each token and head. Where few tokens decide (strong decay, short
sequences, a gradient of the final state that reaches a few of them) the roundings do not average out. `--table FILE` writes the
worst head of each case as JSON.
"""

import functools
import itertools
import json

import helpers
import pytest
import torch
from helpers import make_inputs

pytestmark = pytest.mark.requirement(3)

TOKENS = [65, 128, 200, 300, 512, 1000, 4096]
# A of g = -A softplus(..), as models draw it, or the gates of the other requirements: a quarter of the heads has none.
GATES = [0.01, 1.0, 16.0, "usual"]
SEEDS = {torch.bfloat16: range(8), torch.float16: range(2)}


@functools.lru_cache(maxsize=8)
def drawn(T, dtype, seed):
    return make_inputs(T=T, Hq=2, Hv=4, K=128, dtype=dtype, seed=seed)


def case(T, gates, with_dht, dtype, seed):
    x = drawn(T, dtype, seed)
    if gates != "usual":
        generator = torch.Generator().manual_seed(seed)
        raw = torch.randn(1, T, 4, generator=generator) + torch.randn(4, generator=generator)
        x = x.replace(g=(-gates * torch.nn.functional.softplus(raw)).to(x.g))
    return x if with_dht else x.replace(dht=None)


@functools.lru_cache(maxsize=1)
def references(T, gates, with_dht, dtype):
    """The references of all seeds: one call, of a batch."""
    cases = [case(T, gates, with_dht, dtype, seed) for seed in SEEDS[dtype]]
    names = [name for name in (*helpers.Inputs.DIFFERENTIABLE, "do", "dht") if getattr(cases[0], name) is not None]
    batch = cases[0].replace(**{name: torch.cat([getattr(x, name) for x in cases]) for name in names})
    found = helpers.library_reference(batch)
    return [{name: value[i:i + 1] for name, value in found.items()} for i in range(len(cases))]


def worst_head(name, got, want):
    """The relative error of the worst head that has a norm to be relative to."""
    axis = helpers.TENSORS[name][1]
    pairs = [helpers.relative_error(a.double(), b) for a, b in zip(got.unbind(axis), want.unbind(axis))]
    return max((error for error, absolute in pairs if not absolute), default=0.0)


@pytest.mark.path("sm90", operations=("chunk_forward",))
@pytest.mark.parametrize(
    "T, dtype, gates, with_dht, auto_cp", list(itertools.product(TOKENS, SEEDS, GATES, [True, False], [True, False])), ids=str)
def test_gradients_by_cause(T, dtype, gates, with_dht, auto_cp, paths, request):
    failures, worst = [], dict.fromkeys(("dg", "dbeta"), 0.0)
    # auto_cp=True goes by the whole call: a seed is a call of its own.
    for seed, want in zip(SEEDS[dtype], references(T, gates, with_dht, dtype)):
        got = helpers.run(case(T, gates, with_dht, dtype, seed), auto_cp=auto_cp)
        for name in want:
            try:
                helpers.compare(got, want, dtype, only=[name])
            except AssertionError as error:
                failures.append(f"seed {seed}: {error}")
        worst = {name: max(value, worst_head(name, got[name], want[name])) for name, value in worst.items()}
    backward = {c.path for c in paths.calls if c.operation == "chunk_backward" and c.named == paths.named}
    row = dict(
        tokens=T, dtype=helpers.dtype_name(dtype), gates=str(gates), dht=with_dht, auto_cp=auto_cp, seeds=len(SEEDS[dtype]),
        path="/".join(sorted(backward)), dg=round(worst["dg"], 6), dbeta=round(worst["dbeta"], 6), failures=len(failures))
    request.node.user_properties.append(("gradients", json.dumps(row)))
    assert not failures, "\n".join(failures)
