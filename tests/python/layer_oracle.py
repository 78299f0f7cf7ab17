"""The layer's operations token by token in float64 numpy: what every path is compared with.

Written from the formulas of include/flash_qla/convolution.h and norm.h alone. Backward passes are the reverse of the same
loops. All arrays are float64; x, y are [B, T, C], weights [C, W], states [rows, C, L] with the newest input last.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from oracle import sigmoid

EPS = 1e-6  # of the l2 norm, under the root


def silu(u):
    return u * sigmoid(u)


def activate(name, u):
    return {None: lambda v: v, "silu": silu, "sigmoid": sigmoid}[name](u)


def slope(name, u):
    s = sigmoid(u)
    return {None: lambda: np.ones_like(u), "silu": lambda: s + u * s * (1 - s), "sigmoid": lambda: s * (1 - s)}[name]()


@dataclasses.dataclass
class Conv:
    """Everything that is not a tensor of the convolution itself."""

    activation: str | None = None
    l2norm_heads: int = 0
    head_dim: int = 0
    cu_seqlens: np.ndarray | None = None
    seq_idx: np.ndarray | None = None


def spans(x, options):
    """(row, begin, end) of each sequence."""
    if options.cu_seqlens is None:
        return [(b, 0, x.shape[1]) for b in range(x.shape[0])]
    cu = options.cu_seqlens
    return [(0, int(cu[n]), int(cu[n + 1])) for n in range(len(cu) - 1)]


def window(x, row, begin, t, before, W, seq_idx):
    """The W inputs [W, C] of token t: `before` [W - 1, C] are those in front of the sequence."""
    rows = []
    for j in range(W):
        at = t - (W - 1) + j
        if seq_idx is not None:
            rows.append(x[row, at] if at >= 0 and seq_idx[row, at] == seq_idx[row, t] else np.zeros(x.shape[2]))
        elif at >= begin:
            rows.append(x[row, at])
        else:
            rows.append(before[W - 1 + at - begin])
    return np.array(rows)


def last_inputs(state, W):
    """[W - 1, C] of a state [C, L]."""
    return state.T[state.shape[1] - (W - 1):]


def normalise(y, options):
    """(yn, r) of one row: r [heads]."""
    heads, dim = options.l2norm_heads, options.head_dim
    yn, r = y.copy(), np.zeros(heads)
    for h in range(heads):
        part = slice(h * dim, (h + 1) * dim)
        r[h] = 1 / np.sqrt((y[part] ** 2).sum() + EPS)
        yn[part] = y[part] * r[h]
    return yn, r


def conv_forward(x, weight, bias=None, residual=None, initial_state=None, entries=None, options=Conv()):
    """y and the final states [N, C, L] (L of initial_state, else `entries`)."""
    C, W = weight.shape
    y = np.zeros_like(x)
    L = entries if initial_state is None else initial_state.shape[2]
    finals = []
    for n, (row, begin, end) in enumerate(spans(x, options)):
        state = np.zeros((C, max(L or 0, W - 1))) if initial_state is None else initial_state[n]
        before = last_inputs(state, W)
        for t in range(begin, end):
            if options.seq_idx is not None and options.seq_idx[row, t] < 0:
                continue
            u = np.einsum("jc,cj->c", window(x, row, begin, t, before, W, options.seq_idx), weight)
            if bias is not None:
                u = u + bias
            y[row, t], _ = normalise(activate(options.activation, u), options)
            if residual is not None:
                y[row, t] += residual[row, t]
        if L is not None:
            whole = np.concatenate([state[:, state.shape[1] - L:], x[row, begin:end].T], axis=1)
            finals.append(whole[:, whole.shape[1] - L:])
    return y, np.array(finals).reshape(len(finals), C, L) if L is not None else None


def conv_backward(x, weight, bias=None, residual=None, initial_state=None, dy=None, dfinal=None, options=Conv()):
    """Gradients of x, weight, bias, residual and initial_state by name, with the norms of the sums' terms."""
    C, W = weight.shape
    dx, dw, db, dr = np.zeros_like(x), np.zeros_like(weight), np.zeros(C), np.zeros_like(x)
    dh = None if initial_state is None else np.zeros_like(initial_state)
    L = dfinal.shape[2] if dfinal is not None else (initial_state.shape[2] if initial_state is not None else W - 1)
    for n, (row, begin, end) in enumerate(spans(x, options)):
        state = np.zeros((C, max(L, W - 1))) if initial_state is None else initial_state[n]
        before = last_inputs(state, W)
        d_state = np.zeros_like(state)
        for t in range(begin, end):
            if options.seq_idx is not None and options.seq_idx[row, t] < 0:
                continue
            inputs = window(x, row, begin, t, before, W, options.seq_idx)
            u = np.einsum("jc,cj->c", inputs, weight) + (0 if bias is None else bias)
            d = dy[row, t].copy() if dy is not None else np.zeros(C)
            dr[row, t] = d
            yn, r = normalise(activate(options.activation, u), options)
            for h in range(options.l2norm_heads):
                part = slice(h * options.head_dim, (h + 1) * options.head_dim)
                d[part] = r[h] * (d[part] - yn[part] * (d[part] * yn[part]).sum())
            du = d * slope(options.activation, u)
            db += du
            dw += (inputs * du).T
            for j in range(W):
                at = t - (W - 1) + j
                if options.seq_idx is not None:
                    if at >= 0 and options.seq_idx[row, at] == options.seq_idx[row, t]:
                        dx[row, at] += weight[:, j] * du
                elif at >= begin:
                    dx[row, at] += weight[:, j] * du
                else:
                    d_state[:, state.shape[1] + at - begin] += weight[:, j] * du
        if dfinal is not None:
            for i in range(L):
                at = end - L + i
                if at >= begin:
                    dx[row, at] += dfinal[n, :, i]
                else:
                    d_state[:, state.shape[1] + at - begin] += dfinal[n, :, i]
        if dh is not None:
            dh[n] = d_state
    return {"dx": dx, "dweight": dw, "dbias": db, "dresidual": dr, "dinitial_state": dh}


