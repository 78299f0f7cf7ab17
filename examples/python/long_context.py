"""Cuts one long text over ranks: prefills it, or trains on it, with context parallelism.

    torchrun --nproc-per-node 4 examples/python/long_context.py --tokens 65536 --compare
    torchrun --nproc-per-node 2 examples/python/long_context.py --mode train --layout zigzag --steps 5
    torchrun --nproc-per-node 3 examples/python/long_context.py --tokens 2000 --shares 500,900,600 --compare

A small stack of Gated DeltaNet layers (projection, short convolution, gated delta rule with its gates in the kernel,
normalised and gated output) reads the bytes of a text, packed into one stream with several documents. Every rank holds
a share of the stream: the convolution gets the tokens before it from its neighbours, and the states of documents go on
from rank to rank. Parameters are the same everywhere; their gradients are added over the ranks.

Prefill prints tokens per second and the norms of the documents' final states; training prints the loss of every step.
With --compare rank 0 computes the whole stream alone as well, and the largest relative difference of outputs, final
states, gradients and loss is printed: above the bound of the dtype the exit code is 1. Runs on GPUs with NCCL where
there are enough, else on the CPU with gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as distributed
from torch import Tensor, nn
from torch.nn import functional

import flash_qla
from flash_qla.distributed import with_halo, without_halo

TEXT = Path(__file__).resolve().parents[1] / "data" / "declaration_of_independence.txt"

WIDTH = 4  # taps of the short convolution
# Relative L2 difference from one rank that is allowed, through all layers.
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
SEED = 0


@dataclasses.dataclass
class Stream:
    """One rank's tokens, or all of them: bytes, the byte after each (-1 at a document's end), and the cut."""

    tokens: Tensor  # [T]
    targets: Tensor  # [T]
    cu_seqlens: Tensor  # [R + 1] of these tokens
    context: Any = None  # of build_cp_context(); None: all tokens are here


def convolve(x: Tensor, taps: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Depthwise and causal over packed sequences. x [1, T, D], taps [D, WIDTH]."""
    position = torch.arange(x.shape[1], dtype=cu_seqlens.dtype, device=x.device)
    begin = cu_seqlens[torch.searchsorted(cu_seqlens, position, right=True).clamp(min=1) - 1]
    y = x * taps[:, -1]
    for back in range(1, taps.shape[1]):
        shifted = functional.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        inside = (position - begin >= back)[None, :, None]
        y = y + torch.where(inside, shifted, 0) * taps[:, -1 - back]
    return functional.silu(y)


