"""What the ranks of test_cards_processes.py compute: functions that every process of a group runs."""

from __future__ import annotations

import os

import cards
import helpers
import torch
import torch.distributed as distributed

import flash_qla
from flash_qla.distributed import conv_halo, with_halo, without_halo


def inputs_of(case):
    """The whole stream, the same on every rank."""
    return helpers.make_inputs(**case)


def results(rank, case, cut, function="call"):
    """This rank's share and results on the CPU, of a call in `function`'s way."""
    x = inputs_of(case)
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group, **cut)
    share = cards.share_of(context, x, cut.get("rank_tokens"))
    call = {"call": helpers.call, "compiled": compiled_call, "checkpointed": checkpointed_call}[function]
    return brought(share, helpers.run(cards.local_inputs(x, share), function=call, cp_context=context))


def brought(share, found):
    """To the CPU: a pipe would hand over memory of a GPU, which ends with this process."""
    share = cards.Share(share.tokens.cpu(), share.rows.cpu())
    return share, {name: value.cpu() for name, value in found.items()}


def compiled_call(x, **arguments):
    def step(*tensors):
        return helpers.call(x.replace(**dict(zip(x.DIFFERENTIABLE, tensors))), **arguments)

    torch._dynamo.reset()
    return torch.compile(step, fullgraph=True, backend="aot_eager")(*(getattr(x, name) for name in x.DIFFERENTIABLE))


def checkpointed_call(x, **arguments):
    from torch.utils.checkpoint import checkpoint

    def step(*tensors):
        return helpers.call(x.replace(**dict(zip(x.DIFFERENTIABLE, tensors))), **arguments)

    return checkpoint(step, *(getattr(x, name) for name in x.DIFFERENTIABLE), use_reentrant=False)


def autocast_results(rank, case, cut):
    """q, k and v of several dtypes under autocast, o alone."""
    x = inputs_of(case)
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group, **cut)
    share = cards.share_of(context, x)
    local = cards.local_inputs(x, share)
    with torch.autocast(x.q.device.type, torch.bfloat16), torch.no_grad():
        o, _ = helpers.call(local.replace(v=local.v.bfloat16()), cp_context=context)
    assert o.dtype == torch.bfloat16
    return brought(share, {"o": o})


def gathers_of(rank, case, cut):
    """How many collectives a forward and a backward pass make."""
    made = []
    name = "all_gather_single" if hasattr(distributed, "all_gather_single") else "all_gather_into_tensor"
    original = getattr(distributed, name)

    def counted(out, x, *rest, **named):
        made.append(tuple(x.shape))
        return original(out, x, *rest, **named)

    setattr(distributed, name, counted)
    try:
        results(rank, case, cut)
    finally:
        setattr(distributed, name, original)
    return made


def convolved(rank, lengths, cut, width, seed=0):
    """A causal convolution of a stream that is cut: this rank's tokens, results and gradients, and those of one rank."""
    generator = torch.Generator().manual_seed(seed)
    offsets = helpers.offsets(lengths)
    tokens = sum(lengths)
    x, taps, dy = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(offsets.device)
        for shape in ((1, tokens, 3), (3, width), (1, tokens, 3)))
    x.requires_grad_()
    y = convolution(x, taps, offsets.tolist())
    dx, = torch.autograd.grad(y, x, dy)
    context = flash_qla.build_cp_context(offsets, rank.group, width, **cut)
    own = torch.cat([torch.arange(*context.cut.bounds[place]) for place in context.cut.places])
    local = x.detach()[:, own].clone().requires_grad_()
    longer, local_offsets = with_halo(local, context)
    halo = conv_halo(local, context)
    assert halo.shape == (len(context.cut.places), width - 1, 3)
    found = without_halo(convolution(longer, taps, local_offsets.tolist()), context)
    gradient, = torch.autograd.grad(found, local, dy[:, own])
    return (found - y[:, own]).norm().item(), (gradient - dx[:, own]).norm().item()


def convolution(x, taps, offsets):
    """Depthwise and causal, over packed sequences."""
    width = taps.shape[1]
    y = torch.zeros_like(x) + 0 * x
    for begin, end in zip(offsets, offsets[1:]):
        padded = torch.nn.functional.pad(x[:, begin:end], (0, 0, width - 1, 0))
        y = y + torch.nn.functional.pad(sum(padded[:, i:i + end - begin] * taps[:, i] for i in range(width)),
                                        (0, 0, begin, x.shape[1] - end))
    return y


def refused(rank, case, cut, change, checks):
    """A call that one rank makes in another way than the others: the text of what it raises."""
    x = inputs_of(case)
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group, **cut)
    local = cards.local_inputs(x, cards.share_of(context, x))
    if rank.rank == 1:
        local = {"heads": lambda: local.replace(v=local.v.repeat(1, 1, 2, 1), g=local.g.repeat(1, 1, 2), beta=local.beta.repeat(1, 1, 2)),
                 "option": lambda: local.with_options(scale=0.5),
                 "dtype": lambda: local.replace(g=local.g.bfloat16()),
                 "wrong": lambda: local.replace(beta=local.beta[:, 1:])}[change]()
    os.environ["FLASH_QLA_CHECK"] = "1" if checks else "0"
    try:
        helpers.call(local.replace(initial_state=None), cp_context=context)
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.environ.pop("FLASH_QLA_CHECK")
    return None


def dies_or_waits(rank, case, how):
    """One rank leaves before the forward's gather; the others make their call."""
    x = inputs_of(case)
    context = flash_qla.build_cp_context(x.cu_seqlens, rank.group)
    if rank.rank == 1:
        if how == "dies":
            os._exit(3)
        return None  # never comes
    helpers.call(cards.local_inputs(x, cards.share_of(context, x)), cp_context=context)
    return "an answer without rank 1"


def fla_context(rank, case, fields):
    """Results with a context that has FLA's fields alone."""
    from types import SimpleNamespace

    x = inputs_of(case)
    own = flash_qla.build_cp_context(x.cu_seqlens, rank.group, **fields)
    share = cards.share_of(own, x)
    names = [name for name in flash_qla.FLACPContext.__dataclass_fields__]
    context = SimpleNamespace(**{name: getattr(own, name) for name in names})
    return brought(share, helpers.run(cards.local_inputs(x, share), cp_context=context))
