"""The gated delta rule token by token in float64 numpy: what every path is compared with.

Written from docs/math.md ("Token recurrence") alone and on purpose without chunks, so that it shares neither code nor
algebra with what it judges. Sequences and heads are vectorised, tokens are a plain loop. All arrays are float64; shapes
are those of the public calls: q, k [B, T, Hq, K]; v, o [B, T, Hv, V]; g, beta [B, T, Hv]; states [N, Hv, K, V], or
[N, Hv, V, K] with state_v_first.
"""

from __future__ import annotations

import dataclasses

import numpy as np

CHUNK = 64  # tokens between two rows of h
L2NORM_EPS = 1e-6  # FLA's constant, under the root

# Tokens whose states the backward keeps at once: it stores the state at each segment's start and repeats the forward
# inside a segment, so memory is (T / 64 + 64) states instead of T.
SEGMENT = 64


@dataclasses.dataclass
class Options:
    """Everything that is not a tensor of the recurrence itself; names as in the public calls."""

    scale: float | None = None
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    use_gate_in_kernel: bool = False
    state_v_first: bool = False
    # Applied to q and k after the in-kernel l2 norm: the contract rounds them to the input dtype. A function array -> array.
    round_normalised: object = None


def sigmoid(x):
    return np.where(x >= 0, 1 / (1 + np.exp(-np.abs(x))), np.exp(-np.abs(x)) / (1 + np.exp(-np.abs(x))))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def sequence_table(B, T, cu_seqlens):
    """begin (in the flattened B * T tokens) and length of every sequence, offsets clamped into range and order."""
    if cu_seqlens is None:
        return np.arange(B) * T, np.full(B, T)
    offsets = np.maximum.accumulate(np.clip(np.asarray(cu_seqlens, dtype=np.int64), 0, T))
    return offsets[:-1], np.diff(offsets)


def _f64(x):
    return None if x is None else np.asarray(x, dtype=np.float64)


class _Call:
    """One call, prepared: activations applied, tokens flattened, key heads repeated, sequences sorted by length."""

    def __init__(self, q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, options):
        o = self.options = options or Options()
        self.B, self.T, self.Hq, self.K = q.shape
        self.Hv, self.V = v.shape[2:]
        self.group = self.Hv // self.Hq
        tokens = self.B * self.T
        self.scale = self.K**-0.5 if o.scale is None else o.scale
        self.q_raw, self.k_raw = _f64(q).reshape(tokens, self.Hq, self.K), _f64(k).reshape(tokens, self.Hq, self.K)
        self.v = _f64(v).reshape(tokens, self.Hv, self.V)
        q, k = self.q_raw, self.k_raw
        if o.use_qk_l2norm_in_kernel:
            self.q_rstd = 1 / np.sqrt((q * q).sum(-1, keepdims=True) + L2NORM_EPS)
            self.k_rstd = 1 / np.sqrt((k * k).sum(-1, keepdims=True) + L2NORM_EPS)
            q, k = q * self.q_rstd, k * self.k_rstd
            self.q_unit, self.k_unit = q, k
            if o.round_normalised is not None:
                q, k = o.round_normalised(q), o.round_normalised(k)
        self.q, self.k = np.repeat(q, self.group, axis=1), np.repeat(k, self.group, axis=1)
        self.g_raw = None if g is None else _f64(g).reshape(tokens, self.Hv)
        self.A_log, self.dt_bias = _f64(A_log), _f64(dt_bias)
        if g is None:
            self.g = np.zeros((tokens, self.Hv))
        elif o.use_gate_in_kernel:
            self.gate_in = self.g_raw + (0 if dt_bias is None else self.dt_bias)
            self.g = -np.exp(self.A_log) * softplus(self.gate_in)
        else:
            self.g = self.g_raw
        self.beta_raw = None if beta is None else _f64(beta).reshape(tokens, self.Hv)
        if beta is None:
            self.beta = np.ones((tokens, self.Hv))
        elif o.use_beta_sigmoid_in_kernel:
            self.beta = sigmoid(self.beta_raw) * (2.0 if o.allow_neg_eigval else 1.0)
        else:
            self.beta = self.beta_raw
        begin, length = sequence_table(self.B, self.T, cu_seqlens)
        self.N = len(begin)
        # Longest first: at step t the sequences still running are a prefix.
        self.order = np.argsort(-length, kind="stable")
        self.begin, self.length = begin[self.order], length[self.order]
        self.steps = int(self.length[0]) if self.N else 0
        S0 = np.zeros((self.N, self.Hv, self.K, self.V))
        if initial_state is not None:
            S0[:] = self._k_first(_f64(initial_state))
        self.S0 = S0[self.order]

    def _k_first(self, state):
        return np.swapaxes(state, -1, -2) if self.options.state_v_first else state

    def running(self, t):
        """(number of sequences with a token t, their rows in the flattened tokens)"""
        n = int(np.searchsorted(-self.length, -t, side="left"))
        return n, self.begin[:n] + t

    def decayed(self, S, rows):
        """exp(g_t) S, with exp(-inf) S = 0: a closed gate forgets whatever the state was."""
        return np.exp(self.g[rows])[..., None, None] * S

    def step(self, S, rows):
        """One token of the recurrence. Returns (S~, error v - S~^T k, S_t)."""
        decayed = self.decayed(S, rows)
        error = self.v[rows] - (self.k[rows][:, :, None, :] @ decayed)[:, :, 0, :]
        u = self.beta[rows][..., None] * error
        return decayed, error, decayed + self.k[rows][..., None] * u[:, :, None, :]

    def unsort(self, sorted_rows):
        out = np.empty_like(sorted_rows)
        out[self.order] = sorted_rows
        return out


