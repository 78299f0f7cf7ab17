"""The gated delta rule: chunked forward and backward, token-by-token forward, and serving with a pool of states."""

from .chunk import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from .pool import gated_delta_rule_decode, gated_delta_rule_prefill
from .recurrent import fused_recurrent_gated_delta_rule
from .verify import gated_delta_rule_verify

__all__ = [
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
    "fused_recurrent_gated_delta_rule",
    "gated_delta_rule_decode",
    "gated_delta_rule_prefill",
    "gated_delta_rule_verify",
]
