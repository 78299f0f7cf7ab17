"""TensorRT-LLM: prefill of its Qwen3-Next and Qwen3.5 layers (the PyTorch backend).

    import flash_qla.integrations.tensorrt_llm as integration

    integration.patch()           # before the first forward
    integration.unpatch()         # everything as it was

TensorRT-LLM has no plugins, so it is asked for in every process that runs a model. States are read and written in its
pool, in the dtype that they have: its adapter for FlashInfer gathers them, converts them to float32 on Hopper, and
scatters them back. Calls that this library's fast kernels do not compute go on to TensorRT-LLM's own function. Decode
and verification stay with TensorRT-LLM.

TLLM_USE_FLASHINFER_GDN_PREFILL=0 beside it saves the scratch memory that TensorRT-LLM sets aside for FlashInfer on
Hopper. TLLM_MAMBA_FOLD_SAVE_LAST=1 needs FlashInfer's function, and TensorRT-LLM says so. FLASH_QLA_AUTO_CP is auto_cp
(1, 0 or invariant)."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Callable, Dict, Optional, Tuple

from . import _engines

__all__ = ["patch", "status", "unpatch"]

_MIXER = "tensorrt_llm._torch.modules.mamba.gdn_mixer"
_RESOLVE = "_resolve_chunk_gated_delta_rule"
_USES_FLASHINFER = "_gdn_prefill_uses_flashinfer"  # where a version has it, it remembers what was resolved
_NOWHERE = -1  # no slot

# The module that is patched, and its function before.
_patched: Optional[Tuple[Any, Callable[[], Callable[..., Any]]]] = None


def patch() -> bool:
    """Makes TensorRT-LLM's prefill compute with this library. Calling it again changes nothing.

    Returns:
        Whether it does. Where it would be slower than TensorRT-LLM's own kernels nothing is changed, and the log says
        why.

    Raises:
        ImportError: TensorRT-LLM is not installed, or has no such function as is replaced here.
    """
    global _patched
    mixer = importlib.import_module(_MIXER)
    if not hasattr(mixer, _RESOLVE):
        raise ImportError(f"patch: {_MIXER} must have {_RESOLVE} (it does not)")
    if _patched is not None:
        return True
    auto_cp = _engines.auto_cp()
    version = _engines.version_of("tensorrt-llm") or "of unknown version"
    reason = _engines.slow_on_this_machine()
    if reason is not None:
        _engines.say_once(logging.WARNING, f"flash_qla: TensorRT-LLM {version} was left alone: {reason}")
        return False
    before = getattr(mixer, _RESOLVE)
    adapter = _adapter(before, auto_cp)
    setattr(mixer, _RESOLVE, lambda: adapter)
    _patched = (mixer, before)
    _forget(mixer)
    _engines.say_once(logging.INFO, f"flash_qla: TensorRT-LLM {version}: prefill; unpatch() turns it off")
    return True


def unpatch() -> None:
    """Puts back what patch() replaced."""
    global _patched
    if _patched is not None:
        mixer, before = _patched
        setattr(mixer, _RESOLVE, before)
        _patched = None
        _forget(mixer)


def _forget(mixer: Any) -> None:
    """The mixer finds out anew whether it calls FlashInfer, which takes exp(g) for g."""
    remembered: Any = getattr(mixer, _USES_FLASHINFER, None)
    if hasattr(remembered, "cache_clear"):
        remembered.cache_clear()


def _adapter(resolve_own: Callable[[], Callable[..., Any]], auto_cp: _engines.AutoCp) -> Callable[..., Any]:
    def chunk_gated_delta_rule(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any,
        scale: Optional[float] = None,
        initial_state: Any = None,
        initial_state_indices: Any = None,
        inplace_indexed_state_update: bool = False,
        output_final_state: bool = False,
        cu_seqlens: Any = None,
        head_first: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        output: Any = None,
        *,
        use_cp: Any = None,
        g_is_linear: bool = False,
        state_workspace: Any = None,
    ) -> Tuple[Any, Any]:
        """q, k [1, T, Hk, K], v [1, T, Hv, V], g (log decay) and beta [1, T, Hv]; initial_state [slots, Hv, V, K], or
        [N, Hv, V, K] without indices. Returns (o, final states in initial_state's dtype; None where they were written
        in place, or not asked for). use_cp and state_workspace are FlashInfer's means, and change nothing."""
        if g_is_linear:
            raise ValueError("chunk_gated_delta_rule: g must be the logarithm of the decay (g_is_linear is True)")
        if head_first:
            raise ValueError("chunk_gated_delta_rule: head_first must be False (it is True)")
        if inplace_indexed_state_update and initial_state_indices is None:
            raise ValueError("chunk_gated_delta_rule: inplace_indexed_state_update needs initial_state_indices")
        common: Dict[str, Any] = {
            "scale": scale,
            "cu_seqlens": cu_seqlens,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
        }
        reason = _slow_reason(q, v)
        if reason is not None:
            _engines.say_once(logging.WARNING, f"flash_qla: TensorRT-LLM's own prefill is called: {reason}")
            return resolve_own()(
                q,
                k,
                v,
                g,
                beta,
                initial_state=initial_state,
                initial_state_indices=initial_state_indices,
                inplace_indexed_state_update=inplace_indexed_state_update,
                output_final_state=output_final_state,
                output=output,
                **common,
            )
        return _prefill(
            {"q": q, "k": k, "v": v, "g": g, "beta": beta, "auto_cp": auto_cp, **common},
            initial_state,
            initial_state_indices,
            inplace_indexed_state_update,
            output_final_state,
            output,
        )

    return chunk_gated_delta_rule


def _slow_reason(q: Any, v: Any) -> Optional[str]:
    from .. import _paths

    if not q.is_cuda:
        return None
    return _paths.slow_reason(q.device.index, q.dtype, q.shape[-1], v.shape[-1], False)


def _prefill(
    call: Dict[str, Any], states: Any, slots: Any, in_place: bool, wants_states: bool, output: Any
) -> Tuple[Any, Any]:
    import torch

    from ..ops.gated_delta_rule import chunk_gated_delta_rule, gated_delta_rule_prefill

    if states is None:
        o, final = chunk_gated_delta_rule(state_v_first=True, output_final_state=wants_states, **call)
        if output is not None:
            o = output.copy_(o)
        return o, final
    if in_place:
        o = gated_delta_rule_prefill(
            state_pool=states, initial_state_indices=slots, null_index=_NOWHERE, out=output, **call
        )
        return o, None
    # What is read is not written: the final states have slots of their own, or none.
    own = states[slots] if slots is not None else states.clone() if wants_states else states
    rows = torch.arange(own.shape[0], device=own.device, dtype=torch.int32)
    final_rows = None if wants_states else torch.full_like(rows, _NOWHERE)
    o = gated_delta_rule_prefill(
        state_pool=own, initial_state_indices=rows, final_state_indices=final_rows, out=output, **call
    )
    return o, own if wants_states else None


def status() -> Tuple[bool, str]:
    """Whether TensorRT-LLM could be patched on this machine, and why not. Imports nothing of it."""
    if _engines.version_of("tensorrt-llm") is None:
        return False, "not installed"
    reason = _engines.slow_on_this_machine()
    return reason is None, reason or "by flash_qla.integrations.tensorrt_llm.patch()"
