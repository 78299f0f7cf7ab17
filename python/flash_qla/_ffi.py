"""The native module: loading it, and calling it, with scratch memory where it cannot get any by itself."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional

_TORCH_ADDON_SWITCH = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


def _torch_has_exchange_api() -> bool:
    """Whether the installed PyTorch, if there is one, is 2.10 or newer. It is not imported for the answer."""
    try:
        version = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return True
    return version is None or (int(version[1]), int(version[2])) >= (2, 10)


@contextlib.contextmanager
def _without_torch_addon() -> Iterator[None]:
    """With a PyTorch that has no exchange API of its own (before 2.10), tvm-ffi would compile one when it is imported.
    Nothing is compiled at run time here; tensors then go by __dlpack__, which costs some microseconds a call. The
    switch is taken back, so that processes started later are not concerned."""
    if "tvm_ffi" in sys.modules or _TORCH_ADDON_SWITCH in os.environ or _torch_has_exchange_api():
        yield
        return
    os.environ[_TORCH_ADDON_SWITCH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_TORCH_ADDON_SWITCH, None)


LIBRARY = Path(__file__).resolve().parent / "_lib" / "flash_qla_ffi.so"

if not LIBRARY.exists():
    raise ImportError(
        f"flash_qla: {LIBRARY} is missing: install the package with pip, or configure CMake with -DFLASH_QLA_PYTHON=ON "
        "and build it, which puts the module there"
    )

# tvm-ffi, the native module and those of its exports that compute, once load() has been called.
tvm_ffi: Any = None
_module: Any = None
_forward: Any = None
_backward: Any = None
_exports: Dict[str, Any] = {}  # the others, as they are called for


def load() -> Any:
    """The native module. The first call that needs it loads it: tvm-ffi imports torch where that is installed, which
    takes seconds that a process without torch need not spend. Threads that do so at the same time get the same one."""
    global tvm_ffi, _module, _forward, _backward
    if _module is None:
        with _without_torch_addon():
            tvm_ffi = importlib.import_module("tvm_ffi")
        # tvm-ffi knows this kind by name only once it is registered; without, it arrives as RuntimeError.
        tvm_ffi.register_error("NotImplementedError", NotImplementedError)
        module = tvm_ffi.load_module(str(LIBRARY))
        _forward, _backward = module["forward"], module["backward"]
        _module = module
    return _module


def workspace_size(*arguments: Any) -> int:
    """`workspace_size` of bindings/ffi/module.cpp."""
    size: int = load()["workspace_size"](*arguments)
    return size


def verify_workspace_size(*arguments: Any) -> int:
    """`verify_workspace_size` of bindings/ffi/verify.cpp."""
    size: int = load()["verify_workspace_size"](*arguments)
    return size


def build_info() -> str:
    """flash_qla_build_info() of the native module."""
    return str(load()["build_info"]())


# First argument of the exports: compute, or say which path would; of chunk_summary also what a carry takes.
_RUN, _EXPLAIN, _CARRY_SIZE = 0, 1, 2

_state = threading.local()


@contextlib.contextmanager
def explaining() -> Iterator[List[str]]:
    """Within it, this thread's calls compute nothing: each appends its explanation to the yielded list."""
    texts: List[str] = []
    _state.texts = texts
    try:
        yield texts
    finally:
        _state.texts = None


def is_explaining() -> bool:
    """True within explaining(), on its thread."""
    return getattr(_state, "texts", None) is not None


def _call(function: Callable[..., Any], allocate: Callable[[int], Any], arguments: tuple) -> bool:
    """Whether the call was made: False within explaining()."""
    texts: Optional[List[str]] = getattr(_state, "texts", None)
    if texts is not None:
        texts.append(function(_EXPLAIN, *arguments, None))
        return False
    missing_bytes = function(_RUN, *arguments, None)
    if missing_bytes:  # tvm-ffi knows no allocator of the framework that the tensors are from
        function(_RUN, *arguments, allocate(missing_bytes))
    return True


# `arguments` is one tuple: with some forty of them, each time that they are spread and collected again can be measured.


def forward(allocate: Callable[[int], Any], arguments: tuple) -> bool:
    """`forward` of bindings/ffi/module.cpp, from `recurrent` to `h`; `allocate(bytes)` returns scratch on q's device.
    False within explaining(): nothing was computed."""
    return _call(_forward or load()["forward"], allocate, arguments)


def backward(allocate: Callable[[int], Any], arguments: tuple) -> None:
    """`backward` of bindings/ffi/module.cpp, from `operation` to `inverse_norms`; `allocate` as in forward()."""
    _call(_backward or load()["backward"], allocate, arguments)


def call(name: str, allocate: Callable[[int], Any], arguments: tuple) -> bool:
    """The export `name`, with its arguments between `action` and `workspace`; else as forward()."""
    return _call(_export(name), allocate, arguments)


def check(name: str, arguments: tuple) -> None:
    """Raises what call() would raise before anything is computed."""
    _export(name)(_EXPLAIN, *arguments, None)


def carry_size(arguments: tuple) -> int:
    """Floats of a part's carry: `chunk_summary` of bindings/ffi/context_parallel.cpp, with arguments as call() has."""
    size: int = _export("chunk_summary")(_CARRY_SIZE, *arguments, None)
    return size


def verify(allocate: Callable[[int], Any], arguments: tuple) -> bool:
    """`verify` of bindings/ffi/verify.cpp, from `operation` to `o`; `allocate` and result as in forward()."""
    return call("verify", allocate, arguments)


def _export(name: str) -> Any:
    found = _exports.get(name)
    if found is None:
        found = _exports[name] = load()[name]
    return found