def update(x, weight, bias, state, options=Conv(), accepted=None, ring=None):
    """One sequence's next tokens: x [T, C], state [C, L]. Returns y [T, C], the state after, and the W - 1 inputs after
    each token [T, C, W - 1]."""
    T = x.shape[0]
    C, W = weight.shape
    L = state.shape[1]
    if ring is not None:
        before = np.array([state[:, (ring - steps) % L] for steps in range(W - 1, 0, -1)]).reshape(W - 1, C)
    elif accepted is not None:
        before = state.T[accepted - 1:accepted - 1 + W - 1]
    else:
        before = last_inputs(state, W)
    y, _ = conv_forward(x[None], weight, bias, initial_state=before.T[None], options=options)
    inputs = np.concatenate([before, x])
    after = state.copy()
    if ring is not None:
        for i in range(T):
            after[:, (ring + i) % L] = x[i]
    elif accepted is not None:
        after[:, :W - 2] = state[:, accepted:accepted + W - 2]
        after[:, W - 2:W - 2 + T] = x.T
    else:
        after = np.concatenate([state, x.T], axis=1)[:, T:]
    windows = np.array([inputs[t + 1:t + W].T for t in range(T)]).reshape(T, C, W - 1)
    return y[0], after, windows


def norm_gated(x, z=None, weight=None, bias=None, eps=1e-6, activation="silu", gate_first=False):
    """y of rows [.., V]."""
    gate = 1.0 if z is None else activate(activation, z)
    v = x * gate if gate_first else x
    y = v / np.sqrt((v ** 2).mean(-1, keepdims=True) + eps)
    y = y * (1.0 if weight is None else weight) + (0.0 if bias is None else bias)
    return y if gate_first else y * gate


def norm_gated_backward(x, dy, z=None, weight=None, bias=None, eps=1e-6, activation="silu", gate_first=False):
    """Gradients of x, z, weight and bias by name."""
    gate = np.ones_like(x) if z is None else activate(activation, z)
    w, b = (1.0 if weight is None else weight), (0.0 if bias is None else bias)
    v = x * gate if gate_first else x
    r = 1 / np.sqrt((v ** 2).mean(-1, keepdims=True) + eps)
    n = v * r
    through = dy if gate_first else dy * gate
    h = through * w
    dv = r * (h - n * (h * n).mean(-1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    found = {"dweight": (through * n).sum(rows), "dbias": (through + 0 * x).sum(rows)}
    if gate_first:
        found["dx"] = dv * gate
        found["dg"] = None if z is None else dv * x * slope(activation, z)
    else:
        found["dx"] = dv
        found["dg"] = None if z is None else dy * (n * w + b) * slope(activation, z)
    return found


def gates(a, b, A_log, dt_bias=None, doubled=False):
    """(g, beta) of raw gates [.., Hv]."""
    raw = a + (0.0 if dt_bias is None else dt_bias)
    return -np.exp(A_log) * np.logaddexp(0, raw), sigmoid(b) * (2 if doubled else 1)
