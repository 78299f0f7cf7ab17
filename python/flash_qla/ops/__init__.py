"""Operations, in the import layout of the public packages."""

from . import convolution, gated_delta_rule, layer, norm

__all__ = ["convolution", "gated_delta_rule", "layer", "norm"]
