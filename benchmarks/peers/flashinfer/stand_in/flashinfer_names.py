"""What an exported kernel is called: the same here and there."""

import re


def _symbol(text: str) -> str:
    return re.sub("[^0-9a-zA-Z]+", "_", text)


def decode_symbol(module: str, kernel: str) -> str:
    return _symbol(f"{module}_{kernel}")


def prefill_symbol(kernel, key) -> str:
    """`key`: the attributes by which FlashInfer caches a kernel, as (name, value); types count by their names."""
    words = [getattr(value, "__name__", str(value)).split(".")[-1] for _, value in key]
    return _symbol("_".join(["gdn_prefill", type(kernel).__name__, *words]))
