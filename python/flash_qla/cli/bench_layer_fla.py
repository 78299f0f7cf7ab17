"""The calls of fla (0.6 or newer) beside the rows of `bench --mode layer`. Each function imports what it needs, makes
what is not timed, and returns the call; what that returns by our names of tensors is compared with float64."""

from __future__ import annotations

import importlib
import os
from typing import Any, Callable, Dict, List

import torch

Tensors = Dict[str, torch.Tensor]


def _module(name: str) -> Any:
    os.environ["FLA_FLASH_QLA"] = "0"  # fla's own kernels, which it would leave for this library
    return importlib.import_module(f"fla.{name}")


def conv_forward(x: torch.Tensor, weight: torch.Tensor, normed: int, dim: int) -> Callable[[], Tensors]:
    """Its convolution, and its norm of so many channels' rows, which lie together: it would copy others before."""
    convolution = _module("modules.causal_conv1d").causal_conv1d_fwd
    norm = _module("modules.norm.l2norm").l2norm_fwd
    rows = convolution(x, weight, None, None, None, False, "silu")[0][..., :normed].reshape(-1, dim).contiguous()

    def call() -> Tensors:
        convolution(x, weight, None, None, None, False, "silu")
        norm(rows)
        return {}

    return call


def conv_backward(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Callable[[], Tensors]:
    backward = _module("modules.causal_conv1d").causal_conv1d_bwd

    def call() -> Tensors:
        dx, dweight, *_ = backward(x, dy, None, weight, activation="silu")
        return {"dx": dx, "dweight": dweight}

    return call


_NORM = {"activation": "swish", "eps": 1e-6, "is_rms_norm": True}


def norm_forward(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> Callable[[], Tensors]:
    norm = _module("modules.norm.fused_norm_gate").layer_norm_gated_fwd
    return lambda: {"y": norm(x, z, weight, None, **_NORM)[0]}


def norm_backward(x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> Callable[[], Tensors]:
    module = _module("modules.norm.fused_norm_gate")
    rstd = module.layer_norm_gated_fwd(x, z, weight, None, **_NORM)[2]

    def call() -> Tensors:
        dx, dz, dweight, *_ = module.layer_norm_gated_bwd(dy, x, z, weight, None, rstd=rstd, **_NORM)
        return {"dx": dx, "dz": dz, "dweight": dweight}

    return call


def chunk_gated_delta_rule() -> Callable[..., Any]:
    function = _module("ops.gated_delta_rule").chunk_gated_delta_rule
    return lambda q, k, v, g, beta, cu_seqlens: function(q, k, v, g, beta, cu_seqlens=cu_seqlens)


def decode(
    x: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor,
    z: torch.Tensor, norm_weight: torch.Tensor, window: torch.Tensor, states: torch.Tensor,
    split: Callable[[torch.Tensor], List[torch.Tensor]],
) -> Callable[[], Tensors]:  # fmt: skip
    """One token of each sequence. Its window is updated in place, as often as fla's tuner likes: nothing to compare.
    Its state goes to new memory."""
    update = _module("modules.causal_conv1d").causal_conv1d_update
    recurrent = _module("ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    norm = _module("modules.norm.fused_norm_gate").layer_norm_gated_fwd

    @torch.inference_mode()
    def call() -> Tensors:
        y, _ = update(x, window, weight=weight, activation="silu")
        q, k, v = (t.contiguous() for t in split(y))
        o, _ = recurrent(
            q, k, v, g=a, beta=b, initial_state=states, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True,
        )  # fmt: skip
        rows = o.reshape(-1, o.shape[-1])
        norm(rows, z.reshape(rows.shape), norm_weight, None, **_NORM)
        return {}

    return call


def layer(
    hidden: torch.Tensor, do: torch.Tensor, key_heads: int, value_heads: int, dim: int, train: bool
) -> Callable[[], Tensors]:
    """Its layer of the same shape with weights of its own."""
    with torch.device(hidden.device):
        module = _module("layers.gated_deltanet").GatedDeltaNet(
            hidden_size=hidden.shape[-1], expand_v=1, head_dim=dim, num_heads=key_heads, num_v_heads=value_heads
        )
    module = module.to(hidden.dtype)

    def training() -> Tensors:
        leaf = hidden.detach().requires_grad_()
        torch.autograd.grad(module(leaf)[0], [leaf, *module.parameters()], do)
        return {}

    @torch.inference_mode()
    def forward() -> Tensors:
        module.eval()(hidden)
        return {}

    return training if train else forward
