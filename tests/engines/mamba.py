"""What a serving engine's GDN layer does around the recurrence, in plain PyTorch: for stand-ins and expectations."""

import helpers
import numpy as np
import oracle
import torch


def causal_convolution(x, weight, bias, conv_states, query_start_loc, cache_indices, has_initial_state):
    """silu of the causal convolution of packed tokens x [dim, T] with weight [dim, W]; conv_states [slots, dim, W - 1] in place."""
    out, width = torch.empty_like(x), weight.shape[1] - 1
    for n in range(len(query_start_loc) - 1):
        begin, end, slot = int(query_start_loc[n]), int(query_start_loc[n + 1]), int(cache_indices[n])
        if begin == end:
            continue
        past = conv_states[slot] if has_initial_state is not None and has_initial_state[n] else torch.zeros_like(conv_states[slot])
        tokens = torch.cat([past.to(x.dtype), x[:, begin:end]], 1)
        windows = tokens.float().unfold(1, width + 1, 1)  # [dim, T, W]
        y = (windows * weight.float()[:, None]).sum(-1) + (0 if bias is None else bias.float()[:, None])
        out[:, begin:end] = torch.nn.functional.silu(y).to(x.dtype)
        conv_states[slot] = tokens[:, -width:].to(conv_states.dtype)
    return out


def recurrence(q, k, v, a, b, A_log, dt_bias, states, lengths):
    """(o [T, Hv, V], final states) of packed sequences in double precision; gates, sigmoid and norms applied. states
    [N, Hv, V, K]."""
    options = helpers.oracle_options(q.dtype, dict(
        state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True))
    tensors = (helpers.to_numpy(t)[None] for t in (q, k, v, a, b))
    o, final, _ = oracle.forward(*tensors, initial_state=helpers.to_numpy(states), cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]),
                                 A_log=helpers.to_numpy(A_log), dt_bias=helpers.to_numpy(dt_bias), options=options)
    return torch.from_numpy(o[0]), torch.from_numpy(final)


def raw_inputs(tokens, Hq, Hv, K, V, dtype, seed=0):
    """mixed_qkv [T, 2 Hq K + Hv V], a and b [T, Hv] as projections leave them."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, 2 * Hq * K + Hv * V, generator=generator).to(dtype)
    a, b = (torch.randn(tokens, Hv, generator=generator).to(dtype) for _ in range(2))
    return mixed, a, b


def parameters(Hv, seed=1):
    """A_log and dt_bias [Hv]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(Hv, generator=generator) * 2 - 2, torch.randn(Hv, generator=generator)
