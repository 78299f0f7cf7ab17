"""vLLM: the gated delta rule of its Qwen layers, by the entry point `vllm.general_plugins`.

vLLM calls register() in each of its processes. From then on, where the fast kernels of this library take a model's
heads, they compute the prefill of its QwenGatedDeltaNetAttention layers (Qwen3-Next, Qwen3.5 and their kin):

- the operation, ChunkGatedDeltaRule, with vLLM's own steps around it;
- the layer, which is one call in place of the gathering of states, their zeroing, the kernel behind the convolution,
  the scattering and the concatenation: states are read and written in vLLM's pool in the dtype that they have, gates
  and norms are computed in the kernel, and in cache mode "align" the states for the prefix cache leave the same launch,
  so that the scheduler need not split a prefill for them.

Batches of decode tokens alone and batches with speculative tokens stay with vLLM's own kernels.

FLASH_QLA_VLLM=0 turns it off, FLASH_QLA_VLLM=operation keeps to the operation, FLASH_QLA_VLLM=1 also tries versions of
vLLM that are not known here. Another `--gdn-prefill-backend` than auto is the user's choice and stays.
FLASH_QLA_AUTO_CP is auto_cp (1, 0 or invariant)."""

from __future__ import annotations

import importlib
import inspect
import logging
from types import ModuleType
from typing import Any, Dict, Optional, Tuple

from . import _engines

__all__ = ["register", "status"]

SWITCH = "FLASH_QLA_VLLM"
KNOWN_VERSIONS = ("0.33",)

_QWEN = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
_OPERATION, _LAYER = "ChunkGatedDeltaRule", "QwenGatedDeltaNetAttention"

# The slot that means none in vLLM's block tables (NULL_BLOCK_ID), and tokens between which its checkpoints may lie.
_NULL_SLOT = 0
_CHECKPOINT_ALIGNMENT = 64

# What the adapters touch beside the two classes. A vLLM that lacks one of these is left alone.
_MODULE_NAMES = (
    _OPERATION,
    _LAYER,
    "GDNAttentionMetadata",
    "MambaPrefillCheckpointExporter",
    "causal_conv1d_fn",
    "current_platform",
    "get_current_vllm_config",
    "get_forward_context",
    "is_conv_state_dim_first",
)
_METADATA_FIELDS = (
    "checkpoint",
    "has_initial_state",
    "non_spec_query_start_loc",
    "non_spec_state_indices_tensor",
    "num_actual_tokens",
    "num_decode_tokens",
    "num_decodes",
    "num_prefills",
    "prefill_has_initial_state",
    "prefill_query_start_loc",
    "prefill_state_indices",
    "spec_sequence_masks",
)
_OPERATION_PARAMETERS = (
    "self",
    "q",
    "k",
    "v",
    "g",
    "beta",
    "initial_state",
    "output_final_state",
    "cu_seqlens",
    "chunk_indices",
    "chunk_offsets",
    "use_qk_l2norm_in_kernel",
    "core_attn_out",
    "aiter_prefill_metadata",
)
_LAYER_PARAMETERS = ("self", "mixed_qkv", "b", "a", "core_attn_out")


def register() -> None:
    """The entry point. Never raises: an exception here would end the engine. Calling it again changes nothing."""
    _engines.attempt("vLLM", _register)


def _register() -> None:
    setting = _engines.setting_of_known(
        "vLLM",
        SWITCH,
        "operation",
        lambda: str(importlib.import_module("vllm").__version__),
        KNOWN_VERSIONS,
    )
    if setting is None:
        return
    registry = importlib.import_module("vllm.model_executor.custom_op")
    if _OPERATION in registry.op_registry_oot:
        return _engines.say_once(logging.INFO, f"flash_qla: vLLM's {_OPERATION} has been taken over already")
    module = importlib.import_module(_QWEN)
    _check_interface(module)
    operation = _operation_class(module)
    layer = _layer_class(module) if setting != "operation" and _LAYER not in registry.op_registry_oot else None
    registry.CustomOp.register_oot(name=_OPERATION)(operation)
    if layer is not None:
        registry.PluggableLayer.register_oot(name=_LAYER)(layer)


