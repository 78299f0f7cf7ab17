"""Layers in the form that Hugging Face's `kernels` loads from a kernel repository, with the parameters of Transformers'
own functions. tools/hub_kernel.py makes a directory of such a repository of a wheel."""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch

from . import transformers

__all__ = ["chunk_gated_delta_rule", "recurrent_gated_delta_rule"]


class chunk_gated_delta_rule(torch.nn.Module):
    """Whole sequences: torch_chunk_gated_delta_rule of Transformers. chunk_size has no effect."""

    has_backward = can_torch_compile = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        chunk_size: int = 64,
        initial_state: Optional[torch.Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """query, key [B, T, Hq, K], value [B, T, Hv, V], g (log decay) and beta [B, T, Hv]; states [N, Hv, K, V]."""
        states = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return transformers.chunk(query, key, value, g, beta, chunk_size, *states, **kwargs)


class recurrent_gated_delta_rule(torch.nn.Module):
    """Token by token: torch_recurrent_gated_delta_rule of Transformers."""

    has_backward = can_torch_compile = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: Optional[torch.Tensor] = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """As chunk_gated_delta_rule."""
        states = (initial_state, output_final_state, use_qk_l2norm_in_kernel)
        return transformers.recurrent(query, key, value, g, beta, *states, **kwargs)