def forward(q, k, v, g=None, beta=None, *, initial_state=None, cu_seqlens=None, A_log=None, dt_bias=None, options=None,
            snapshots=()):
    """o [B, T, Hv, V], final_state [N, ..], and the states after `t` tokens of sequence `n` for each (n, t) in snapshots.

    Tokens outside every sequence have zero outputs.
    """
    c = _Call(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, options)
    o = np.zeros((c.B * c.T, c.Hv, c.V))
    S = c.S0.copy()
    snapshots = list(snapshots)
    position = np.empty(c.N, dtype=np.int64)
    position[c.order] = np.arange(c.N)
    wanted = {}
    for i, (n, t) in enumerate(snapshots):
        wanted.setdefault(int(t), []).append((i, position[n]))
    taken = np.zeros((len(snapshots), c.Hv, c.K, c.V))
    for t in range(c.steps + 1):
        for i, row in wanted.get(t, ()):
            taken[i] = S[row]
        if t == c.steps:
            break
        n, rows = c.running(t)
        _, _, S[:n] = c.step(S[:n], rows)
        o[rows] = c.scale * (c.q[rows][:, :, None, :] @ S[:n])[:, :, 0, :]
    return o.reshape(c.B, c.T, c.Hv, c.V), c._k_first(c.unsort(S)), c._k_first(taken)


