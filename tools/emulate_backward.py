"""How exact can the gradients of the Hopper backward be? Its algorithm in PyTorch, every tensor-core operand rounded to the
input dtype and all sums in float32, on inputs of the test suite, against the fp64 oracle.

    python tools/emulate_backward.py

Prints, for the cases that docs/numerics.md discusses, the error of each gradient: relative L2 of the whole and of the worst
head, for sums over tokens (dA_log, ddt_bias) of the worst head relative to the norm of their terms. A kernel that is off by as
much is right; one that is off by more is not.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Dict, FrozenSet, Optional

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "python"))

import helpers  # noqa: E402
from helpers import Inputs, make_inputs  # noqa: E402

CHUNK, MIN_LOG_DECAY = 64, -80.0
# Below it the kernels take dbeta from Z and the error in place of a division by beta.
SMALL_BETA = {torch.float16: 2.0**-6, torch.bfloat16: 2.0**-30}


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[B, T, H, ..] and [B, H, T, ..] into one another."""
    return x.transpose(1, 2)


# Where something is rounded: in the serial passes, and what the gradients kernel takes.
PASSES = frozenset(("A", "G o A", "P", "S of K S", "beta W", "ratio V'", "dS of K dS", "dV'", "gamma dO", "gamma beta Z"))
GRADIENTS = frozenset(("S", "V'", "dS", "dv", "dP", "D", "rows of dO", "rows of dv"))


