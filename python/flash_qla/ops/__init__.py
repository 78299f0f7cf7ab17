"""Operations, in the import layout of the public packages."""

from . import gated_delta_rule

__all__ = ["gated_delta_rule"]
