"""The package causal_conv1d, for models that import it where it is not installed: Mamba, Jamba, LFM2, Zamba.

install() makes `import causal_conv1d` give the two functions of this library that have its parameters. It is a module
of this process alone; nothing is written to disk. What else the package has (its C++ functions, its Triton kernels) is
not there: importing that fails as it would without the package."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any, List

__all__ = ["install", "uninstall"]

_NAME = "causal_conv1d"
_INTERFACE = f"{_NAME}.causal_conv1d_interface"

# The version of causal_conv1d whose parameters these functions have: callers ask for 1.2 or newer at least.
_VERSION = "1.6.1"


def _module(name: str, is_package: bool) -> ModuleType:
    from .. import __version__, causal_conv1d_fn, causal_conv1d_update

    module = ModuleType(name, f"{_NAME}, by flash_qla {__version__}")
    # Transformers and others ask importlib.util.find_spec() before they import: it answers from __spec__.
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin="flash_qla", is_package=is_package)
    if is_package:
        module.__path__ = []
        module.__version__ = _VERSION  # type: ignore[attr-defined]
    for function in (causal_conv1d_fn, causal_conv1d_update):
        setattr(module, function.__name__, function)
    return module


def _is_ours(module: Any) -> bool:
    spec = getattr(module, "__spec__", None)
    return spec is not None and spec.origin == "flash_qla"


def install() -> List[str]:
    """Puts causal_conv1d_fn and causal_conv1d_update of this library where `import causal_conv1d` finds them. Call it
    before the model's module is imported: what has been imported by name already stays. Calling it again changes
    nothing.

    Returns:
        The names of the modules that are there now.

    Raises:
        RuntimeError: the package causal_conv1d itself can be imported.
    """
    if not _is_ours(sys.modules.get(_NAME)):
        there = sys.modules.get(_NAME) or importlib.util.find_spec(_NAME)
        if there is not None:
            where = getattr(there, "__file__", None) or getattr(there, "origin", None)
            raise RuntimeError(f"install: causal_conv1d ({where}) must not be installed: its own functions stay")
        package, interface = _module(_NAME, True), _module(_INTERFACE, False)
        package.causal_conv1d_interface = interface  # type: ignore[attr-defined]
        sys.modules.update({_NAME: package, _INTERFACE: interface})
    return [_NAME, _INTERFACE]


def uninstall() -> None:
    """Takes the modules out again; what has imported them keeps them."""
    for name in (_NAME, _INTERFACE):
        if _is_ours(sys.modules.get(name)):
            del sys.modules[name]
