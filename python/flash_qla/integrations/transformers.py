"""Hugging Face Transformers: Qwen3-Next, Qwen3.5, OLMo-Hybrid and their kin on this library.

import flash_qla.integrations.transformers as integration

integration.patch()           # models loaded from now on, and in current versions those already loaded
integration.patch(model)      # also this model's layers, where a version keeps functions in them
integration.unpatch()         # everything as it was
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from .. import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from ._transformers_layers import LAYERS, NORMS, conv_fn, conv_update, layer_forward, norm_forward

__all__ = ["patch", "status", "unpatch"]

# Packages below transformers.models whose modeling module holds its own copy of the gated delta rule.
_MODELS = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid")

# (object, attribute, value before): what unpatch() puts back, last first.
_replaced: List[Tuple[Any, str, Any]] = []


def chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """torch_chunk_gated_delta_rule of Transformers. chunk_size only names its way of computing; other keywords that the
    model passes along (attention options) do not concern this operation there either."""
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
    )


def recurrent(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: Optional[torch.Tensor] = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """torch_recurrent_gated_delta_rule of Transformers, which can be differentiated: then the chunked operation
    computes it."""
    options: Dict[str, Any] = {
        "initial_state": initial_state,
        "output_final_state": output_final_state,
        "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        "cu_seqlens": cu_seqlens,
    }
    tensors = (query, key, value, g, beta, initial_state)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
        return chunk_gated_delta_rule(query, key, value, g, beta, **options)
    return fused_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta, **options)


# Names to rebind. Current versions call the torch_ functions of their module; older ones take FLA's, imported into the
# module, when they build a layer, with the torch_ functions as a fallback, and keep what they took in the layer.
_MODULE_NAMES: Dict[str, Callable[..., Any]] = {
    "torch_chunk_gated_delta_rule": chunk,
    "torch_recurrent_gated_delta_rule": recurrent,
    "chunk_gated_delta_rule": chunk,
    "fused_recurrent_gated_delta_rule": recurrent,
}
# The convolution; Kimi Linear has a delta rule of its own behind it.
_CONV_NAMES: Dict[str, Callable[..., Any]] = {"causal_conv1d_fn": conv_fn, "causal_conv1d_update": conv_update}
_CONV_MODELS = (*_MODELS, "kimi_linear")
_LAYER_NAMES: Dict[str, Callable[..., Any]] = {
    "chunk_gated_delta_rule": chunk,
    "recurrent_gated_delta_rule": recurrent,
}


def _replace(holder: Any, names: Dict[str, Callable[..., Any]]) -> bool:
    found = False
    for name, function in names.items():
        before = vars(holder).get(name)
        if before is None or before is function:
            continue
        _replaced.append((holder, name, before))
        setattr(holder, name, function)
        found = True
    return found


# Classes whose forward is replaced, so that a second call of patch() does not wrap it again.
_classes: List[type] = []


def _replace_forward(holder: type, forward: Callable[..., Any]) -> None:
    _replaced.append((holder, "forward", vars(holder)["forward"]))
    _classes.append(holder)
    setattr(holder, "forward", forward)


def _patch_classes(name: str, module: Any) -> List[str]:
    """Replaces the forwards of a module's norm and layer classes; returns their names."""
    found = []
    norm_class = getattr(module, NORMS.get(name, ""), None)
    for holder, make in (
        (norm_class, norm_forward),
        (
            getattr(module, LAYERS[name][0], None) if name in LAYERS else None,
            lambda original: layer_forward(original, LAYERS[name][1], norm_class),
        ),
    ):
        # Layers of versions that keep their functions in the layer are left to these.
        if holder is None or holder in _classes or "forward" not in vars(holder):
            continue
        if holder is not norm_class and not hasattr(module, "causal_conv1d_update"):
            continue
        _replace_forward(holder, make(vars(holder)["forward"]))
        found.append(f"{module.__name__}.{holder.__name__}")
    return found


def patch(model: Optional[torch.nn.Module] = None, *, layers: bool = True) -> List[str]:
    """Makes Transformers' gated delta rule models compute with this library. Calling it again adds what is new.

    Three things are replaced: the functions that the models' modules call (gated delta rule and convolution), the
    forward of their gated norms, and the forward of their linear-attention layers, which then run as
    flash_qla.gated_delta_net(). A layer that is not made as its class was in the versions that are known (5.17 to
    5.23: other types or hooks on conv1d or the norm), one that is exported, and one that records gradients together
    with a cache keep Transformers' own forward, with the functions in it.

    Packed sequences (`cu_seq_lens_q`) bound the convolution and the delta rule. Transformers itself bounds the
    convolution by `seq_idx` alone.

    Args:
        model: a model that was built before; needed for versions (4.57 to early 5) whose layers keep the functions that
            they were built with.
        layers: also replace the forwards of the norms and of the layers.

    Returns:
        Names of the modules, classes and layers that were changed.

    Raises:
        ImportError: transformers is not installed, or none of its models has the functions that this knows.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ImportError("patch: transformers must be installed (it was not found)")
    changed, known = [], False
    for name in _CONV_MODELS:
        path = f"transformers.models.{name}.modeling_{name}"
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError:
            continue  # this version of Transformers has no such model
        names = dict(_MODULE_NAMES) if name in _MODELS else {}
        for function, own in _CONV_NAMES.items():
            # Transformers' own alone: older versions import the package's, which has other names for its arguments.
            if getattr(vars(module).get(function), "__module__", "").startswith("transformers."):
                names[function] = own
        known |= any(hasattr(module, function) for function in _MODULE_NAMES)
        if _replace(module, names):
            changed.append(path)
        if layers:
            changed += _patch_classes(name, module)
    if not known:
        raise ImportError("patch: transformers must have one of these models: " + ", ".join(_MODELS))
    if model is not None:
        changed += [name for name, layer in model.named_modules() if _replace(layer, _LAYER_NAMES)]
    return changed


def unpatch() -> None:
    """Puts back what patch() replaced."""
    _classes.clear()
    while _replaced:
        holder, name, before = _replaced.pop()
        setattr(holder, name, before)


def status() -> Tuple[bool, str]:
    """Whether Transformers' models would compute with this library, and why not. Imports nothing of Transformers."""
    if importlib.util.find_spec("transformers") is None:
        return False, "not installed"
    return True, "by flash_qla.integrations.transformers.patch(), and through FLA without it"