def _parameters(function: Any) -> Tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def _check_interface(module: ModuleType) -> None:
    """NotImplementedError where vLLM does not have what the adapters call, or has it in another form."""
    lacking = _engines.missing(module, _MODULE_NAMES)
    if not lacking:
        fields = getattr(module.GDNAttentionMetadata, "__dataclass_fields__", {})
        lacking = tuple(f"GDNAttentionMetadata.{name}" for name in _METADATA_FIELDS if name not in fields)
    if lacking:
        raise NotImplementedError(f"it has no {', '.join(lacking)}")
    for owner, method, expected in (
        (_OPERATION, "forward_native", _OPERATION_PARAMETERS),
        (_LAYER, "_forward_core", _LAYER_PARAMETERS),
    ):
        found = _parameters(getattr(getattr(module, owner), method))
        if found != expected:
            raise NotImplementedError(f"{owner}.{method} takes {', '.join(found)}, and not {', '.join(expected)}")


def _decline(module: ModuleType, config: Any) -> Optional[str]:
    """Why a model's prefill stays with vLLM's kernels; None: it does not. Says so in the log."""
    additional = config.additional_config
    asked = additional.get("gdn_prefill_backend", "auto") if isinstance(additional, dict) else "auto"
    asked = str(asked).strip().lower()
    if asked not in ("auto", "flash_qla"):
        reason: Optional[str] = f"gdn_prefill_backend={asked} was asked for"
    elif not module.current_platform.is_cuda():
        reason = "the platform is not CUDA"
    else:
        reason = _slow_reason(config.model_config)
    if reason is not None:
        level = logging.WARNING if asked == "flash_qla" else logging.INFO
        _engines.say_once(level, f"flash_qla: vLLM's kernels compute the gated delta rule: {reason}")
    return reason


def _slow_reason(model: Any) -> Optional[str]:
    from .. import _paths

    text = model.hf_text_config
    K, V = getattr(text, "linear_key_head_dim", None), getattr(text, "linear_value_head_dim", None)
    if K is None or V is None:
        return "the model names no head dimensions"
    return _paths.slow_reason(_current_device(), model.dtype, K, V, False)


def _current_device() -> int:
    import torch

    return torch.cuda.current_device()


def _say_taken(what: str) -> None:
    from .._paths import FAST_PATHS
    from .._tools import build_info

    _engines.say_once(
        logging.INFO,
        f"flash_qla {build_info()['version']}: vLLM's {what} on path {', '.join(FAST_PATHS)}; {SWITCH}=0: off",
    )


def _operation_class(module: ModuleType) -> type:
    base: Any = getattr(module, _OPERATION)

    class FlashQLAChunkGatedDeltaRule(base):
        """vLLM's operation, computed by this library where that is faster."""

        def __init__(self) -> None:
            super().__init__()
            if _decline(module, module.get_current_vllm_config()) is not None:
                return
            self._flash_qla_auto_cp = _engines.auto_cp()
            self._forward_method = self.forward_flash_qla
            # Nothing of FlashInfer's is compiled ahead, and no checkpoints are asked of this operation.
            self.gdn_prefill_backend = "triton"
            _say_taken("operation ChunkGatedDeltaRule")

        def forward_flash_qla(
            self,
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            initial_state: Any,
            output_final_state: bool,
            cu_seqlens: Any = None,
            chunk_indices: Any = None,
            chunk_offsets: Any = None,
            use_qk_l2norm_in_kernel: bool = True,
            core_attn_out: Any = None,
            aiter_prefill_metadata: Any = None,
            **unknown: Any,
        ) -> Tuple[Any, Any]:
            """q, k [1, T, Hq, K], v [1, T, Hv, V], g (log decay) and beta [1, T, Hv], initial_state [N, Hv, V, K].
            chunk_indices and chunk_offsets describe chunks of cu_seqlens, which this library finds on the device."""
            if unknown:
                _engines.refuse_unknown(_OPERATION, unknown, f"{SWITCH}=0")
            from ..ops.gated_delta_rule import chunk_gated_delta_rule

            o, final_state = chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                output_final_state=output_final_state,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                state_v_first=True,
                cu_seqlens=cu_seqlens,
                auto_cp=self._flash_qla_auto_cp,
            )
            if core_attn_out is not None:
                core_attn_out.reshape(-1)[: o.numel()].copy_(o.reshape(-1))
            return o, final_state

    return FlashQLAChunkGatedDeltaRule


