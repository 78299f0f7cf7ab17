"""Megatron-LM: the recurrence of its Gated DeltaNet layers, as a provider that a module specification hands down.

    from megatron.core.models.backends import get_backend_from_config
    from flash_qla.integrations.megatron_provider import GatedDeltaProvider

    provider = GatedDeltaProvider(get_backend_from_config(config))
    ModuleSpec(module=GatedDeltaNet, params={"kernel_backend": provider}, ...)

Everything but the recurrence "gdn" is answered by the provider that it wraps. Calls that this library's fast kernels do
not compute (other GPUs, other head dimensions) go on to that provider's recurrence, and the log says so once.

Releases up to 0.19 have no providers of recurrences: they import Flash Linear Attention's function, whose calls arrive
here by themselves where it dispatches (flash_qla.integrations.fla): from 0.5.2 on, not in the 0.4 that Megatron's extra
`dev` asks for. Leave the parameter out to turn this off. FLASH_QLA_AUTO_CP is auto_cp (1, 0 or invariant)."""

from __future__ import annotations

import importlib
import logging
from typing import Any, Callable, Dict, Optional, Tuple

from . import _engines

__all__ = ["GatedDeltaProvider", "kernel_metadata", "status"]

_METADATA = "megatron.core.ops.kernel_metadata"
_CONTRACT = "megatron.core.ops.ssm.gated_delta"
_RULE = "gated_delta_rule"  # the slot of a provider, and the attribute of a layer
_OFF = "leaving kernel_backend=GatedDeltaProvider(..) out"
_WITHOUT_PROVIDERS = ("0.16", "0.17", "0.18", "0.19")  # releases that import fla's function


class GatedDeltaProvider:
    """A provider of kernels: this library's recurrence for "gdn", all else from `base`.

    Args:
        base: what get_backend_from_config(config) returns. Wrap one that is configured: Megatron leaves a wrapper, and
            what it wraps, as they are.
    """

    def __init__(self, base: Any) -> None:
        _engines.auto_cp()  # a wrong value is told now, and not by the first step
        self._base = base

    def __getattr__(self, name: str) -> Any:
        if name == "_base":  # of an object that is being copied or unpickled
            raise AttributeError(name)
        return getattr(self._base, name)

    def gated_delta_rule(self, variant: str, deterministic: Optional[bool] = None) -> Callable[..., Any]:
        """The slot, in both of its published forms: newer providers are configured once and are not told
        `deterministic`. Ours repeats its bits in either case."""
        if variant != "gdn":
            return self._base_rule(variant, deterministic)
        version = _engines.version_of("megatron-core") or "main"
        _engines.say_once(logging.INFO, f"flash_qla: Megatron {version}: training of gdn layers; {_OFF} turns it off")
        return _rule(lambda: self._base_rule(variant, deterministic))

    def _base_rule(self, variant: str, deterministic: Optional[bool]) -> Callable[..., Any]:
        asked = {} if deterministic is None else {"deterministic": deterministic}
        slot = getattr(self._base, _RULE, None)
        rule = None if slot is None else slot(variant=variant, **asked)
        if rule is None:  # a provider older than the slot, which has none or inherits one that says nothing
            name = type(self._base).__name__
            raise NotImplementedError(f"GatedDeltaProvider: {name} must provide the recurrence {variant} (it does not)")
        return rule


def _rule(base_rule: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """This library's recurrence as a layer of Megatron calls it. base_rule() is asked for where that would be slow."""
    auto_cp = _engines.auto_cp()

    def chunk_gated_delta_rule(
        q: Any,
        k: Any,
        v: Any,
        g: Any,
        beta: Any = None,
        *,
        scale: Optional[float] = None,
        initial_state: Any = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Any = None,
        **kwargs: Any,
    ) -> Tuple[Any, Any]:
        """q, k [B, T, Hq, K], v [B, T, Hv, V], g (log decay) and beta [B, T, Hv]; states [N, Hv, K, V]."""
        from ..ops.gated_delta_rule import chunk_gated_delta_rule as rule

        _engines.refuse_unknown(_RULE, kwargs, _OFF)
        options: Dict[str, Any] = {
            "scale": scale,
            "initial_state": initial_state,
            "output_final_state": output_final_state,
            "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
            "cu_seqlens": cu_seqlens,
        }
        reason = _slow_reason(q, k, v, g, beta, initial_state)
        if reason is None:
            return rule(q, k, v, g, beta, auto_cp=auto_cp, **options)
        _engines.say_once(logging.WARNING, f"flash_qla: Megatron's own recurrence is called: {reason}")
        return base_rule()(q, k, v, g, beta=beta, **options)

    return chunk_gated_delta_rule


def _slow_reason(q: Any, k: Any, v: Any, *more: Any) -> Optional[str]:
    """Why a call would be slower here than with Megatron's own recurrence, which has no kernels for the CPU."""
    import torch

    from .. import _paths

    if not q.is_cuda:
        return None
    needs_grad = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, *more))
    return _paths.slow_reason(q.device.index, q.dtype, q.shape[-1], v.shape[-1], needs_grad)


def kernel_metadata() -> Optional[Any]:
    """What this library's recurrence is declared as where Megatron has declarations; else None. (Versions of its main
    branch have megatron.core.ops.kernel_metadata.)"""
    from .. import determinism

    try:
        module = importlib.import_module(_METADATA)
    except ModuleNotFoundError:
        return None
    promised = determinism(_engines.auto_cp())
    more = ", ".join(name for name, holds in promised.items() if holds and name != "repeatable")
    scope = "Forward and backward give the same bits from run to run, packed sequences included, for one build, one GPU"
    scope += " model and one path of flash_qla."
    if more:
        scope += f" Also {more}."
    return module.KernelMetadata(
        name="gdn.flash_qla.chunk_gated_delta_rule",
        requires=(module.Dependency("flash-qla-native", "flash_qla", ("chunk_gated_delta_rule",)),),
        determinism=module.DeterminismResult(module.Determinism.DETERMINISTIC, scope),
        contract=_CONTRACT,
    )


def status() -> Tuple[bool, str]:
    """Whether Megatron's layers could be given this library on this machine, and why not. Imports nothing of it."""
    version = _engines.version_of("megatron-core")
    if version is None:
        return False, "not installed"
    reason = _engines.slow_on_this_machine(needs_grad=True)
    if reason is not None:
        return False, reason
    if _engines.is_version(version, _WITHOUT_PROVIDERS):
        return False, "calls fla: from fla-core 0.5.2 on that comes here (its own extra asks for 0.4)"
    return True, "by kernel_backend=GatedDeltaProvider(base)"
