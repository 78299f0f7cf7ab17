"""The rows of `bench --mode layer` under Transformers: a Qwen3.5 layer, and a model of such layers."""

from __future__ import annotations

import contextlib
import copy
import inspect
from typing import Any, Callable, Dict, Iterator, List
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import flash_qla

from . import bench_layer_fla
from .bench_layer_rows import Bench, Case, Tensors, convolution, finished_gates, normalised, normed
from .check import ORACLES

# How many times those of Transformers' own functions, on the same weights, an error may be.
_OF_THEIRS = 1.1


@contextlib.contextmanager
def patched() -> Iterator[None]:
    from ..integrations import transformers as integration

    integration.patch()
    try:
        yield
    finally:
        integration.unpatch()


_FUNCTIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)


@contextlib.contextmanager
def _own_functions() -> Iterator[None]:
    """Transformers' torch functions themselves: it would call fla's and causal_conv1d's where these are installed."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    with mock.patch.multiple(module, **{name: inspect.unwrap(getattr(module, name)) for name in _FUNCTIONS}):
        yield


def _exact_layer(self: Any, hidden_states: torch.Tensor, **ignored: Any) -> torch.Tensor:
    """The forward of a Qwen3.5 linear attention layer without a cache, all of it in float64."""
    y = convolution(self.in_proj_qkv(hidden_states), self.conv1d.weight.squeeze(1))
    parts = y.split([self.key_dim, self.key_dim, self.value_dim], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, self.head_v_dim)) for part in parts)
    z = self.in_proj_z(hidden_states).unflatten(-1, (-1, self.head_v_dim))
    a, b = self.in_proj_a(hidden_states), self.in_proj_b(hidden_states)
    g, beta = finished_gates(a, b, self.A_log, self.dt_bias)
    # Here, and not around the model: a backward pass runs checkpointed layers again in a thread of its own.
    with flash_qla.use_path(ORACLES[hidden_states.device.type]):
        o, _ = flash_qla.chunk_gated_delta_rule(normalised(q), normalised(k), v, g, beta)
    return self.out_proj(normed(o, z, self.norm.weight, self.norm.variance_epsilon).flatten(-2))


def _exact_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.weight)


_attention = F.scaled_dot_product_attention


def _attention_by_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any, **options: Any
) -> torch.Tensor:
    """In float64 the scores of all heads together would take tens of gigabytes: one head after another."""
    group = query.shape[1] // key.shape[1]
    heads = []
    for h in range(query.shape[1]):
        part = query[:, h : h + 1], key[:, h // group : h // group + 1], value[:, h // group : h // group + 1]
        call = lambda *of: _attention(*of, *arguments, **options)  # noqa: E731
        heads.append(checkpoint(call, *part, use_reentrant=False))
    return torch.cat(heads, dim=1)


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """Transformers' functions round to float32 on their way: these do not. (The angles of the rotary embedding are of
    float32 everywhere.)"""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as module

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(module.Qwen3_5GatedDeltaNet, "forward", _exact_layer))
        stack.enter_context(mock.patch.object(module.Qwen3_5RMSNorm, "forward", _exact_norm))
        stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", _attention_by_heads))
        yield


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


def _made(bench: Bench, make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    with torch.device(bench.device):
        return make().to(bench.dtype)


def _gradient(output: torch.Tensor, leaves: List[torch.Tensor], *do: torch.Tensor) -> torch.Tensor:
    """All gradients as one vector."""
    return torch.cat([g.flatten() for g in torch.autograd.grad(output, leaves, do or None)])


def _case(
    name: str, unit: str, how: str, function: Callable[[], Tensors], exact: Callable[[], Tensors], **more: Any
) -> Case:
    """The same function with ours in place and with Transformers' own."""
    theirs: Dict[str, Callable[[], Any]] = {"transformers": function}
    return Case(name, unit, how, function, exact, _OF_THEIRS, True, theirs, around=patched,
                around_theirs=_own_functions, **more)  # fmt: skip


def layer_cases(bench: Bench) -> List[Case]:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    s = bench.sizes
    layer = _made(bench, lambda: Qwen3_5GatedDeltaNet(_config(bench, 4), 0))
    exact_layer = copy.deepcopy(layer).double()
    hidden, do = (bench.normal(1, s.tokens, s.hidden, seed=seed) for seed in (9, 10))

    @torch.inference_mode()
    def forward(module: Any = layer) -> Tensors:
        return {"o": module(hidden.to(module.out_proj.weight.dtype))}

    def training(module: Any = layer) -> Tensors:
        leaf = hidden.to(module.out_proj.weight.dtype).detach().requires_grad_()
        o = module(leaf)
        return {"o": o.detach(), "gradients": _gradient(o, [leaf, *module.parameters()], do.to(o.dtype))}

    def case(name: str, function: Callable[..., Tensors]) -> Case:
        def exact() -> Tensors:
            with _in_float64():
                return function(exact_layer)

        def fla() -> Callable[[], Tensors]:
            train = function is training
            return bench_layer_fla.layer(hidden, do, s.key_heads, s.value_heads, s.dim, train)

        return _case(name, "ms", "graph", function, exact, fla=fla)

    return [case("layer_forward", forward), case("layer_training", training)]


def model_cases(bench: Bench) -> List[Case]:
    from transformers import Qwen3_5ForCausalLM

    s = bench.sizes
    model = _made(bench, lambda: Qwen3_5ForCausalLM(_config(bench, s.layers))).eval()
    exact_model = copy.deepcopy(model).double().train()
    exact_model.gradient_checkpointing_enable({"use_reentrant": False})  # float64 takes four times the memory
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 256, (1, max(s.tokens, s.prompt + s.decoded)), generator=generator).to(bench.device)

    def exact_logits(tokens: int) -> torch.Tensor:
        return exact_model(ids[:, :tokens], use_cache=False).logits

    @torch.inference_mode()
    def prefill() -> Tensors:
        return {"logits": model(ids[:, : s.tokens], use_cache=True).logits}

    def training() -> Tensors:
        part = ids[:, : s.tokens]
        loss = model(part, labels=part, use_cache=False).loss
        return {"gradients": _gradient(loss, list(model.parameters()))}

    def exact_training() -> Tensors:
        logits = exact_logits(s.tokens)[0, :-1]
        loss = F.cross_entropy(logits, ids[0, 1 : s.tokens])
        return {"gradients": _gradient(loss, list(exact_model.parameters()))}

    cache: List[Any] = []

    @torch.inference_mode()
    def prompt() -> None:
        cache[:] = [model(ids[:, : s.prompt], use_cache=True).past_key_values]

    @torch.inference_mode()
    def decode() -> Tensors:
        logits = []
        for t in range(s.prompt, s.prompt + s.decoded):
            out = model(ids[:, t : t + 1], past_key_values=cache[0], use_cache=True)
            logits.append(out.logits)
        return {"logits": torch.cat(logits, dim=1)}

    def exactly(function: Callable[[], Tensors], gradients: bool = False) -> Callable[[], Tensors]:
        def exact() -> Tensors:
            with _in_float64(), torch.set_grad_enabled(gradients):
                return {name: found.detach() for name, found in function().items()}

        return exact

    whole = exactly(lambda: {"logits": exact_logits(s.tokens)})
    behind = exactly(lambda: {"logits": exact_logits(s.prompt + s.decoded)[:, s.prompt :]})
    return [
        _case("model_prefill", "ms", "wall", prefill, whole),
        _case("model_training", "ms", "wall", training, exactly(exact_training, True)),
        _case("model_decode", "ms a token", "wall", decode, behind, before=prompt, calls=s.decoded),
    ]