class Layer(nn.Module):
    """A Gated DeltaNet layer of Hv value heads, with one key head."""

    def __init__(self, width: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        values = heads * head_dim
        self.sizes = [2 * head_dim + values, values, heads, heads]  # q k v, output gate, raw decay, raw beta
        self.norm = nn.RMSNorm(width)
        self.projection = nn.Linear(width, sum(self.sizes), bias=False)
        self.taps = nn.Parameter(torch.randn(self.sizes[0], WIDTH) / WIDTH**0.5)
        self.A_log = nn.Parameter(torch.linspace(-4.0, 1.0, heads))  # from slow to quick decay
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.output_norm = nn.RMSNorm(head_dim)
        self.output = nn.Linear(values, width, bias=False)

    def forward(self, x: Tensor, stream: Stream) -> Tuple[Tensor, Tensor]:
        mixed, gate, decay, beta = self.projection(self.norm(x)).split(self.sizes, -1)
        if stream.context is None:
            mixed = convolve(mixed, self.taps, stream.cu_seqlens)
        else:
            longer, offsets = with_halo(mixed, stream.context, WIDTH)
            mixed = without_halo(convolve(longer, self.taps, offsets), stream.context, WIDTH)
        q, k, v = mixed.split([self.head_dim, self.head_dim, self.heads * self.head_dim], -1)
        o, final_state = flash_qla.chunk_gated_delta_rule(
            q.unflatten(-1, (1, self.head_dim)),
            k.unflatten(-1, (1, self.head_dim)),
            v.unflatten(-1, (self.heads, self.head_dim)),
            decay,
            beta,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            use_beta_sigmoid_in_kernel=True,
            cu_seqlens=stream.cu_seqlens,
            cp_context=stream.context,
        )
        o = self.output_norm(o) * functional.silu(gate.unflatten(-1, (self.heads, self.head_dim)))
        return x + self.output(o.flatten(-2)), final_state


class Model(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList([Layer(width, heads, head_dim) for _ in range(layers)])
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, stream: Stream) -> Tuple[Tensor, Tensor]:
        """Logits [T, 256], and final states [layers, R, Hv, K, V]: of the documents that end in these tokens."""
        x, states = self.embedding(stream.tokens)[None], []
        for layer in self.layers:
            x, state = layer(x, stream)
            states.append(state)
        return self.head(x)[0], torch.stack(states)


def documents(tokens: int) -> List[int]:
    """Lengths of the documents: a long one, a few short ones, and the rest."""
    lengths = [tokens // 2, tokens // 64 + 1, tokens // 16]
    return [*lengths, tokens - sum(lengths)]


def whole_stream(tokens: int, device: torch.device) -> Stream:
    text = torch.tensor(list(TEXT.read_bytes()))
    ids = text.repeat(tokens // len(text) + 1)[:tokens]
    targets = torch.cat((ids[1:], ids[:1]))
    offsets = torch.tensor([0, *documents(tokens)]).cumsum(0)
    targets[offsets[1:] - 1] = -1
    return Stream(ids.to(device), targets.to(device), offsets.to(device))


def share_of(whole: Stream, arguments: argparse.Namespace) -> Tuple[Stream, Tensor]:
    """This rank's part of a stream, and its tokens' numbers in it."""
    shares = None if arguments.shares is None else [int(share) for share in arguments.shares.split(",")]
    context = flash_qla.build_cp_context(
        whole.cu_seqlens, distributed.group.WORLD, WIDTH, layout=arguments.layout, rank_tokens=shares
    )
    spans = [torch.arange(*context.cut.bounds[place]) for place in context.cut.places]
    own = torch.cat(spans).to(whole.tokens.device)
    return Stream(whole.tokens[own], whole.targets[own], context.cu_seqlens, context), own


def loss_of(logits: Tensor, stream: Stream, count: int) -> Tensor:
    """This share of the mean over the whole stream."""
    return functional.cross_entropy(logits.float(), stream.targets, ignore_index=-1, reduction="sum") / count


def step(model: Model, stream: Stream, count: int) -> Tuple[Tensor, Tensor, Tensor]:
    """Logits, final states, and loss; leaves gradients."""
    model.zero_grad(set_to_none=True)
    logits, states = model(stream)
    loss = loss_of(logits, stream, count)
    loss.backward()
    return logits.detach(), states.detach(), loss.detach()


def add_over_ranks(model: Model, loss: Tensor) -> Tensor:
    for parameter in model.parameters():
        distributed.all_reduce(parameter.grad)
    total = loss.clone()
    distributed.all_reduce(total)
    return total


def gather_tokens(x: Tensor, own: Tensor, total: int) -> Tensor:
    """[total, ..] on every rank, from the rows of each one's own tokens."""
    whole = x.new_zeros((total, *x.shape[1:]))
    whole[own] = x
    distributed.all_reduce(whole)
    return whole


def gather_states(states: Tensor, stream: Stream, count: int) -> Tensor:
    """[layers, documents, ..]: each rank has those that end in its tokens, zeros elsewhere."""
    whole = states.new_zeros((states.shape[0], count, *states.shape[2:]))
    whole.index_add_(1, stream.context.sequences, states)
    distributed.all_reduce(whole)
    return whole


def difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).double().norm() / expected.double().norm().clamp(min=1e-30)).item()


def compare(model: Model, whole: Stream, found: Dict[str, Tensor], count: int) -> Dict[str, float]:
    """Relative differences from what rank 0 computes alone; of gradients the largest, where the model has any."""
    gradients = [parameter.grad for parameter in model.parameters()]
    logits, states, loss = step(model, whole, count)
    errors = {
        "outputs": difference(found["logits"], logits),
        "final states": difference(found["states"], states),
        "loss": difference(found["loss"], loss),
    }
    pairs = [(x, parameter.grad) for x, parameter in zip(gradients, model.parameters())]
    of_gradients = [difference(x, alone) for x, alone in pairs if x is not None and alone is not None]
    return {**errors, "gradients": max(of_gradients)} if of_gradients else errors


def prepare(arguments: argparse.Namespace) -> torch.device:
    """Joins the group; the device of this rank."""
    gpus, world = torch.cuda.device_count(), int(os.environ["WORLD_SIZE"])
    backend = arguments.backend or ("nccl" if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", world)) > 0 else "gloo")
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    distributed.init_process_group(backend)
    return device


def timed(function: Any, device: torch.device) -> Tuple[Any, float]:
    """What a function returns, and the seconds until all ranks had it."""
    distributed.barrier()
    start = time.perf_counter()
    found = function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    distributed.barrier()
    return found, time.perf_counter() - start


def run(arguments: argparse.Namespace, device: torch.device) -> int:
    rank, dtype = distributed.get_rank(), getattr(torch, arguments.dtype)
    torch.manual_seed(SEED)  # the same weights on every rank
    model = Model(arguments.width, arguments.layers, arguments.heads, arguments.head_dim).to(device, dtype)
    whole = whole_stream(arguments.tokens, device)
    count = int((whole.targets >= 0).sum())
    stream, own = share_of(whole, arguments)
    sizes = [None] * distributed.get_world_size()
    distributed.all_gather_object(sizes, len(stream.tokens))
    if rank == 0:
        where = f"{len(sizes)} ranks ({distributed.get_backend()}, {device.type}, {arguments.layout})"
        print(f"{arguments.tokens} tokens, {len(whole.cu_seqlens) - 1} documents over {where}: {sizes} tokens")

    if arguments.mode == "prefill":
        with torch.no_grad():
            for _ in range(2):  # the first call sets up what is set up once
                (logits, states), seconds = timed(lambda: model(stream), device)
        loss = loss_of(logits, stream, count)
        distributed.all_reduce(loss)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
        for i in range(arguments.steps):
            (logits, states, loss), seconds = timed(lambda: step(model, stream, count), device)
            loss = add_over_ranks(model, loss)
            if rank == 0:
                print(f"step {i + 1}: loss {loss.item():.4f}, {arguments.tokens / seconds:,.0f} tokens per second")
            if i + 1 < arguments.steps:
                optimizer.step()
    found = {
        "logits": gather_tokens(logits, own, arguments.tokens),
        "states": gather_states(states, stream, len(whole.cu_seqlens) - 1),
        "loss": loss,
    }
    if rank == 0 and arguments.mode == "prefill":
        norms = ", ".join(f"{norm:.3g}" for norm in found["states"][-1].flatten(1).float().norm(dim=1).tolist())
        print(f"{arguments.tokens / seconds:,.0f} tokens per second; loss {loss.item():.4f}")
        print(f"final states of the last layer, norms by document: {norms}")
    if not arguments.compare:
        return 0
    verdict = torch.zeros((), device=device)
    if rank == 0:
        errors = compare(model, whole, found, count)
        verdict += max(errors.values()) > BOUNDS[dtype]
        line = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
        print(f"difference from one rank: {line} (bound {BOUNDS[dtype]:.0e})")
    distributed.all_reduce(verdict)
    return int(verdict.item() > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65536, help="of the whole stream")
    parser.add_argument("--mode", choices=["prefill", "train"], default="prefill")
    parser.add_argument("--layout", choices=["contiguous", "zigzag"], default="contiguous")
    parser.add_argument("--shares", help="tokens of each rank, with commas between them; else equal shares")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--backend", choices=["gloo", "nccl"], help="nccl where there is a GPU for every rank")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=32, help="128 takes the fastest kernels")
    parser.add_argument("--compare", action="store_true", help="compute the whole stream on rank 0 as well")
    arguments = parser.parse_args()
    device = prepare(arguments)
    code = run(arguments, device)
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    # Not by the interpreter's own end: gloo's threads may still let go of tensors, which would abort it.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