def backward(q, k, v, g=None, beta=None, *, do=None, dht=None, initial_state=None, cu_seqlens=None, A_log=None,
             dt_bias=None, options=None):
    """Gradients of <o, do> + <final_state, dht> by the reverse recurrence, as a dictionary.

    Keys: dq, dk, dv, dg, dbeta, dh0, and with the gate dA_log, ddt_bias; each with respect to the value as it was given.
    dA_log_terms and ddt_bias_terms are the norms, head by head, of the tokens' terms that those two sum up.
    """
    c = _Call(q, k, v, g, beta, initial_state, cu_seqlens, A_log, dt_bias, options)
    tokens = c.B * c.T
    do = np.zeros((tokens, c.Hv, c.V)) if do is None else _f64(do).reshape(tokens, c.Hv, c.V)
    dS = np.zeros_like(c.S0)
    if dht is not None:
        dS[:] = c._k_first(_f64(dht))[c.order]
    dq, dk = np.zeros((tokens, c.Hv, c.K)), np.zeros((tokens, c.Hv, c.K))
    dv = np.zeros((tokens, c.Hv, c.V))
    dg, dbeta = np.zeros((tokens, c.Hv)), np.zeros((tokens, c.Hv))

    starts, S = [], c.S0.copy()
    for t in range(c.steps):
        n, rows = c.running(t)
        if t % SEGMENT == 0:
            starts.append(S[:n].copy())
        _, _, S[:n] = c.step(S[:n], rows)

    for segment in range(len(starts) - 1, -1, -1):
        S, tape = starts[segment], []
        for t in range(segment * SEGMENT, min((segment + 1) * SEGMENT, c.steps)):
            n, rows = c.running(t)
            decayed, error, S = c.step(S[:n], rows)
            tape.append((n, rows, decayed, error, S))
        for n, rows, decayed, error, S in reversed(tape):
            q_t, k_t, do_t, beta_t = c.q[rows], c.k[rows], do[rows], c.beta[rows][..., None]
            d = dS[:n]
            d += c.scale * q_t[..., None] * do_t[:, :, None, :]
            dq[rows] = c.scale * (S @ do_t[..., None])[..., 0]
            du = (k_t[:, :, None, :] @ d)[:, :, 0, :]
            dbeta[rows] = (du * error).sum(-1)
            derror = beta_t * du
            dv[rows] = derror
            dk[rows] = (d @ (beta_t * error)[..., None])[..., 0] - (decayed @ derror[..., None])[..., 0]
            d -= k_t[..., None] * derror[:, :, None, :]
            dg[rows] = (d * decayed).sum((-1, -2))
            d *= np.exp(c.g[rows])[..., None, None]

    dq, dk = (x.reshape(tokens, c.Hq, c.group, c.K).sum(2) for x in (dq, dk))
    o = c.options
    if o.use_qk_l2norm_in_kernel:
        dq = c.q_rstd * (dq - c.q_unit * (c.q_unit * dq).sum(-1, keepdims=True))
        dk = c.k_rstd * (dk - c.k_unit * (c.k_unit * dk).sum(-1, keepdims=True))
    result = {}
    if o.use_gate_in_kernel:
        # Only tokens of a sequence count: dg is zero elsewhere.
        result["dA_log"], result["dA_log_terms"] = (dg * c.g).sum(0), np.linalg.norm(dg * c.g, axis=0)
        dg = dg * -np.exp(c.A_log) * sigmoid(c.gate_in)
        result["ddt_bias"], result["ddt_bias_terms"] = dg.sum(0), np.linalg.norm(dg, axis=0)
    if o.use_beta_sigmoid_in_kernel:
        s = sigmoid(c.beta_raw)
        dbeta = dbeta * s * (1 - s) * (2.0 if o.allow_neg_eigval else 1.0)
    shape = (c.B, c.T)
    result.update(
        dq=dq.reshape(*shape, c.Hq, c.K), dk=dk.reshape(*shape, c.Hq, c.K), dv=dv.reshape(*shape, c.Hv, c.V),
        dg=dg.reshape(*shape, c.Hv), dbeta=dbeta.reshape(*shape, c.Hv), dh0=c._k_first(c.unsort(dS)))
    return result


def chunk_starts(B, T, cu_seqlens=None):
    """The (sequence, token) pairs of the rows of h, sequence by sequence: snapshots for forward()."""
    _, length = sequence_table(B, T, cu_seqlens)
    return [(n, t) for n, length_n in enumerate(length) for t in range(0, int(length_n), CHUNK)]


def chunk_cumsum(g, cu_seqlens=None, floor=-80.0):
    """Sum of log decays from each chunk's start, inclusive, each clamped at `floor` first: [B, T, Hv]. Zero outside the sequences."""
    B, T, Hv = g.shape
    flat, out = np.maximum(_f64(g), floor).reshape(B * T, Hv), np.zeros((B * T, Hv))
    for begin, length in zip(*sequence_table(B, T, cu_seqlens)):
        for t in range(0, int(length), CHUNK):
            chunk = slice(begin + t, begin + min(t + CHUNK, int(length)))
            out[chunk] = np.cumsum(flat[chunk], axis=0)
    return out.reshape(B, T, Hv)


