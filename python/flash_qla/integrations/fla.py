"""Flash Linear Attention: this library as a backend of fla's `chunk_gated_delta_rule`.

    import flash_qla.integrations.fla as integration

    integration.register()        # calls that this library computes go to it, the others stay with fla
    integration.unregister()

fla's own switches apply: FLA_FLASH_QLA_NATIVE=0 turns the backend off, FLA_DISABLE_BACKEND_DISPATCH=1 all of them.
"""

from __future__ import annotations

import importlib
from typing import Any, Optional, Tuple

from .. import chunk_gated_delta_rule

__all__ = ["register", "unregister"]

_OPERATION = "gated_delta_rule"
_BACKEND_TYPE = "flash_qla_native"

# Module of fla that holds the backend, once it does; and whether the backend takes calls.
_holder: Optional[str] = None
_active = False


def _reject(q: Any, k: Any, v: Any, cp_context: Any = None, **kwargs: Any) -> Optional[str]:
    """Why a call stays with fla; None: it does not. Looks at metadata alone: it runs on every call."""
    if not _active:
        return "was unregistered"
    if not q.is_cuda:
        return "needs CUDA tensors"
    if not q.dtype == k.dtype == v.dtype:
        return "needs q, k, v of one dtype"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return "needs head dimensions up to 256"
    if cp_context is not None:
        return "does not support context parallelism over cards"
    if kwargs.get("chunk_size", 64) != 64:
        return "needs chunk_size 64"
    if "transpose_state_layout" in kwargs or kwargs.get("head_first"):
        return "does not support deprecated layouts"
    return None


def _backend_class(base: type) -> type:
    class FlashQLANativeBackend(base):
        backend_type = _BACKEND_TYPE
        package_name = "flash_qla"
        env_var = "FLA_FLASH_QLA_NATIVE"
        default_enable = True
        # fla takes the lowest first; its own FlashQLA backend has 3.
        priority = 2

        def chunk_gated_delta_rule_verifier(
            self, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any
        ) -> Tuple[bool, Optional[str]]:
            reason = _reject(q, k, v, **kwargs)
            return reason is None, reason

        def chunk_gated_delta_rule(
            self,
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            scale: Optional[float] = None,
            initial_state: Any = None,
            output_final_state: bool = False,
            use_qk_l2norm_in_kernel: bool = False,
            use_beta_sigmoid_in_kernel: bool = False,
            allow_neg_eigval: bool = False,
            state_v_first: bool = False,
            cu_seqlens: Any = None,
            cu_seqlens_cpu: Any = None,
            chunk_indices: Any = None,
            cp_context: Any = None,
            **kwargs: Any,
        ) -> Tuple[Any, Any]:
            # fla ignores keywords that it does not know; so does a backend of it.
            return chunk_gated_delta_rule(
                q,
                k,
                v,
                g,
                beta,
                scale,
                initial_state,
                output_final_state,
                use_qk_l2norm_in_kernel,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                use_gate_in_kernel=kwargs.get("use_gate_in_kernel", False),
                A_log=kwargs.get("A_log"),
                dt_bias=kwargs.get("dt_bias"),
                state_v_first=state_v_first,
                cu_seqlens=cu_seqlens,
            )

    return FlashQLANativeBackend


def _old_registry(backends: Any) -> Any:
    """fla before 0.6 builds an operation's registry when it is first used, and would overwrite an earlier one."""
    backends.BackendRegistry.ensure_initialized(_OPERATION)
    return backends.BackendRegistry._registries[_OPERATION]


def register() -> str:
    """Registers the backend with the installed fla. Calling it again changes nothing.

    Returns:
        The module of fla that took it.

    Raises:
        ImportError: fla is not installed.
        NotImplementedError: this fla registers backends in a way that is not known here.
    """
    global _active, _holder
    _active = True
    if _holder is not None:
        return _holder
    try:
        backends = importlib.import_module("fla.backends")  # fla 0.6 and later
    except ModuleNotFoundError:
        try:
            backends = importlib.import_module("fla.ops.backends")
        except ModuleNotFoundError as error:
            raise ImportError("register: fla must be installed (it was not found)") from error
    try:
        backend = _backend_class(backends.BaseBackend)
        if hasattr(backends, "register"):
            backends.register(_OPERATION)(backend)
        else:
            _old_registry(backends).register(backend())
    except (AttributeError, KeyError, TypeError) as error:
        raise NotImplementedError(
            f"register: fla must be a version whose registry of backends is known ({backends.__name__}: {error})"
        ) from error
    _holder = backends.__name__
    return _holder


def unregister() -> None:
    """Makes the backend decline every call, so that fla goes on to its next one: fla's registry gives nothing back."""
    global _active
    _active = False
