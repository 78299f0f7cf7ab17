"""The rows of `bench --mode layer` that are operations: what each calls, and what it is checked against. Those of whole
layers and models are in bench_layer_models.py, the calls of fla in bench_layer_fla.py."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, ContextManager, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F

import flash_qla

from . import bench_layer_fla
from .check import ORACLES

Tensors = Dict[str, torch.Tensor]

# Relative L2 against float64: a rounding to bfloat16 at the end, and for the delta rule some within.
_ROUNDED, _DELTA_RULE = 2e-3, 8e-3

WIDTH = 4  # of the convolution


@dataclasses.dataclass(frozen=True)
class Sizes:
    """A layer of Qwen3.5, and a model of such layers."""

    tokens: int = 8192
    hidden: int = 2048
    key_heads: int = 16
    value_heads: int = 32
    dim: int = 128
    layers: int = 8
    prompt: int = 128
    decoded: int = 32
    batches: Tuple[int, ...] = (1, 16, 64, 256)
    sequences: Tuple[int, int] = (8, 1024)  # of the chain of calls, how many and of what length
    chain_heads: Tuple[int, int] = (2, 8)
    chain: Tuple[int, int] = (8, 40)  # calls of the two chains whose difference counts

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.value_heads * self.dim


# What a CPU takes seconds for: it shows that every row runs and is right, its times say little.
SMALL = Sizes(tokens=192, hidden=256, key_heads=1, value_heads=2, layers=4, prompt=16, decoded=4, batches=(1, 64),
              sequences=(2, 64), chain_heads=(1, 2), chain=(2, 6))  # fmt: skip


@dataclasses.dataclass
class Case:
    """A row. `how`: "graph" (a CUDA graph), "wall" (eager) or "host" (the host's time of one more call in a chain).
    What is timed is `run` or, of "host", `chain`, of as many calls as it is given."""

    name: str
    unit: str
    how: str
    run: Callable[[], Tensors]
    exact: Callable[[], Tensors]
    bound: float  # of the errors; of_theirs: times those of the peer "transformers"
    of_theirs: bool = False
    peers: Dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    # Makes fla's call. What that returns by names of `exact` is compared as well.
    fla: Optional[Callable[[], Callable[..., Any]]] = None
    chain: Optional[Callable[[int], Any]] = None
    around: Callable[[], ContextManager[Any]] = contextlib.nullcontext  # what ours is called in
    around_theirs: Callable[[], ContextManager[Any]] = contextlib.nullcontext  # what `peers` are called in
    before: Callable[[], Any] = lambda: None  # comes in front of every call of ours and of theirs, and is not timed
    calls: int = 1  # in a run: the value is of one of them


@dataclasses.dataclass(frozen=True)
class Bench:
    sizes: Sizes
    device: str
    dtype: torch.dtype = torch.bfloat16

    def normal(self, *shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return (scale * torch.randn(*shape, generator=generator, device=self.device)).to(self.dtype)

    def gate_parameters(self) -> Tuple[torch.Tensor, torch.Tensor]:
        heads = self.sizes.value_heads
        return torch.linspace(0.01, 16.0, heads, device=self.device).log(), torch.ones(heads, device=self.device)


def relative_l2(found: torch.Tensor, exact: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(found.detach().double() - exact.double())
    return (difference / torch.linalg.vector_norm(exact.double())).item()


def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of [B, T, C] with SiLU, in x's dtype, by torch alone."""
    padded = F.pad(x, (0, 0, WIDTH - 1, 0))
    return F.silu(sum(weight[:, j] * padded[:, j : j + x.shape[1]] for j in range(WIDTH)))  # type: ignore[arg-type]


def normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def finished_gates(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> Tuple[Any, Any]:
    return -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


def normed(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight * F.silu(z)


def _conv_cases(bench: Bench) -> List[Case]:
    from .. import _torch_layer, _torch_node

    s = bench.sizes
    x, weight = bench.normal(1, s.tokens, s.channels), bench.normal(s.channels, WIDTH, seed=1, scale=0.5)
    a, b = (bench.normal(1, s.tokens, s.value_heads, seed=seed) for seed in (2, 3))
    A_log, dt_bias = bench.gate_parameters()
    heads = (s.key_heads, s.value_heads, s.dim, s.dim)
    config = _torch_node.NodeConfig("gated_delta_net", None, 1, 1, _torch_layer.CHANNELS_LAST, *heads, 1e-6, False,
                                    None, False, 0)  # fmt: skip
    inputs = (x, None, None, None, a, b, weight, None, A_log, dt_bias, None, None, None)

    def forward() -> Tensors:
        y, norms, g, beta = _torch_node.made_like(config, x, True)
        _torch_node.prologue(config, inputs, (None, None), y, (norms, g, beta))
        return {"y": y, "g": g, "beta": beta}

    def exact_forward() -> Tensors:
        y = convolution(x.double(), weight.double())
        rows = y[..., : 2 * s.keys].unflatten(-1, (-1, s.dim))
        y[..., : 2 * s.keys] = normalised(rows).flatten(-2)
        g, beta = finished_gates(a.double(), b.double(), A_log.double(), dt_bias.double())
        return {"y": y, "g": g, "beta": beta}

    dy = bench.normal(1, s.tokens, s.channels, seed=4)
    plain = _torch_layer.ConvConfig("causal_conv1d", None, 1, _torch_layer.CHANNELS_LAST, 0, 0)
    tensors = (x, weight, None, None, None, None, None, dy, None)
    wanted = [True, True, False, False, False]

    def backward() -> Tensors:
        found = _torch_layer.compute("conv_backward", plain.operation, tensors, (*plain, *tensors, wanted))
        return dict(zip(("dx", "dweight"), found))

    def exact_backward() -> Tensors:
        leaves = [x.double().requires_grad_(), weight.double().requires_grad_()]
        return dict(zip(("dx", "dweight"), torch.autograd.grad(convolution(*leaves), leaves, dy.double())))

    ours = [
        Case("conv_forward", "ms", "graph", forward, exact_forward, _ROUNDED),
        Case("conv_backward", "ms", "graph", backward, exact_backward, _ROUNDED),
    ]
    ours[0].fla = lambda: bench_layer_fla.conv_forward(x, weight, 2 * s.keys, s.dim)
    ours[1].fla = lambda: bench_layer_fla.conv_backward(x, weight, dy)
    return ours


def _norm_cases(bench: Bench) -> List[Case]:
    from .. import _torch_layer

    s = bench.sizes
    x, z, dy = (bench.normal(s.tokens * s.value_heads, s.dim, seed=seed) for seed in (5, 6, 7))
    weight = bench.normal(s.dim, seed=8)
    inputs = (x, z, weight, None)
    config = _torch_layer.NormConfig("rms_norm_gated", None, 1e-6, 1, False)
    wanted = [True, True, True, False]

    def forward() -> Tensors:
        return {"y": _torch_layer.compute("norm_gated", config.operation, inputs, (*config, *inputs))}

    def backward() -> Tensors:
        tensors = (*inputs, dy)
        found = _torch_layer.compute("norm_gated_backward", config.operation, tensors, (*config, *tensors, wanted))
        return dict(zip(("dx", "dz", "dweight"), found))

    def exact_backward() -> Tensors:
        leaves = [t.double().requires_grad_() for t in (x, z, weight)]
        y = normed(leaves[0], leaves[1], leaves[2])
        return dict(zip(("dx", "dz", "dweight"), torch.autograd.grad(y, leaves, dy.double())))

    exact = lambda: {"y": normed(x.double(), z.double(), weight.double())}  # noqa: E731
    ours = [
        Case("norm_forward", "ms", "graph", forward, exact, _ROUNDED),
        Case("norm_backward", "ms", "graph", backward, exact_backward, _ROUNDED),
    ]
    ours[0].fla = lambda: bench_layer_fla.norm_forward(x, z, weight)
    ours[1].fla = lambda: bench_layer_fla.norm_backward(x, z, weight, dy)
    return ours


def _chain_cases(bench: Bench) -> List[Case]:
    s = bench.sizes
    count, length = s.sequences
    tokens = count * length
    hq, hv = s.chain_heads
    q, k = (F.normalize(bench.normal(1, tokens, hq, s.dim, seed=seed), dim=-1) for seed in (11, 12))
    v, do = (bench.normal(1, tokens, hv, s.dim, seed=seed) for seed in (13, 14))
    g = F.logsigmoid(bench.normal(1, tokens, hv, seed=15).float())
    beta = bench.normal(1, tokens, hv, seed=16).float().sigmoid()
    offsets = torch.arange(0, tokens + 1, length, device=bench.device)

    def step(calls: int, *given: torch.Tensor, of: Callable[..., Any] = flash_qla.chunk_gated_delta_rule) -> Tensors:
        leaves = [t.detach().requires_grad_() for t in given or (q, k, v, g, beta)]
        o = leaves[2]
        for _ in range(calls):
            o, _ = of(leaves[0], leaves[1], o, leaves[3], leaves[4], cu_seqlens=offsets)
        gradients = torch.autograd.grad(o, leaves, do.to(o.dtype))
        return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dg", "dbeta"), gradients))}

    def fla() -> Callable[[int], Tensors]:
        function = bench_layer_fla.chunk_gated_delta_rule()
        return lambda calls: step(calls, of=function)

    def exact() -> Tensors:
        with flash_qla.use_path(ORACLES[bench.device]):
            return step(1, *(t.double() for t in (q, k, v, g, beta)))

    name = "eager_step_host_us"
    return [Case(name, "us", "host", lambda: step(1), exact, _DELTA_RULE, chain=lambda calls: step(calls), fla=fla)]


def _decode_case(bench: Bench, batch: int) -> Case:
    """Convolution, delta rule and gated norm of one token of each sequence, on states in pools."""
    s = bench.sizes
    x, weight = bench.normal(batch, 1, s.channels, seed=17), bench.normal(s.channels, WIDTH, seed=1, scale=0.5)
    a, b = (bench.normal(batch, 1, s.value_heads, seed=seed) for seed in (18, 19))
    z = bench.normal(batch, 1, s.value_heads, s.dim, seed=20)
    norm = bench.normal(s.dim, seed=8)
    A_log, dt_bias = bench.gate_parameters()
    before = bench.normal(batch, s.channels, WIDTH, seed=21)
    states_before = bench.normal(batch, s.value_heads, s.dim, s.dim, seed=22).float()
    window, states = before.clone(), states_before.clone()
    slots = torch.arange(batch, device=bench.device)

    def split(y: torch.Tensor) -> List[torch.Tensor]:
        parts = y.split([s.keys, s.keys, s.value_heads * s.dim], dim=-1)
        return [part.unflatten(-1, (-1, s.dim)) for part in parts]

    @torch.inference_mode()
    def run() -> Tensors:
        y = flash_qla.causal_conv1d_decode(x, weight, None, window, slots)
        q, k, v = split(y)
        o = flash_qla.gated_delta_rule_decode(
            q, k, v, a, b, states, slots, state_v_first=False, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        return {"y": flash_qla.rms_norm_gated(o, z, norm), "conv_state": window, "state": states}

    def exact() -> Tensors:
        shifted = torch.cat([before[..., 1:], x.transpose(1, 2)], dim=-1).double()
        y = F.silu((shifted * weight.double()).sum(-1)).to(bench.dtype).double()  # rounded where it is stored
        q, k, v = split(y)
        group = s.value_heads // s.key_heads
        q, k = (normalised(t).repeat_interleave(group, dim=1) for t in (q, k))
        g, beta = finished_gates(*(t.double() for t in (a[:, 0], b[:, 0], A_log, dt_bias)))
        state = states_before.double() * g.exp()[..., None, None]
        u = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * u[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", q, state) * s.dim**-0.5
        return {"y": normed(o[:, None], z.double(), norm.double()), "conv_state": shifted, "state": state}

    def restore() -> None:
        window.copy_(before)
        states.copy_(states_before)

    def fla() -> Callable[[], Tensors]:
        return bench_layer_fla.decode(x, weight, a, b, A_log, dt_bias, z, norm, before.clone(), states_before, split)

    return Case(f"decode_{batch}_us", "us", "graph", run, exact, _DELTA_RULE, before=restore, fla=fla)


def groups(sizes: Sizes) -> Dict[str, Tuple[Tuple[str, ...], Callable[[Bench], List[Case]]]]:
    """The table: names of the rows that share what they are made of, and how they are made."""
    from .bench_layer_models import layer_cases, model_cases

    decode = {
        f"decode {batch}": ((f"decode_{batch}_us",), lambda bench, batch=batch: [_decode_case(bench, batch)])
        for batch in sizes.batches
    }
    return {
        "convolution": (("conv_forward", "conv_backward"), _conv_cases),
        "norm": (("norm_forward", "norm_backward"), _norm_cases),
        **decode,
        "chain": (("eager_step_host_us",), _chain_cases),
        "layer": (("layer_forward", "layer_training"), layer_cases),
        "model": (("model_prefill", "model_training", "model_decode"), model_cases),
    }


def names(sizes: Sizes) -> List[str]:
    """Of all rows, in the order in which they are measured."""
    return [name for of_group, _ in groups(sizes).values() for name in of_group]
