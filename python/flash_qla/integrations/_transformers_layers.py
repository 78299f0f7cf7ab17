"""Forwards that take the place of those of Transformers' layer classes: projections as they are called there, and all
between them by gated_delta_net()."""

from __future__ import annotations

import functools
import warnings
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

import torch

from .. import causal_conv1d_fn as _flash_conv_fn
from .. import causal_conv1d_update as _flash_conv_update
from .. import gated_delta_net, rms_norm_gated

Forward = Callable[..., torch.Tensor]


class LayerKind(NamedTuple):
    """How a class names its parts, and how its projections lie."""

    layout: str
    projections: Tuple[str, ...]  # joined: qkv, z, b, a; interleaved: qkvz, ba; separate: q, k, v, z, b, a
    out_proj: str
    norm: str


_JOINED = LayerKind("joined", ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), "out_proj", "norm")
_INTERLEAVED = LayerKind("interleaved", ("in_proj_qkvz", "in_proj_ba"), "out_proj", "norm")
_SEPARATE = LayerKind("separate", ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_proj", "o_norm")

# Layer classes by their module below transformers.models, and norm classes.
LAYERS: Dict[str, Tuple[str, LayerKind]] = {
    "qwen3_next": ("Qwen3NextGatedDeltaNet", _INTERLEAVED),
    "qwen3_5": ("Qwen3_5GatedDeltaNet", _JOINED),
    "qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", _JOINED),
    "qwen4_exp": ("Qwen4ExpTextGatedDeltaNet", _JOINED),
    "olmo_hybrid": ("OlmoHybridGatedDeltaNet", _SEPARATE),
}
NORMS: Dict[str, str] = {
    "qwen3_next": "Qwen3NextRMSNormGated",
    "qwen3_5": "Qwen3_5RMSNormGated",
    "qwen3_5_moe": "Qwen3_5MoeRMSNormGated",
    "qwen4_exp": "Qwen4ExpTextRMSNormGated",
    "olmo_hybrid": "OlmoHybridRMSNormGated",
}

_SIZES = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
_GATES = ("silu", "swish", "sigmoid")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def conv_fn(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    activation: Optional[str] = None,
    seq_idx: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> torch.Tensor:
    """causal_conv1d_fn of Transformers; keywords that the model passes along do not concern it there either."""
    return _flash_conv_fn(hidden_states, weight, bias, seq_idx=seq_idx, activation=activation)


def conv_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    activation: Optional[str] = None,
    **kwargs: Any,
) -> torch.Tensor:
    """causal_conv1d_update of Transformers."""
    return _flash_conv_update(hidden_states, conv_state, weight, bias, activation)


