"""The rows of `bench --mode layer`: what each calls, and what it is checked against."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
import torch.nn.functional as F

import flash_qla

from .check import ORACLES

Tensors = Dict[str, torch.Tensor]

# Relative L2 against float64: a rounding to bfloat16 at the end, and for the delta rule some within.
_ROUNDED, _DELTA_RULE = 2e-3, 8e-3
# What an error may be in those that Transformers' own functions have on the same weights, against float32.
_OF_THEIRS = 1.1

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
    batches: Tuple[int, ...] = (1, 16, 256)
    sequences: Tuple[int, int] = (8, 1024)  # of the chain of calls, how many and of what length
    chain_heads: Tuple[int, int] = (2, 8)
    chain: Tuple[int, int] = (8, 40)  # calls of the two chains whose difference counts

    @property
    def keys(self) -> int:
        return self.key_heads * self.dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.value_heads * self.dim


@dataclasses.dataclass
class Case:
    """A row. `how`: "graph" (a CUDA graph), "wall" (eager) or "host" (the host's time of one more call in a chain, of
    which `run` makes one and `chain` as many as it is given)."""

    name: str
    unit: str
    how: str
    run: Callable[[], Tensors]
    exact: Callable[[], Tensors]
    bound: float  # of the errors; of_theirs: times those of the peer "transformers"
    of_theirs: bool = False
    peers: Dict[str, Callable[[], Any]] = dataclasses.field(default_factory=dict)
    chain: Optional[Callable[[int], Any]] = None
    restore: Callable[[], Any] = lambda: None  # puts back what a run changes in place
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


def _convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of [B, T, C] with SiLU, in x's dtype, by torch alone."""
    padded = F.pad(x, (0, 0, WIDTH - 1, 0))
    return F.silu(sum(weight[:, j] * padded[:, j : j + x.shape[1]] for j in range(WIDTH)))  # type: ignore[arg-type]


