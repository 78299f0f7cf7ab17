"""Inputs of the layer's operations, their bounds, and calls that compare everything with the oracle."""

from __future__ import annotations

import helpers
import layer_oracle as oracle
import numpy as np
import torch
from helpers import assert_bitwise, assert_close, settings, to_numpy

import flash_qla

# Relative L2 against fp64 (docs/layer.md): values, and sums over tokens.
BOUNDS = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6, torch.float64: 1e-12}
SUMS = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-5, torch.float64: 1e-12}
SUM_NAMES = ("dweight", "dbias")


def dtypes():
    return helpers.DEVICE_DTYPES[settings.device]


def bound_of(name, tensor):
    """The bound of a result. What is kept in float32 beside 16-bit inputs has float32's."""
    return (SUMS if name in SUM_NAMES else BOUNDS)[tensor.dtype]


def drawn(shape, dtype=torch.float32, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(settings.device, dtype)


def wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def compare(got, want):
    for name, reference in want.items():
        if reference is None or got.get(name) is None:
            continue
        assert_close(name, got[name], reference, bound_of(name, got[name]))


class Conv:
    """One call of causal_conv1d, forward and backward."""

    def __init__(self, B=2, T=37, C=24, W=4, dtype=torch.float32, *, seqlens=None, padding=0, bias=True, residual=False, state=0,
                 final=0, activation="silu", l2norm_heads=0, head_dim=None, seq_idx=None, weight_dtype=None, state_dtype=None,
                 index_dtype=torch.int32, seed=0):
        if seqlens is not None:
            B, T = 1, sum(seqlens) + padding
        self.N = B if seqlens is None else len(seqlens)
        weight_dtype = weight_dtype or dtype
        self.x = drawn((B, T, C), dtype, seed=seed)
        self.weight = drawn((C, W), weight_dtype, 0.5, seed=seed + 1)
        self.bias = drawn((C,), weight_dtype, seed=seed + 2) if bias else None
        self.residual = drawn((B, T, C), dtype, seed=seed + 3) if residual else None
        self.initial_state = drawn((self.N, C, state), state_dtype or dtype, seed=seed + 4) if state else None
        self.cu_seqlens = None if seqlens is None else helpers.offsets(seqlens, index_dtype)
        self.seq_idx = None if seq_idx is None else torch.as_tensor(seq_idx, dtype=index_dtype, device=settings.device)
        self.final = bool(final or state)
        self.dy = drawn((B, T, C), dtype, seed=seed + 5)
        entries = state or W
        self.dfinal = drawn((self.N, C, entries), state_dtype or dtype, seed=seed + 6) if self.final else None
        self.options = dict(activation=activation, l2norm_heads=l2norm_heads, head_dim=head_dim)

    DIFFERENTIABLE = ("x", "weight", "bias", "residual", "initial_state")

    def call(self, **changes):
        tensors = {name: getattr(self, name) for name in self.DIFFERENTIABLE} | changes
        return flash_qla.causal_conv1d(**tensors, output_final_state=self.final, cu_seqlens=self.cu_seqlens, seq_idx=self.seq_idx,
                                       **self.options)

    def run(self, grads=True):
        leaves = {name: getattr(self, name).detach().requires_grad_() for name in self.DIFFERENTIABLE if getattr(self, name) is not None}
        y, final = self.call(**leaves)
        got = {"y": y.detach(), "final_state": None if final is None else final.detach()}
        if not grads:
            return got
        outputs, incoming = [y], [self.dy]
        if final is not None:
            outputs.append(final)
            incoming.append(self.dfinal)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming)
        for (name, leaf), gradient in zip(leaves.items(), gradients):
            assert gradient.dtype == leaf.dtype and gradient.shape == leaf.shape
            got["d" + name] = gradient
        return got

    def oracle_options(self):
        return oracle.Conv(
            activation=self.options["activation"], l2norm_heads=self.options["l2norm_heads"], head_dim=self.options["head_dim"] or 0,
            cu_seqlens=None if self.cu_seqlens is None else self.cu_seqlens.cpu().numpy(),
            seq_idx=None if self.seq_idx is None else self.seq_idx.cpu().numpy())

    def reference(self):
        tensors = {name: to_numpy(getattr(self, name)) for name in self.DIFFERENTIABLE}
        options = self.oracle_options()
        y, final = oracle.conv_forward(
            **tensors, entries=self.weight.shape[1] if self.final and self.initial_state is None else None, options=options)
        want = {"y": y, "final_state": final if self.final else None}
        return want | oracle.conv_backward(**tensors, dy=to_numpy(self.dy), dfinal=to_numpy(self.dfinal), options=options)

    def check(self, grads=True):
        got = self.run(grads)
        want = self.reference()
        compare(got, want)  # of gradients those that were asked for
        if got["final_state"] is not None and np.isfinite(want["final_state"]).all():
            assert_bitwise("final_state", got["final_state"], torch.from_numpy(want["final_state"]).to(got["final_state"]))
        return got