def emulate(x: Inputs, dtype: torch.dtype, exact: FrozenSet[str] = frozenset()) -> Dict[str, torch.Tensor]:
    """Gradients of dense inputs; names and equations are those of docs/math.md and docs/notebook/sm90_backward.md. What
    is named in `exact` (PASSES, GRADIENTS) is not rounded."""

    def rounded(t: torch.Tensor, place: str = "") -> torch.Tensor:
        return t if place in exact else t.to(dtype).float()

    options = x.options
    batch, tokens, key_heads, dim = x.q.shape
    group = x.v.shape[2] // key_heads
    scale = float(options["scale"]) if options.get("scale") is not None else dim**-0.5
    q, k = x.q.float(), x.k.float()
    norms = None
    if options.get("use_qk_l2norm_in_kernel"):
        norms = [(t.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for t in (q, k)]
        q, k = ((t * r).to(x.dtype).float() for t, r in zip((q, k), norms))

    def leaf(t: Optional[torch.Tensor], absent: float) -> torch.Tensor:
        t = torch.full(x.v.shape[:3], absent) if t is None else t
        return t.detach().float().clone().requires_grad_()

    raw_g, raw_beta = leaf(x.g, 0.0), leaf(x.beta, 1.0)
    A_log, dt_bias = (None if t is None else leaf(t, 0.0) for t in (x.A_log, x.dt_bias))
    g, beta = raw_g * 1, raw_beta * 1
    if options.get("use_gate_in_kernel"):
        g = -A_log.exp() * F.softplus(raw_g if dt_bias is None else raw_g + dt_bias)
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = raw_beta.sigmoid() * (2 if options.get("allow_neg_eigval") else 1)

    keys = [heads_first(t.repeat_interleave(group, 2)) for t in (q, k)]
    V, dO = heads_first(x.v.float()), heads_first(x.do.float())
    log_decay, strength = heads_first(g.detach()).clamp_min(MIN_LOG_DECAY), heads_first(beta.detach())
    S = torch.zeros(batch, V.shape[1], dim, V.shape[-1]) if x.initial_state is None else x.initial_state.float()
    dS, saved = x.dht.float(), []
    for start in range(0, tokens, CHUNK):
        at = slice(start, start + CHUNK)
        Q, K, v, b, d_o = keys[0][:, :, at], keys[1][:, :, at], V[:, :, at], strength[:, :, at, None], dO[:, :, at]
        c = log_decay[:, :, at].cumsum(-1)
        lower = torch.ones(c.shape[-1], c.shape[-1], dtype=torch.bool).tril()
        G = (c[..., :, None] - c[..., None, :]).masked_fill(~lower, -torch.inf).exp()
        KK, eye = K @ K.mT, torch.eye(c.shape[-1])
        A = torch.linalg.solve_triangular(eye + (b * KK).tril(-1), eye.expand_as(KK), upper=False)
        GA, P = rounded(G * rounded(A, "A"), "G o A"), rounded(scale * G * (Q @ K.mT), "P")
        gamma, end, ratio = c.exp()[..., None], c[..., -1:, None].exp(), (c[..., -1:] - c).exp()[..., None]
        S0 = rounded(S, "S")
        # On the diagonal G o A is 1: what that multiplies is added in float32.
        own = b * (v - gamma * (K @ rounded(S, "S of K S")))
        values = own + GA.tril(-1) @ rounded(own, "beta W")
        S = end * S + K.mT @ rounded(ratio * values, "ratio V'")
        saved.append((at, Q, K, v, b, d_o, KK, G, GA, P, gamma, end, ratio, S0, rounded(values, "V'")))

    dQ, dK, dV = torch.zeros_like(keys[0]), torch.zeros_like(keys[1]), torch.zeros_like(V)
    dg, dbeta = torch.zeros_like(log_decay), torch.zeros_like(log_decay)
    for at, Q, K, v, b, d_o, KK, G, GA, P, gamma, end, ratio, S0, values in reversed(saved):
        dS1 = rounded(dS, "dS")
        own = ratio * (K @ rounded(dS, "dS of K dS")) + P.mT @ d_o
        Z = own + GA.tril(-1).mT @ rounded(own, "dV'")
        dS = end * dS + Q.mT @ rounded(scale * gamma * d_o, "gamma dO") - K.mT @ rounded(gamma * b * Z, "gamma beta Z")
        small = b.abs() < SMALL_BETA[dtype]
        dv, rho = rounded(torch.where(small, Z, b * Z), "dv"), torch.where(small, b, torch.ones_like(b))
        dP, D = rounded(scale * G * (d_o @ values.mT), "dP"), rounded(-(rho * G * (dv @ values.mT)).tril(-1), "D")
        dq = rounded(scale * gamma * d_o, "rows of dO") @ S0.mT + dP @ K
        plus = rounded(-rho * gamma * dv, "rows of dv") @ S0.mT + D @ K
        carried = ratio * (values @ dS1.mT)
        minus = carried + dP.mT @ Q + D.mT @ K
        d_cumsum = (Q * dq).sum(-1) + (K * plus).sum(-1) - (K * minus).sum(-1)
        d_cumsum[..., -1] += (end * (dS1 * S0)).sum((2, 3)) + (K * carried).sum((2, 3))
        error = v - gamma * (K @ S0) - (G * KK).tril(-1) @ values
        divided = (dv * values).sum(-1) / b[..., 0].square().clamp_min(1e-30)
        dg[:, :, at] = d_cumsum.flip(-1).cumsum(-1).flip(-1)
        dbeta[:, :, at] = torch.where(small[..., 0], (dv * error).sum(-1), divided)
        dQ[:, :, at], dK[:, :, at], dV[:, :, at] = dq, plus + minus, torch.where(small, b * dv, dv)

    dq, dk = (heads_first(t).reshape(batch, tokens, key_heads, group, dim).sum(3) for t in (dQ, dK))
    if norms is not None:
        dq, dk = (r * (d - (d * y).sum(-1, keepdim=True) * y) for d, y, r in zip((dq, dk), (q, k), norms))
    ((g * heads_first(dg)).sum() + (beta * heads_first(dbeta)).sum()).backward()
    found = {"dq": rounded(dq), "dk": rounded(dk), "dv": rounded(heads_first(dV)), "dg": raw_g.grad,
             "dbeta": raw_beta.grad, "dh0": dS}  # fmt: skip
    return found | {n: t.grad for n, t in (("dA_log", A_log), ("ddt_bias", dt_bias)) if t is not None}


def report(name: str, x: Inputs) -> None:
    want = helpers.reference(x)
    bfloat16 = torch.bfloat16
    for label, dtype, kept in (("fp16", torch.float16, frozenset()), ("bf16", bfloat16, frozenset()),
                               ("bf16, exact passes", bfloat16, PASSES), ("bf16, exact gradients", bfloat16, GRADIENTS)):  # fmt: skip
        parts = []
        for tensor, value in emulate(x, dtype, kept).items():
            exact = want.get(tensor)
            if exact is None:
                continue
            got, axis = helpers.to_numpy(value), helpers.TENSORS[tensor][1]
            if axis is None:
                sizes = np.maximum(np.maximum(np.abs(exact), want[f"{tensor}_terms"]), helpers.ABSOLUTE)
                parts.append(f"{tensor} {np.max(np.abs(got - exact) / sizes):.1e}")
                continue
            heads = [helpers.relative_error(got.take(i, axis), exact.take(i, axis))[0] for i in range(exact.shape[axis])]
            parts.append(f"{tensor} {helpers.relative_error(got, exact)[0]:.1e}/{max(heads):.1e}")
        print(f"{name:20s} {label:21s}", "  ".join(parts))


def main() -> None:
    low = torch.bfloat16
    raw = make_inputs(T=100, Hq=2, Hv=4, K=128, dtype=low, raw=True, seed=1)
    plain = make_inputs(T=100, Hq=2, Hv=4, K=128, dtype=low, seed=2)
    gate = dict(g=raw.g, A_log=raw.A_log, options=dict(use_gate_in_kernel=True))
    report("gate alone", plain.replace(**gate, dt_bias=raw.dt_bias))
    report("gate without dt_bias", plain.replace(**gate))
    for scale in (0.0, -0.5):
        report(f"scale {scale}", make_inputs(T=70, dtype=low, scale=scale))
    report("beta absent", make_inputs(T=100, dtype=low).replace(beta=None))
    x = make_inputs(T=100, Hv=4, dtype=low, raw=True, gate_dtype=low, beta_dtype=low)
    report("raw inputs", x.replace(A_log=x.A_log.bfloat16(), dt_bias=x.dt_bias.bfloat16()))
    x = make_inputs(T=200, Hq=2, Hv=4, K=128, dtype=low, raw=True, use_beta_sigmoid_in_kernel=False)
    log_decay = -16 * F.softplus(x.g.float() + x.dt_bias)
    options = dict(use_qk_l2norm_in_kernel=True)
    report("A = 16", x.replace(g=log_decay, beta=x.beta.sigmoid(), A_log=None, dt_bias=None, options=options))
    x = make_inputs(T=200, Hq=2, Hv=4, K=128, dtype=low, raw=True)
    report("strong and no decay", x.replace(A_log=torch.tensor([16.0, 1.0, 1e-2, 0.0]).log().to(x.A_log)))


if __name__ == "__main__":
    main()