def norm_forward(original: Forward) -> Forward:
    """Of a gated norm class."""

    @functools.wraps(original)
    def forward(self: Any, hidden_states: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        activation = getattr(self, "activation", None)
        known = (
            gate is not None
            and activation in _GATES
            and hasattr(self, "variance_epsilon")
            and hidden_states.dim() <= 4
            and hidden_states.dtype == gate.dtype
            and hidden_states.shape == gate.shape
            and hidden_states.dtype in _DTYPES
            and not torch.compiler.is_exporting()
        )
        if not known:
            return original(self, hidden_states, gate)
        return rms_norm_gated(hidden_states, gate, self.weight, activation=str(activation), eps=self.variance_epsilon)

    return forward


def _has_hooks(module: torch.nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _is_known(layer: Any, kind: LayerKind, norm_class: Optional[type]) -> bool:
    """Whether an instance is made as its class was when this was written: its weights are then used directly."""
    conv: Any = getattr(layer, "conv1d", None)
    norm: Any = getattr(layer, kind.norm, None)
    if not isinstance(conv, torch.nn.Conv1d) or type(conv) is not torch.nn.Conv1d:
        return False
    if not isinstance(norm, torch.nn.Module) or type(norm) is not norm_class:
        return False
    names = (*kind.projections, kind.out_proj, "A_log", "dt_bias", "layer_idx", *_SIZES)
    if not all(hasattr(layer, name) for name in names):
        return False
    weight = conv.weight
    channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
    return (
        weight.dim() == 3
        and tuple(weight.shape[:2]) == (channels, 1)
        and weight.shape[2] <= 8
        and getattr(layer, "activation", None) in ("silu", "swish")
        and getattr(norm, "activation", None) in _GATES
        and hasattr(norm, "variance_epsilon")
        and max(layer.head_k_dim, layer.head_v_dim) <= 256
        and not _has_hooks(conv)
        and not _has_hooks(norm)
    )


def _records_gradients(layer: Any, hidden_states: torch.Tensor) -> bool:
    if not torch.is_grad_enabled():
        return False
    return hidden_states.requires_grad or any(p.requires_grad for p in layer.parameters())


def _linear_cache(layer: Any, cache: Any, hidden_states: torch.Tensor) -> Optional[Any]:
    """The layer's part of a cache, where it is one whose buffers this reads and writes; None: the class's own forward
    knows what to do with it."""
    from transformers import cache_utils

    base = getattr(cache_utils, "LinearAttentionLayer", None)
    layers = getattr(cache, "layers", None)
    if base is None or layers is None or layer.layer_idx >= len(layers):
        return None
    part = layers[layer.layer_idx]
    own = type(part)
    if not isinstance(part, base) or getattr(part, "record_past", False) or getattr(cache, "offloading", False):
        return None
    for name in ("update_conv_state", "update_recurrent_state"):
        if getattr(own, name) is not getattr(base, name):
            return None
    if len(part.conv_states) != 1:
        return None
    for state in (part.conv_states[0], part.recurrent_states[0]):
        if state is not None and (state.device != hidden_states.device or state.shape[0] != hidden_states.shape[0]):
            return None
    return part


def _states(layer: Any, part: Any, like: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
    """The buffers of a cache's part, made where they are not there yet."""
    batch, width = like.shape[0], layer.conv1d.weight.shape[2]
    if not (part.is_conv_states_initialized[0] and part.is_recurrent_states_initialized[0]):
        channels = 2 * layer.num_k_heads * layer.head_k_dim + layer.num_v_heads * layer.head_v_dim
        shape = (batch, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        part.lazy_initialization(
            conv_states=like.new_empty((batch, channels, width)),
            recurrent_states=like.new_empty(shape, dtype=wide),
            conv_kernel_size=width,
        )
    return part.conv_states[0], part.recurrent_states[0]


_warned = False


def _warn_of_seq_idx() -> None:
    global _warned
    if not _warned and not torch.compiler.is_compiling():
        _warned = True
        warnings.warn(
            "flash_qla: seq_idx without cu_seq_lens_q bounds the convolution and not the delta rule, as in "
            "Transformers: pass cu_seq_lens_q for packed sequences that do not see each other",
            stacklevel=3,
        )


def _project(layer: Any, kind: LayerKind, hidden_states: torch.Tensor) -> Tuple[Any, Any, Any, Any]:
    """(qkv, z, a, b) as gated_delta_net() takes them. Projections are called as modules."""
    found = [getattr(layer, name)(hidden_states) for name in kind.projections]
    if kind.layout == "joined":
        qkv, z, b, a = found
        return qkv, z, a, b
    if kind.layout == "interleaved":
        return found[0], None, found[1], None
    q, k, v, z, b, a = found
    return (q, k, v), z, a, b


def layer_forward(original: Forward, kind: LayerKind, norm_class: Optional[type]) -> Forward:
    """Of a layer class. What it does not know it leaves to `original`."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        cache_params: Optional[Any] = None,
        attention_mask: Optional[torch.Tensor] = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        cu_seqlens, seq_idx = kwargs.get("cu_seq_lens_q"), kwargs.get("seq_idx")
        part = None
        known = (
            hidden_states.dim() == 3
            and hidden_states.dtype in _DTYPES
            and not torch.compiler.is_exporting()
            and _is_known(self, kind, norm_class)
            and (cu_seqlens is None or hidden_states.shape[0] == 1)
        )
        if known and cache_params is not None:
            part = _linear_cache(self, cache_params, hidden_states)
            packed = cu_seqlens is not None or seq_idx is not None
            known = part is not None and not packed and not _records_gradients(self, hidden_states)
        if not known:
            return original(self, hidden_states, cache_params, attention_mask, **kwargs)
        if attention_mask is not None:
            hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
        if cu_seqlens is not None:
            seq_idx = None
        elif seq_idx is not None:
            _warn_of_seq_idx()
        qkv, z, a, b = _project(self, kind, hidden_states)
        norm = getattr(self, kind.norm)
        states: Dict[str, Any] = {}
        if part is not None:
            like = qkv[0] if kind.layout == "separate" else qkv
            states["conv_state"], states["recurrent_state"] = _states(self, part, like)
        out = gated_delta_net(
            qkv,
            z,
            a,
            b,
            conv_weight=self.conv1d.weight.squeeze(1),
            conv_bias=self.conv1d.bias,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
            norm_weight=norm.weight,
            norm_eps=norm.variance_epsilon,
            num_k_heads=self.num_k_heads,
            num_v_heads=self.num_v_heads,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            layout=kind.layout,
            gate_activation=norm.activation,
            allow_neg_eigval=bool(getattr(self, "allow_neg_eigval", False)),
            cu_seqlens=cu_seqlens,
            seq_idx=seq_idx,
            **states,
        )
        if part is not None:
            part.has_previous_state[0] = True
        return getattr(self, kind.out_proj)(out)

    try:  # weights of conv1d and the norm are used directly: what accelerate has to do for them it does before
        from transformers.integrations.accelerate import force_accelerate_hooks
    except ImportError:
        return functools.wraps(original)(forward)
    return functools.wraps(original)(force_accelerate_hooks(["conv1d", kind.norm])(forward))
