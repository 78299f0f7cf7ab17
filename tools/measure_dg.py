"""How exact are the ways to compute dg? Two forms, emulated with the roundings of a tensor-core kernel, against fp64.

    python tools/measure_dg.py

gauge:   the gradient of the gate's cumsum at token t is <do_t, o_t> - <dv_t, v_t>, plus <dS, S> of the chunk's end at its
         last token. It needs o, and takes differences of sums over V of whole outputs.
direct:  <q_t, dq_t> + <k_t, plus_t> - <k_t, minus_t>, where dk = plus + minus are the parts whose gate enters with either
         sign, plus gC <dS, S> + sum_i <k_i, (diag(gC / gamma) V' dS^T)_i> at the last token. Needs no o; both members of a
         pair come from the same rounded operands. This is what src/cuda/sm90/chunk_bwd computes.

dg is the reverse cumsum of either within the chunk. Operands of products are rounded to bfloat16, sums are fp32
(docs/math.md has the equations). Prints the table of docs/numerics.md: relative L2 of dg, median and worst of the heads,
and of the first token of all heads together.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, Tuple

import torch
import torch.nn.functional as F

import flash_qla

HEADS, TOKENS, DIM, CHUNK = 16, 1024, 128, 64
DTYPE = torch.bfloat16


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(DTYPE).float()


def draw(decay: str, generator: torch.Generator) -> Dict[str, torch.Tensor]:
    """[H, T, ..] float32 that bfloat16 holds exactly where a kernel is given bfloat16."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    if decay == "A = 0":
        g = torch.zeros(HEADS, TOKENS)
    else:
        step = (
            torch.exp(torch.empty(HEADS, TOKENS).uniform_(math.log(1e-3), math.log(1e-1), generator=generator))
            if "small" in decay
            else F.softplus(normal(HEADS, TOKENS))
        )
        g = -16.0 * step
    return {
        "q": rounded(F.normalize(normal(HEADS, TOKENS, DIM), dim=-1)),
        "k": rounded(F.normalize(normal(HEADS, TOKENS, DIM), dim=-1)),
        "v": rounded(normal(HEADS, TOKENS, DIM)),
        "g": g,
        "beta": normal(HEADS, TOKENS).sigmoid(),
        "h0": normal(HEADS, DIM, DIM),
        "do": rounded(normal(HEADS, TOKENS, DIM)),
        "dht": normal(HEADS, DIM, DIM) / 8,
    }


def exact(x: Dict[str, torch.Tensor]) -> torch.Tensor:
    """dg [H, T] in fp64."""
    rows = {name: t.double() for name, t in x.items()}
    g = rows["g"].T[None].clone().requires_grad_()
    q, k, v = (rows[name].transpose(0, 1)[None] for name in "qkv")
    o, state = flash_qla.chunk_gated_delta_rule(
        q, k, v, g, rows["beta"].T[None], initial_state=rows["h0"][None], output_final_state=True
    )
    torch.autograd.backward([o, state], [rows["do"].transpose(0, 1)[None], rows["dht"][None]])
    return g.grad[0].T


def emulated(x: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """dg [H, T] by each form."""
    scale, chunks = DIM**-0.5, TOKENS // CHUNK
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()

    def parts(i: int) -> Tuple[torch.Tensor, ...]:
        at = slice(i * CHUNK, (i + 1) * CHUNK)
        Q, K, V, b, dO = (x[name][:, at] for name in ("q", "k", "v", "beta", "do"))
        c = x["g"][:, at].clamp_min(-80.0).cumsum(-1)
        G = (c[:, :, None] - c[:, None, :]).masked_fill(~lower, -torch.inf).exp()
        eye = torch.eye(CHUNK)
        A = torch.linalg.solve_triangular(
            eye + (b[:, :, None] * (K @ K.mT)).tril(-1), eye.expand(HEADS, -1, -1), upper=False
        )
        GA = rounded(G * rounded(A))
        P = rounded(scale * G * (Q @ K.mT))
        return Q, K, V, b[:, :, None], dO, c, G, GA, P

    S, saved, outputs = x["h0"], [], []
    for i in range(chunks):
        Q, K, V, b, dO, c, G, GA, P = parts(i)
        gamma, ratio, end = c.exp()[..., None], (c[:, -1:] - c).exp()[..., None], c[:, -1].exp()[:, None, None]
        S0 = rounded(S)
        values = GA @ rounded(b * (V - gamma * (K @ S0)))
        outputs.append(scale * gamma * (Q @ S0) + P @ rounded(values))
        S = end * S + K.mT @ rounded(ratio * values)
        saved.append((S0, rounded(values), S))
    dS = x["dht"]
    d_cumsum: Dict[str, list] = {"direct": [], "gauge, o in bf16": [], "gauge, o in fp32": []}
    for i in reversed(range(chunks)):
        Q, K, V, b, dO, c, G, GA, P = parts(i)
        S0, values, S1 = saved[i]
        gamma, ratio, end = c.exp()[..., None], (c[:, -1:] - c).exp()[..., None], c[:, -1].exp()[:, None, None]
        dS1 = rounded(dS)
        d_values = rounded(ratio * (K @ dS1) + P.mT @ dO)
        dV = b * (GA.mT @ d_values)
        dS = end * dS + Q.mT @ rounded(scale * gamma * dO) - K.mT @ rounded(gamma * dV)
        dv = rounded(dV)
        dP = rounded(scale * G * (dO @ values.mT))
        D = rounded(-(G * (dv @ values.mT)).tril(-1))
        dq = rounded(scale * gamma * dO) @ S0.mT + dP @ K
        plus = rounded(-gamma * dv) @ S0.mT + D @ K
        carried = rounded(ratio * values) @ dS1.mT
        minus = carried + dP.mT @ Q + D.mT @ K
        direct = (Q * dq).sum(-1) + (K * plus).sum(-1) - (K * minus).sum(-1)
        direct[:, -1] += (end * (dS1 * S0)).sum((1, 2)) + (K * carried).sum((1, 2))
        d_cumsum["direct"].insert(0, direct)
        last = (rounded(dS1) * S1).sum((1, 2))
        for form, o in (("gauge, o in bf16", rounded(outputs[i])), ("gauge, o in fp32", outputs[i])):
            gauge = (dO * o).sum(-1) - (dv * V).sum(-1)
            gauge[:, -1] += last
            d_cumsum[form].insert(0, gauge)
    return {form: torch.cat([d.flip(1).cumsum(1).flip(1) for d in found], 1) for form, found in d_cumsum.items()}


def main() -> None:
    print("| decay | form | median head | worst head | first token |\n|---|---|---|---|---|")
    for decay in ("A = 0", "A = 16, small steps (1e-3 to 1e-1)", "A = 16, steps softplus(normal)"):
        x = draw(decay, torch.Generator().manual_seed(0))
        want = exact(x)
        for form, got in emulated(x).items():
            error = (got.double() - want).norm(dim=1) / want.norm(dim=1)
            first = (got[:, 0].double() - want[:, 0]).norm() / want[:, 0].norm()
            print(f"| {decay} | {form} | {statistics.median(error.tolist()):.1e} | {error.max():.1e} | {first:.1e} |")


if __name__ == "__main__":
    main()
