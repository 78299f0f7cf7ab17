"""The chunk algorithm in plain PyTorch with the roundings of a tensor-core kernel: how exact can a kernel of this dtype be?

float32 arithmetic; every operand of a matrix product is rounded to the input dtype first, as the hardware wants it: the
inverse A, the corrected values V', the scores P and the chunk-start state S. The state itself is carried in float32.
Gradients come from autograd through the same roundings. Equation names are those of docs/math.md.
"""

from __future__ import annotations

import torch

CHUNK = 64
MIN_LOG_DECAY = -80.0


def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None):
    """o [B, T, Hv, V] in q's dtype and the final state [B, Hv, K, V] in float32; dense sequences, no in-kernel options."""
    dtype, group = q.dtype, v.shape[2] // q.shape[2]
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def rounded(x):
        return x.to(dtype).float()

    # [B, Hv, T, ..]
    q, k = (x.repeat_interleave(group, dim=2).transpose(1, 2).float() for x in (q, k))
    v, g, beta = v.transpose(1, 2).float(), g.transpose(1, 2).float(), beta.transpose(1, 2).float()
    S = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial_state is None else initial_state.float()
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        Q, K, V = (x[:, :, start:start + CHUNK] for x in (q, k, v))
        b = beta[:, :, start:start + CHUNK]
        c = g[:, :, start:start + CHUNK].clamp_min(MIN_LOG_DECAY).cumsum(-1)
        n = Q.shape[2]
        causal = torch.ones(n, n, dtype=torch.bool).tril()
        G = (c[..., :, None] - c[..., None, :]).masked_fill(~causal, -torch.inf).exp()
        gamma, last = c.exp()[..., None], c[..., -1:]
        KK = K @ K.mT
        eye = torch.eye(n)
        A = torch.linalg.solve_triangular(eye + (b[..., None] * KK).tril(-1), eye.expand_as(KK), upper=False)
        Ag = rounded(G * rounded(A) * b[..., None, :])
        S0 = rounded(S)
        values = rounded(Ag @ rounded(V - gamma * (K @ S0)))
        P = rounded(scale * G * (Q @ K.mT))
        outputs.append(scale * gamma * (Q @ S0) + P @ values)
        S = last.exp()[..., None] * S + K.mT @ rounded((last - c).exp()[..., None] * values)
    return torch.cat(outputs, dim=2).transpose(1, 2).to(dtype), S
