"""Context parallel objects, under the public packages' import path."""

from .context import FLACPContext, FlashQLACPContext, build_cp_context

__all__ = ["FLACPContext", "FlashQLACPContext", "build_cp_context"]
