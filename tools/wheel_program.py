#!/usr/bin/env python3
"""What an installed wheel must compute, in the environment of the interpreter that runs this file.

    wheel_program.py                                      numpy alone: forward, prefill and decode with states in a pool
    wheel_program.py --torch [--device cuda] [--compile BACKEND]
                                                          PyTorch too: forward, backward, torch.compile (aot_eager)

Each result is held to the token recurrence, written out here in float64 (gradients: PyTorch's own, of that recurrence).
It imports nothing but flash_qla, numpy and torch, and prints what it ran with and the largest errors (relative L2).
"""

import argparse
import importlib.metadata
import math
import sys
from pathlib import Path

import numpy as np

# Bounds of docs/numerics.md: outputs and gradients; the low-level calls round g's sums.
FLOAT32, LOW_LEVEL_FLOAT32 = 1e-5, 5e-5
BFLOAT16 = {"state": 5e-3, "grad": 8e-3, "gate_grad": 1.5e-2}


def require(name: str, error: float, bound: float) -> float:
    if not error < bound:
        sys.exit(f"wheel_program: {name} is {error:.2e} off, and the bound is {bound:.0e}")
    return error


def relative(x, reference) -> float:
    x, reference = np.asarray(x, dtype=np.float64), np.asarray(reference, dtype=np.float64)
    return float(np.linalg.norm(x - reference) / np.linalg.norm(reference))


def recurrence(q, k, v, g, beta, S, stack, exp, outer):
    """o [T, V] and the state [K, V] of one head of one sequence: q, k [T, K], v [T, V], g, beta [T], S [K, V]."""
    rows = []
    for t in range(len(q)):
        S = exp(g[t]) * S
        S = S + outer(k[t], beta[t] * (v[t] - k[t] @ S))
        rows.append(q[t] @ S / math.sqrt(q.shape[1]))
    return stack(rows), S


