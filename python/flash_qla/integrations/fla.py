"""Flash Linear Attention: which calls of fla's chunk_gated_delta_rule this library takes.

From 0.5.2 on fla hands calls to any importable package `flash_qla`, whatever GPU it has kernels for. Registered here,
the library decides: calls that its fast kernels compute come here, with the gate, the sigmoid and negative eigenvalues
computed in the kernel among them; all others stay with fla's own kernels. Importing flash_qla registers where fla is
there already, and so does the first call on a GPU where fla came later; register() does it at a time of your choice.

register_layer() does the same for what fla 0.6 dispatches around the delta rule, its short convolution and its gated
norm. It is not done by an import: these kernels have not been timed beside fla's.

FLA_FLASH_QLA=0 turns it off, and so does FLA_DISABLE_BACKEND_DISPATCH=1, which turns off all backends of fla."""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from types import ModuleType
from typing import Any, Callable, List, Optional, Tuple

from .._identity import OFFERS_ITSELF

__all__ = ["register", "status", "unregister"]

_OPERATION = "gated_delta_rule"
_REGISTRIES = ("fla.backends", "fla.ops.backends")  # fla 0.6 and later; before
_BACKENDS = "fla.ops.gated_delta_rule.backends"
_DISPATCHES = (0, 5, 2)  # the first version of fla that hands calls to this package
_SWITCHES = (("FLA_FLASH_QLA", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1"))

_logger = logging.getLogger("flash_qla")

# Module of fla that holds the backend, once it does; and whether the backend takes calls.
_holder: Optional[str] = None
_active = False

# The same of what stands around the delta rule: the functions that were handed over, and whether calls are taken.
_layer_names: List[str] = []
_layer_active = False

# False once register_if_imported() has found fla: a call need not look for it any more.
awaited = OFFERS_ITSELF


def _device_index(q: Any) -> Optional[int]:
    """Number of the CUDA device of a tensor; None on another device."""
    return q.device.index if q.is_cuda else None


def _needs_grad(*tensors: Any) -> bool:
    import torch

    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _decline(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any, state_v_first: bool, cp_context: Any, kwargs: dict
) -> Optional[str]:
    """Why a call stays with fla; None: it does not. Looks at metadata alone: it runs on every call."""
    if not _active:
        return "was unregistered"
    device_index = _device_index(q)
    if device_index is None:
        return "needs CUDA tensors"
    if not q.dtype == k.dtype == v.dtype:
        return f"needs q, k, v of one dtype ({q.dtype}, {k.dtype}, {v.dtype})"
    if cp_context is not None:
        return "does not support context parallelism over cards"
    if kwargs.get("chunk_size", 64) != 64:
        return f"needs chunk_size 64 ({kwargs['chunk_size']})"
    if kwargs.get("head_first"):
        return "does not support head_first"
    if "transpose_state_layout" in kwargs and state_v_first:
        return "leaves it to fla to refuse state_v_first beside transpose_state_layout"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return f"needs head dimensions up to 256 ({q.shape[-1]}, {v.shape[-1]})"
    from .. import _paths

    needs_grad = _needs_grad(q, k, v, g, beta, initial_state, kwargs.get("A_log"), kwargs.get("dt_bias"))
    return _paths.slow_reason(device_index, q.dtype, q.shape[-1], v.shape[-1], needs_grad)


def _backend_class(base: type) -> type:
    """The backend. `base`: fla's own class for packages called flash_qla, or its base of all backends."""

    class FlashQLANativeBackend(base):
        # fla's registry has one entry for each type: this one takes the place of fla's own.
        backend_type = "flash_qla"
        package_name = "flash_qla"
        env_var = "FLA_FLASH_QLA"
        default_enable = True
        priority = 3

        def chunk_gated_delta_rule_verifier(
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
        ) -> Tuple[bool, Optional[str]]:
            reason = _decline(q, k, v, g, beta, initial_state, state_v_first, cp_context, kwargs)
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
            common = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel)
            named = {
                "use_beta_sigmoid_in_kernel": use_beta_sigmoid_in_kernel,
                "allow_neg_eigval": allow_neg_eigval,
                "state_v_first": state_v_first,
                "cu_seqlens": cu_seqlens,
                "cu_seqlens_cpu": cu_seqlens_cpu,
            }
            # A call that fla's own class knows goes through it, for those who watch or wrap its method.
            theirs = getattr(super(), "chunk_gated_delta_rule", None)
            if theirs is not None and super().chunk_gated_delta_rule_verifier(*common, **named, **kwargs)[0]:
                return theirs(*common, **named, **kwargs)
            from ..ops.gated_delta_rule import chunk_gated_delta_rule

            # fla ignores keywords that it does not know; so does a backend of it.
            known = ("use_gate_in_kernel", "A_log", "dt_bias", "transpose_state_layout")
            named.update({name: kwargs[name] for name in known if name in kwargs})
            return chunk_gated_delta_rule(*common, **named)

    return FlashQLANativeBackend


def _registry() -> ModuleType:
    """The module of the installed fla that keeps its backends."""
    for name in _REGISTRIES:
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("fla"):
                raise  # fla is there and lacks a package of its own
    raise ImportError("register: fla must be installed, 0.5.2 or newer (no registry of backends was found)")


def _base_class(registry: ModuleType) -> type:
    """fla's own backend for packages called flash_qla. Importing it first matters: fla registers it then, and would
    replace an entry that is already there."""
    try:
        return importlib.import_module(_BACKENDS).FlashQLABackend
    except (AttributeError, ModuleNotFoundError) as error:
        if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("fla"):
            raise
        return registry.BaseBackend


def _add(registry: ModuleType, backend: type) -> None:
    if hasattr(registry, "register"):
        registry.register(_OPERATION)(backend)
        return
    registry.BackendRegistry.ensure_initialized(_OPERATION)
    # A version that hands this operation to no backend (0.4.2 to 0.5.1) has no entry for it.
    registry.BackendRegistry._registries[_OPERATION].register(backend())


def register() -> str:
    """Makes the installed fla ask this library which calls of chunk_gated_delta_rule it takes. Calling it again changes
    nothing; no CUDA context is created.

    Returns:
        The module of fla that took the backend.

    Raises:
        ImportError: fla is not installed, or cannot be imported.
        NotImplementedError: this fla registers backends in a way that is not known here.
    """
    global _active, _holder, awaited
    _active, awaited = True, False
    if _holder is not None:
        return _holder
    registry = _registry()
    try:
        _add(registry, _backend_class(_base_class(registry)))
    except (AttributeError, KeyError, TypeError) as error:
        raise NotImplementedError(
            f"register: fla must be a version that hands chunk_gated_delta_rule to backends, as 0.5.2 and 0.6 do "
            f"({registry.__name__}: {type(error).__name__}: {error})"
        ) from error
    _holder = registry.__name__
    _log_registration()
    return _holder


def _log_registration() -> None:
    if not _logger.isEnabledFor(logging.INFO):
        return
    from .._paths import FAST_PATHS
    from .._tools import build_info

    switches = {"FLA_FLASH_QLA": "0", "FLA_DISABLE_BACKEND_DISPATCH": "1"}
    off = [f"{name}={value}" for name, value in switches.items() if os.environ.get(name) == value]
    taken = f"takes the calls of path {', '.join(FAST_PATHS)}; FLA_FLASH_QLA=0: off"
    what = f"switched off by {off[0]}" if off else taken
    _logger.info("flash_qla %s: fla's chunk_gated_delta_rule (%s): %s", build_info()["version"], _holder, what)


def register_if_imported(q: Any = None) -> None:
    """register() where this process has imported fla, and q, if given, is on a CUDA device. A fla that cannot be
    registered with is left as it is."""
    global awaited
    if not awaited or not any(name in sys.modules for name in _REGISTRIES):
        return
    if q is not None and _device_index(q) is None:
        return
    awaited = False
    try:
        register()
    except Exception as error:  # whatever is wrong with fla is not the affair of who imports or calls this library
        _logger.info("flash_qla: fla's chunk_gated_delta_rule was not taken over: %s", error)


def _layer_verifier(decline: Callable[..., Optional[str]]) -> Callable[..., Tuple[bool, Optional[str]]]:
    def verifier(*args: Any, **kwargs: Any) -> Tuple[bool, Optional[str]]:
        if not _layer_active:
            return False, "was unregistered"
        if _device_index(kwargs["x"] if "x" in kwargs else args[0]) is None:
            return False, "needs CUDA tensors"
        reason = decline(*args, **kwargs)
        return reason is None, reason

    return verifier


def register_layer() -> List[str]:
    """Makes the installed fla, 0.6 or newer, compute the convolution and the gated norm (without a mean) around the
    delta rule by this library, on CUDA tensors, forward and backward. Calling it again changes nothing.

    Returns:
        The functions of fla that it hands over.

    Raises:
        ImportError: fla is not installed, or cannot be imported.
        NotImplementedError: this fla does not dispatch these functions, or this build of the library has no CUDA
            kernels for them.
    """
    global _layer_active, _layer_names
    if not _layer_names:
        from .._tools import build_info

        if "cuda_layer" not in build_info()["conv_forward"].split():
            raise NotImplementedError("register_layer: this build (of the CPU alone) must have the path cuda_layer")
        _layer_names = _add_layer(_registry())
    _layer_active = True
    return list(_layer_names)


def _add_layer(registry: ModuleType) -> List[str]:
    from ._fla_layer import ENTRIES

    if not hasattr(registry, "register"):
        raise NotImplementedError(
            f"register_layer: fla must be 0.6 or newer ({registry.__name__} dispatches operations)"
        )

    class FlashQLALayerBackend(registry.BaseBackend):  # type: ignore[name-defined]
        backend_type = "flash_qla"
        package_name = "flash_qla"
        env_var = "FLA_FLASH_QLA"
        priority = 3

    try:
        functions = {key: getattr(importlib.import_module(key[0]), key[1]) for key in ENTRIES}
        for key, (implementation, decline) in ENTRIES.items():
            verifier = _layer_verifier(decline)
            registry.register(functions[key], backend=FlashQLALayerBackend, verifier=verifier)(implementation)
    except (AttributeError, KeyError, TypeError) as error:
        raise NotImplementedError(
            f"register_layer: fla must be a version that dispatches its convolution and gated norm, as 0.6 does "
            f"({type(error).__name__}: {error})"
        ) from error
    return [".".join(key) for key in ENTRIES]


def unregister() -> None:
    """Makes the backends decline every call, so that fla's own kernels compute: fla's registry gives nothing back."""
    global _active, _layer_active
    _active = _layer_active = False


def status() -> Tuple[bool, str]:
    """Whether fla's calls come here on this machine, and why not. Imports nothing of fla."""
    from . import _engines

    version = _engines.version_of("fla-core") or _engines.version_of("flash-linear-attention")
    if version is None:
        return False, "not installed"
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers < _DISPATCHES:
        return False, f"fla {version} hands no calls to packages (from 0.5.2 on it does)"
    for name, off in _SWITCHES:
        if os.environ.get(name) == off:
            return False, f"{name}={off}"
    reason = _engines.slow_on_this_machine(needs_grad=True)
    return reason is None, reason or f"chunked calls, forward and backward; {_SWITCHES[0][0]}=0 turns it off"