def chunk_inverse(k, beta, cu_seqlens=None):
    """A [B, T, Hv, 64]: row t of (I + strict_lower(diag(beta) K K^T))^-1 of its chunk; columns past the chunk's end are zero."""
    B, T, Hq, K = k.shape
    Hv = beta.shape[2]
    k_flat = np.repeat(_f64(k).reshape(B * T, Hq, K), Hv // Hq, axis=1)
    beta_flat, out = _f64(beta).reshape(B * T, Hv), np.zeros((B * T, Hv, CHUNK))
    for begin, length in zip(*sequence_table(B, T, cu_seqlens)):
        for t in range(0, int(length), CHUNK):
            chunk = slice(begin + t, begin + min(t + CHUNK, int(length)))
            keys = np.moveaxis(k_flat[chunk], 1, 0)
            n = keys.shape[1]
            M = np.tril(np.moveaxis(beta_flat[chunk], 1, 0)[..., None] * (keys @ np.swapaxes(keys, -1, -2)), -1)
            out[chunk, :, :n] = np.moveaxis(np.linalg.inv(np.eye(n) + M), 0, 1)
    return out.reshape(B, T, Hv, CHUNK)


def _usable(index, null_index, slots):
    return null_index < index < slots and index >= 0


def pooled(q, k, v, g, beta, pool, initial_indices, final_indices=None, *, cu_seqlens=None, has_initial_state=None,
           num_accepted_tokens=None, null_index=-1, checkpoint_every=0, checkpoint_offsets=None, checkpoint_indices=None,
           A_log=None, dt_bias=None, options=None):
    """States in a pool: prefill (cu_seqlens given, B = 1) and decode (q [N, T, ..], one sequence a row).

    Returns (o, pool afterwards, packed checkpoints). The output of a row whose read is skipped by a null index, and that
    is not told to start from zero, is that of a skipped row: zero.
    """
    pool = _f64(pool).copy()
    before, slots = pool.copy(), pool.shape[0]
    initial_indices = np.asarray(initial_indices, dtype=np.int64)
    final_indices = initial_indices if final_indices is None else np.asarray(final_indices, dtype=np.int64)
    begin, length = sequence_table(q.shape[0], q.shape[1], cu_seqlens)
    N = len(begin)
    state = np.zeros((N, *pool.shape[1:]))
    skipped = np.zeros(N, dtype=bool)
    for n in range(N):
        slot = initial_indices[n]
        if num_accepted_tokens is not None:
            slot = slot[int(num_accepted_tokens[n]) - 1]
        if has_initial_state is not None and not has_initial_state[n]:
            continue
        if _usable(slot, null_index, slots):
            state[n] = before[slot]
        else:
            skipped[n] = True
    per_token = final_indices.ndim == 2
    snapshots = [(n, t + 1) for n in range(N) for t in range(int(length[n]))] if per_token else []
    boundaries = []
    if checkpoint_every:
        boundaries = [(n, t) for n in range(N) for t in range(checkpoint_every, int(length[n]) + 1, checkpoint_every)]
    listed = []
    for position in () if checkpoint_offsets is None else checkpoint_offsets:
        n = int(np.searchsorted(begin + length, int(position), side="left"))
        listed.append((n, int(position) - int(begin[n])))
    o, final, taken = forward(q, k, v, g, beta, initial_state=state, cu_seqlens=cu_seqlens, A_log=A_log, dt_bias=dt_bias,
                              options=options, snapshots=[*snapshots, *boundaries, *listed])
    flat = o.reshape(-1, *o.shape[2:])
    for n in np.flatnonzero(skipped):
        flat[begin[n]:begin[n] + length[n]] = 0
    for i, (n, t) in enumerate(snapshots):
        if not skipped[n] and _usable(final_indices[n, t - 1], null_index, slots):
            pool[final_indices[n, t - 1]] = taken[i]
    if not per_token:
        for n in range(N):
            if not skipped[n] and _usable(final_indices[n], null_index, slots):
                pool[final_indices[n]] = final[n]
    rows = taken[len(snapshots):len(snapshots) + len(boundaries)]
    for i, (n, _) in enumerate(listed):
        if not skipped[n] and _usable(int(checkpoint_indices[i]), null_index, slots):
            pool[int(checkpoint_indices[i])] = taken[len(snapshots) + len(boundaries) + i]
    return o, pool, rows


def verified(q, k, v, g, beta, pool, initial_indices, parents=None, *, null_index=-1, A_log=None, dt_bias=None, options=None):
    """Draft tokens in trees, from a pool that is only read: each token is a call of its own, from its parent's state.

    Returns (o [N, T, Hv, V], states after each token [N, T, ..], which rows were skipped).
    """
    pool, (N, T) = _f64(pool), q.shape[:2]
    o, states = np.zeros((N, T, *v.shape[2:])), np.zeros((N, T, *pool.shape[1:]))
    skipped = np.array([not _usable(int(slot), null_index, pool.shape[0]) for slot in initial_indices], dtype=bool)
    rows = np.flatnonzero(~skipped)
    for t in range(T):
        before = np.zeros((N, *pool.shape[1:]))
        for n in rows:
            parent = t - 1 if parents is None else int(parents[n][t])
            before[n] = states[n, parent] if 0 <= parent < t else pool[int(initial_indices[n])]
        token = [None if x is None else _f64(x)[rows, t:t + 1] for x in (q, k, v, g, beta)]
        found, states[rows, t], _ = forward(*token, initial_state=before[rows], A_log=A_log, dt_bias=dt_bias, options=options)
        o[rows, t] = found[:, 0]
    return o, states, skipped