def _layer_class(module: ModuleType) -> type:
    base: Any = getattr(module, _LAYER)

    class FlashQLAQwenGatedDeltaNetAttention(base):
        """vLLM's layer, whose batches with prefills are computed by this library where that is faster."""

        def __init__(self, config: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, vllm_config, *arguments, **named)
            self._flash_qla_auto_cp: Any = None  # of a layer that vLLM computes
            if _decline(module, vllm_config) is not None:
                return
            self._flash_qla_auto_cp = _engines.auto_cp()
            self._flash_qla_limits = (
                vllm_config.scheduler_config.max_num_batched_tokens,
                vllm_config.scheduler_config.max_num_seqs,
            )
            # With speculative tokens some prefills go to vLLM's code, which knows no checkpoints of this library.
            if vllm_config.cache_config.mamba_cache_mode == "align" and self.speculative_config is None:
                self._checkpoint_alignment = _CHECKPOINT_ALIGNMENT
                self._max_num_batched_tokens = self._flash_qla_limits[0]
                self._checkpoint_exporter = module.MambaPrefillCheckpointExporter(state_len=self.conv_kernel_size - 1)
            _say_taken("layer QwenGatedDeltaNetAttention: prefill in the pool")

        def _warmup_prefill_kernels(self, qkv_or_qkvz: Any, v_dim: int) -> None:
            """There is nothing to compile. vLLM measures here how much memory is left for its cache: the scratch of the
            largest call has to be seen."""
            if self._flash_qla_auto_cp is None or self.speculative_config is not None:
                return super()._warmup_prefill_kernels(qkv_or_qkvz, v_dim)
            if not self._prefill_kernels_warmed_up:
                self._prefill_kernels_warmed_up: bool = True
                _touch_scratch(self, qkv_or_qkvz)

        def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> None:
            metadata = _prefill_metadata(module, self, mixed_qkv, core_attn_out)
            if metadata is None:
                return super()._forward_core(mixed_qkv, b, a, core_attn_out)
            _compute_core(module, self, metadata, mixed_qkv, b, a, core_attn_out)

    return FlashQLAQwenGatedDeltaNetAttention


def _heads(layer: Any) -> Tuple[int, int]:
    """Key heads and value heads on this card."""
    return layer.num_k_heads // layer.tp_size, layer.num_v_heads // layer.tp_size


def _touch_scratch(layer: Any, like: Any) -> None:
    from .._tools import workspace_size

    tokens, sequences = layer._flash_qla_limits
    size = workspace_size(
        "gated_delta_rule_prefill",
        tokens,
        sequences,
        *_heads(layer),
        layer.head_k_dim,
        layer.head_v_dim,
        dtype=like.dtype,
        gate_dtype=like.dtype,
        state_dtype=layer.get_state_dtype()[1],
        device=like.device,
        checkpoint_offsets=sequences if layer._checkpoint_alignment is not None else 0,
        state_v_first=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        auto_cp=layer._flash_qla_auto_cp,
    )
    like.new_empty(size, dtype=_uint8())


def _uint8() -> Any:
    import torch

    return torch.uint8


def _prefill_metadata(module: ModuleType, layer: Any, mixed_qkv: Any, core_attn_out: Any) -> Any:
    """The metadata of a batch that this library computes; None: vLLM does. Sizes and flags of the host alone decide."""
    if layer._flash_qla_auto_cp is None or core_attn_out.dtype != mixed_qkv.dtype:
        return None
    by_layer = module.get_forward_context().attn_metadata
    metadata = by_layer.get(layer.prefix) if isinstance(by_layer, dict) else None
    if not isinstance(metadata, module.GDNAttentionMetadata) or metadata.num_prefills == 0:
        return None
    if metadata.spec_sequence_masks is not None or metadata.num_decodes != metadata.num_decode_tokens:
        return None
    return metadata