def _normalised(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _finished_gates(a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor) -> Tuple[Any, Any]:
    return -A_log.exp() * F.softplus(a + dt_bias), b.sigmoid()


def _normed(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight * F.silu(z)


def _fla() -> Any:
    """fla's modules, or None where fla cannot be imported."""
    try:
        import fla.modules.causal_conv1d
        import fla.modules.fused_norm_gate
        import fla.modules.l2norm
    except (ImportError, RuntimeError):
        return None
    return fla.modules


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
        y = _convolution(x.double(), weight.double())
        rows = y[..., : 2 * s.keys].unflatten(-1, (-1, s.dim))
        y[..., : 2 * s.keys] = _normalised(rows).flatten(-2)
        g, beta = _finished_gates(a.double(), b.double(), A_log.double(), dt_bias.double())
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
        return dict(zip(("dx", "dweight"), torch.autograd.grad(_convolution(*leaves), leaves, dy.double())))

    ours = [
        Case("conv_forward", "ms", "graph", forward, exact_forward, _ROUNDED),
        Case("conv_backward", "ms", "graph", backward, exact_backward, _ROUNDED),
    ]
    fla = _fla()
    if fla is not None:

        def their_forward() -> Any:
            y, _ = fla.causal_conv1d.causal_conv1d_fwd(x, weight, None, None, None, False, "silu")
            return fla.l2norm.l2norm_fwd(y[..., : 2 * s.keys].reshape(-1, s.dim)), y

        ours[0].peers["fla"] = their_forward
        ours[1].peers["fla"] = lambda: fla.causal_conv1d.causal_conv1d_bwd(x, dy, None, weight, activation="silu")
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
        return dict(zip(("dx", "dz", "dweight"), torch.autograd.grad(_normed(*leaves), leaves, dy.double())))

    exact = lambda: {"y": _normed(x.double(), z.double(), weight.double())}  # noqa: E731
    ours = [
        Case("norm_forward", "ms", "graph", forward, exact, _ROUNDED),
        Case("norm_backward", "ms", "graph", backward, exact_backward, _ROUNDED),
    ]
    fla = _fla()
    if fla is not None:
        named = dict(activation="swish", eps=1e-6, is_rms_norm=True)
        norm = fla.fused_norm_gate
        rstd = norm.layer_norm_gated_fwd(x, z, weight, None, **named)[2]
        ours[0].peers["fla"] = lambda: norm.layer_norm_gated_fwd(x, z, weight, None, **named)
        ours[1].peers["fla"] = lambda: norm.layer_norm_gated_bwd(dy, x, z, weight, None, rstd=rstd, **named)
    return ours


@contextlib.contextmanager
def patched(use: bool) -> Iterator[None]:
    from ..integrations import transformers as integration

    integration.patch() if use else integration.unpatch()
    try:
        yield
    finally:
        integration.unpatch()


def _both(function: Callable[[], Any]) -> Tuple[Callable[[], Any], Callable[[], Any]]:
    """A call with this library's functions and forwards in place, and with Transformers' own."""

    def call(use: bool) -> Any:
        with patched(use):
            return function()

    return lambda: call(True), lambda: call(False)


def _config(bench: Bench, layers: int) -> Any:
    from transformers import Qwen3_5TextConfig

    s = bench.sizes
    return Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=s.hidden,
        intermediate_size=2 * s.hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(s.hidden // 128, 1),
        num_key_value_heads=max(s.hidden // 512, 1),
        head_dim=128,
        linear_num_key_heads=s.key_heads,
        linear_num_value_heads=s.value_heads,
        linear_key_head_dim=s.dim,
        linear_value_head_dim=s.dim,
        attention_dropout=0.0,
    )


def _gradient(output: torch.Tensor, leaves: List[torch.Tensor], do: Optional[torch.Tensor] = None) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(output, leaves, do)])


def _layer_cases(bench: Bench) -> List[Case]:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    torch.manual_seed(0)
    layer = Qwen3_5GatedDeltaNet(_config(bench, 4), 0).to(bench.device, bench.dtype)
    exact_layer = copy.deepcopy(layer).float()
    hidden, do = (bench.normal(1, bench.sizes.tokens, bench.sizes.hidden, seed=seed) for seed in (9, 10))

    @torch.inference_mode()
    def forward(module: Any = layer) -> Tensors:
        return {"o": module(hidden.to(module.out_proj.weight.dtype))}

    def training(module: Any = layer) -> Tensors:
        leaf = hidden.to(module.out_proj.weight.dtype).detach().requires_grad_()
        o = module(leaf)
        return {"o": o.detach(), "gradients": _gradient(o, [leaf, *module.parameters()], do.to(o.dtype))}

    cases = []
    for name, function in (("layer_forward", forward), ("layer_training", training)):
        ours, theirs = _both(function)
        exact = _both(lambda function=function: function(exact_layer))[1]  # type: ignore[misc]
        cases.append(Case(name, "ms", "graph", ours, exact, _OF_THEIRS, True, {"transformers": theirs}))
    return cases


def _model_cases(bench: Bench) -> List[Case]:
    from transformers import Qwen3_5ForCausalLM

    s = bench.sizes
    torch.manual_seed(0)
    model: Any = Qwen3_5ForCausalLM(_config(bench, s.layers)).to(bench.dtype).eval()
    model.to(bench.device)
    exact_model = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (1, s.tokens), generator=generator).to(bench.device)

    @torch.inference_mode()
    def prefill(module: Any = model) -> Tensors:
        return {"logits": module(ids, use_cache=True).logits}

    def training(module: Any = model) -> Tensors:
        loss = module(ids, labels=ids, use_cache=False).loss
        return {"gradients": _gradient(loss, list(module.parameters()))}

    @torch.inference_mode()
    def decode(module: Any = model) -> Tensors:
        out = module(ids[:, : s.prompt], use_cache=True)
        logits = []
        for t in range(s.prompt, s.prompt + s.decoded):
            out = module(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
        return {"logits": torch.cat(logits, dim=1)}

    cases = []
    for name, unit, function in (
        ("model_prefill", "ms", prefill),
        ("model_training", "ms", training),
        ("model_decode", "ms a token", decode),
    ):
        ours, theirs = _both(function)
        exact = _both(lambda function=function: function(exact_model))[1]  # type: ignore[misc]
        cases.append(Case(name, unit, "wall", ours, exact, _OF_THEIRS, True, {"transformers": theirs}))
    cases[-1].calls = s.decoded
    return cases


def _chain_cases(bench: Bench) -> List[Case]:
    s = bench.sizes
    count, length = s.sequences
    tokens = count * length
    hq, hv = s.chain_heads
    q, k = (F.normalize(bench.normal(1, tokens, hq, s.dim, seed=seed), dim=-1) for seed in (11, 12))
    v, do = (bench.normal(1, tokens, hv, s.dim, seed=seed) for seed in (13, 14))
    g = F.logsigmoid(bench.normal(1, tokens, hv, seed=15).float())
    beta = bench.normal(1, tokens, hv, seed=16).float().sigmoid()
    offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=bench.device)

    def step(calls: int, *given: torch.Tensor) -> Tensors:
        leaves = [t.detach().requires_grad_() for t in given or (q, k, v, g, beta)]
        o = leaves[2]
        for _ in range(calls):
            o, _ = flash_qla.chunk_gated_delta_rule(leaves[0], leaves[1], o, leaves[3], leaves[4], cu_seqlens=offsets)
        gradients = torch.autograd.grad(o, leaves, do.to(o.dtype))
        return {"o": o.detach(), **dict(zip(("dq", "dk", "dv", "dg", "dbeta"), gradients))}

    def exact() -> Tensors:
        with flash_qla.use_path(ORACLES[bench.device]):
            return step(1, *(t.double() for t in (q, k, v, g, beta)))

    name = "eager_step_host_us"
    return [Case(name, "us", "host", lambda: step(1), exact, _DELTA_RULE, chain=lambda calls: step(calls))]


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
        q, k = (_normalised(t).repeat_interleave(group, dim=1) for t in (q, k))
        g, beta = _finished_gates(*(t.double() for t in (a[:, 0], b[:, 0], A_log, dt_bias)))
        state = states_before.double() * g.exp()[..., None, None]
        u = beta[..., None] * (v - torch.einsum("bhk,bhkv->bhv", k, state))
        state = state + k[..., None] * u[..., None, :]
        o = torch.einsum("bhk,bhkv->bhv", q, state) * s.dim**-0.5
        return {"y": _normed(o[:, None], z.double(), norm.double()), "conv_state": shifted, "state": state}

    def restore() -> None:
        window.copy_(before)
        states.copy_(states_before)

    return Case(f"decode_{batch}_us", "us", "graph", run, exact, _DELTA_RULE, restore=restore)


def cases_of(bench: Bench) -> Iterator[Tuple[str, Callable[[], List[Case]]]]:
    """Groups of rows by what they share, each made when its turn comes."""
    yield "convolution", lambda: _conv_cases(bench)
    yield "norm", lambda: _norm_cases(bench)
    yield "layer", lambda: _layer_cases(bench)
    yield "model", lambda: _model_cases(bench)
    yield "chain", lambda: _chain_cases(bench)
    for batch in bench.sizes.batches:
        yield f"decode {batch}", lambda batch=batch: [_decode_case(bench, batch)]  # type: ignore[misc]