def numpy_recurrence(q, k, v, g, beta, state):
    """All heads: q, k [T, Hq, K], v [T, Hv, V], g, beta [T, Hv], state [Hv, K, V]."""
    q, k, v, g, beta, state = (np.asarray(x, dtype=np.float64) for x in (q, k, v, g, beta, state))
    per = v.shape[1] // q.shape[1]
    heads = [
        recurrence(
            q[:, h // per], k[:, h // per], v[:, h], g[:, h], beta[:, h], state[h], np.stack, np.exp, np.outer
        )
        for h in range(v.shape[1])
    ]
    return np.stack([o for o, _ in heads], axis=1), np.stack([S for _, S in heads])


def numpy_inputs(T, Hq=1, Hv=2, K=8, V=16):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((1, T, Hq, K), dtype=np.float32) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.standard_normal((1, T, Hv, V), dtype=np.float32)
    g = -rng.random((1, T, Hv), dtype=np.float32)
    beta = rng.random((1, T, Hv), dtype=np.float32)
    return q, k, v, g, beta


def numpy_calls() -> dict:
    import flash_qla

    x = numpy_inputs(70)
    zeros = np.zeros((2, 8, 16))
    expected, expected_state = numpy_recurrence(*(a[0] for a in x), zeros)
    _, _, o, _, state = flash_qla.chunk_gated_delta_rule_fwd(*x)
    errors = {
        "forward": require("o", relative(o[0], expected), LOW_LEVEL_FLOAT32),
        "state": require("final_state", relative(state[0], expected_state), LOW_LEVEL_FLOAT32),
    }
    # 64 tokens of prefill, then six of decode, in slot 1 of a pool of three.
    pool = np.zeros((3, 2, 16, 8), dtype=np.float32)
    slot = np.array([1], dtype=np.int32)
    first, last = ([a[:, part] for a in x] for part in (slice(0, 64), slice(64, 70)))
    o1 = flash_qla.gated_delta_rule_prefill(*first, pool, slot, cu_seqlens=np.array([0, 64], dtype=np.int32))
    o2 = flash_qla.gated_delta_rule_decode(*last, pool, slot)
    pool_o = np.concatenate([np.asarray(o1), np.asarray(o2)], axis=1)
    errors["pool's o"] = require("the pool's o", relative(pool_o[0], expected), LOW_LEVEL_FLOAT32)
    pool_state = pool[1].transpose(0, 2, 1)
    errors["pool"] = require("the pool's state", relative(pool_state, expected_state), LOW_LEVEL_FLOAT32)
    if pool[0].any() or pool[2].any():
        sys.exit("wheel_program: a slot of the pool that was not named has been written")
    return errors


def torch_calls(device: str, dtype_name: str, backend: str, T: int, Hq: int, Hv: int, K: int, V: int) -> dict:
    import torch

    import flash_qla

    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    q, k, v, g, beta = (torch.from_numpy(a).to(device) for a in numpy_inputs(T, Hq, Hv, K, V))
    inputs = [a.to(dtype) for a in (q, k, v)] + [g * 0.1, beta]
    weights = [torch.randn(shape, dtype=torch.float64) for shape in ((1, T, Hv, V), (1, Hv, K, V))]

    leaves = [a.detach().cpu().double().requires_grad_() for a in inputs]
    per = Hv // Hq
    heads = []
    for h in range(Hv):
        one = [a[0, :, h // per] for a in leaves[:2]] + [a[0, :, h] for a in leaves[2:]]
        heads.append(recurrence(*one, torch.zeros(K, V, dtype=torch.float64), torch.stack, torch.exp, torch.outer))
    o, state = torch.stack([o for o, _ in heads], dim=1)[None], torch.stack([S for _, S in heads])[None]
    expected = [o, state, *torch.autograd.grad((o * weights[0]).sum() + (state * weights[1]).sum(), leaves)]

    def call(*x):
        return flash_qla.chunk_gated_delta_rule(*x, output_final_state=True)

    def bound(name):
        if dtype == torch.float32:
            return FLOAT32
        return BFLOAT16["gate_grad" if name in ("dg", "dbeta") else "grad" if name.startswith("d") else "state"]

    errors = {}
    for kind, function in (("", call), ("compiled ", torch.compile(call, fullgraph=True, backend=backend))):
        x = [a.detach().requires_grad_() for a in inputs]
        o, state = function(*x)
        loss = (o.double() * weights[0].to(device)).sum() + (state.double() * weights[1].to(device)).sum()
        results = [o, state, *torch.autograd.grad(loss, x)]
        for name, a, b in zip(("o", "state", "dq", "dk", "dv", "dg", "dbeta"), results, expected):
            error = relative(a.detach().cpu().double(), b.detach())
            errors[kind + name] = require(f"{kind}{name} in {dtype_name} on {device}", error, bound(name))
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", default="aot_eager", metavar="BACKEND")
    arguments = parser.parse_args()
    import flash_qla

    if Path(sys.prefix).resolve() not in Path(flash_qla.__file__).resolve().parents:
        sys.exit(f"wheel_program: flash_qla is {flash_qla.__file__}, which is not in the environment {sys.prefix}")
    packages = ["apache-tvm-ffi", "numpy"] + ["torch"] * arguments.torch
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    groups = {"numpy": numpy_calls()}
    if arguments.torch:
        small = dict(T=70, Hq=1, Hv=2, K=8, V=16)
        groups["float32"] = torch_calls(arguments.device, "float32", arguments.compile, **small)
        if arguments.device != "cpu":
            large = dict(T=512, Hq=2, Hv=4, K=128, V=128)
            groups["bfloat16"] = torch_calls(arguments.device, "bfloat16", arguments.compile, **large)
    worst = ", ".join(f"{name} {max(errors.values()):.1e}" for name, errors in groups.items())
    print(f"flash_qla {flash_qla.__version__} with {versions}: largest errors {worst}")


if __name__ == "__main__":
    main()
