"""Gated Delta Network attention on CPUs and NVIDIA GPUs: chunked prefill, training, decode.

The functions take torch tensors; the low-level and serving calls take numpy arrays and other DLPack arrays too. The
mathematics is in docs/math.md; its source is "Gated Delta Networks", arXiv 2412.06464.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

# _distribution comes first: it stops the import where another distribution has overwritten files of this package.
from . import _distribution, ops  # noqa: F401
from ._determinism import determinism
from ._identity import OFFERS_ITSELF
from ._options import use_path
from ._tools import build_info, explain, workspace_size
from .ops.convolution import (
    causal_conv1d,
    causal_conv1d_decode,
    causal_conv1d_fn,
    causal_conv1d_prefill,
    causal_conv1d_update,
)
from .ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    chunk_gated_delta_rule_bwd,
    chunk_gated_delta_rule_fwd,
    fused_recurrent_gated_delta_rule,
    gated_delta_rule_decode,
    gated_delta_rule_prefill,
    gated_delta_rule_verify,
)
from .ops.gated_delta_rule.chunk.cp import FLACPContext, FlashQLACPContext, build_cp_context
from .ops.layer import gated_delta_net
from .ops.norm import rms_norm_gated

__version__: str


__all__ = [
    "FLACPContext",
    "FlashQLACPContext",
    "build_cp_context",
    "build_info",
    "causal_conv1d",
    "causal_conv1d_decode",
    "causal_conv1d_fn",
    "causal_conv1d_prefill",
    "causal_conv1d_update",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "determinism",
    "explain",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_net",
    "gated_delta_rule_decode",
    "gated_delta_rule_prefill",
    "gated_delta_rule_verify",
    "ops",
    "rms_norm_gated",
    "use_path",
    "workspace_size",
]


if OFFERS_ITSELF and ("fla.backends" in sys.modules or "fla.ops.backends" in sys.modules):
    from .integrations import fla as _fla

    _fla.register_if_imported()


def __getattr__(name: str) -> Any:
    if name == "__version__":  # the native module's, which is not loaded before it is needed
        return build_info()["version"]
    if name == "utils":  # needs torch, which nothing here imports
        return importlib.import_module(".utils", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