def _compute_core(
    module: ModuleType, layer: Any, metadata: Any, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any
) -> None:
    """The convolution as vLLM has it, then decode tokens and prefills, each by one call on the pool."""
    from ..ops.gated_delta_rule import gated_delta_rule_decode, gated_delta_rule_prefill

    tokens, decodes = metadata.num_actual_tokens, metadata.num_decodes
    mixed_qkv, b, a = mixed_qkv[:tokens], b[:tokens], a[:tokens]
    conv_state, pool = layer.kv_cache[0], layer.kv_cache[1]
    if not module.is_conv_state_dim_first():
        conv_state = conv_state.transpose(-1, -2)
    weight = layer.conv1d.weight
    convolved = module.causal_conv1d_fn(
        mixed_qkv.transpose(0, 1),
        weight.view(weight.size(0), weight.size(2)),
        layer.conv1d.bias,
        activation=layer.activation,
        conv_states=conv_state,
        has_initial_state=metadata.has_initial_state,
        cache_indices=metadata.non_spec_state_indices_tensor,
        query_start_loc=metadata.non_spec_query_start_loc,
        metadata=metadata,
    ).transpose(0, 1)
    key_heads, value_heads = _heads(layer)
    keys = key_heads * layer.head_k_dim
    q = convolved[:, :keys].unflatten(1, (key_heads, layer.head_k_dim))
    k = convolved[:, keys : 2 * keys].unflatten(1, (key_heads, layer.head_k_dim))
    v = convolved[:, 2 * keys :].unflatten(1, (value_heads, layer.head_v_dim))
    common: Dict[str, Any] = {
        "null_index": _NULL_SLOT,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "use_beta_sigmoid_in_kernel": True,
    }
    inputs = {"q": q, "k": k, "v": v, "g": a, "beta": b, "out": core_attn_out}
    if decodes > 0:
        rows: Dict[str, Any] = {name: x[:decodes].unsqueeze(1) for name, x in inputs.items()}
        slots = metadata.non_spec_state_indices_tensor[:decodes]
        gated_delta_rule_decode(state_pool=pool, initial_state_indices=slots, **rows, **common)
    packed: Dict[str, Any] = {name: x[decodes:tokens].unsqueeze(0) for name, x in inputs.items()}
    offsets = metadata.prefill_query_start_loc
    gated_delta_rule_prefill(
        state_pool=pool,
        initial_state_indices=metadata.prefill_state_indices,
        cu_seqlens=offsets,
        has_initial_state=metadata.prefill_has_initial_state,
        auto_cp=layer._flash_qla_auto_cp,
        **packed,
        **_listed(metadata.checkpoint, offsets),
        **common,
    )
    if metadata.checkpoint is not None:  # the convolution's windows; the states are there already
        layer._checkpoint_exporter.export(
            metadata.checkpoint,
            raw_qkv=mixed_qkv,
            conv_state=conv_state,
            cu_seqlens=metadata.non_spec_query_start_loc,
        )


def _listed(checkpoint: Any, offsets: Any) -> Dict[str, Any]:
    """Where the prefills leave states for the prefix cache: at most one a sequence, some tokens after its start, in a
    slot of its own. An offset of 0 means none, and its slot is then the one that means none. The prefills' rows are the
    last of the checkpoint's."""
    if checkpoint is None:
        return {}
    rows = offsets.shape[0] - 1
    positions = offsets[:-1] + checkpoint.checkpoint_offsets[-rows:]
    # A sequence without one has the position of its own start: of the first token, which no list may name.
    return {
        "checkpoint_offsets": positions.clamp(min=1),
        "checkpoint_indices": checkpoint.state_indices[-rows:],
    }


def status() -> Tuple[bool, str]:
    """Whether vLLM's prefill would come here on this machine, and why not. Imports nothing of vLLM."""
    version = _engines.version_of("vllm")
    if version is None:
        return False, "not installed"
    if _engines.setting_of(SWITCH) == "0":
        return False, f"{SWITCH}=0"
    if _engines.setting_of(SWITCH) != "1":
        reason = _engines.unknown_version("vLLM", version, KNOWN_VERSIONS, SWITCH)
        if reason is not None:
            return False, reason
    reason = _engines.slow_on_this_machine()
    return reason is None, reason or f"prefill; {SWITCH}=0 turns it off"
