"""The engines that can call this library, and whether they do on this machine, for `python -m flash_qla info`."""

from __future__ import annotations

import importlib
from typing import Callable, List, NamedTuple, Optional, Tuple

from . import _engines


class Row(NamedTuple):
    """An engine. `takes`: whether this library takes its calls, or would when asked. `how`: by what, or why not."""

    engine: str
    version: Optional[str]  # None: not installed
    takes: bool
    how: str


# Name, distributions that provide it, and the module here with its status().
_ENGINES: Tuple[Tuple[str, Tuple[str, ...], str], ...] = (
    ("FLA", ("fla-core", "flash-linear-attention"), "fla"),
    ("Transformers", ("transformers",), "transformers"),
    ("vLLM", ("vllm",), "vllm"),
    ("SGLang", ("sglang",), "sglang"),
    ("Megatron", ("megatron-core",), "megatron_provider"),
    ("TensorRT-LLM", ("tensorrt-llm",), "tensorrt_llm"),
)


def _status(module: str) -> Tuple[bool, str]:
    try:
        status: Callable[[], Tuple[bool, str]] = importlib.import_module("." + module, __package__).status
    except ImportError as error:  # of PyTorch, which all of them need
        return False, str(error)
    return status()


def rows() -> List[Row]:
    """A row for each engine. Imports nothing of them."""
    found = []
    for name, distributions, module in _ENGINES:
        version = next(filter(None, map(_engines.version_of, distributions)), None)
        takes, how = (False, "not installed") if version is None else _status(module)
        found.append(Row(name, version, takes, how))
    return found
