"""workspace_size(): no call that its arguments allow takes more, whatever strides, dtypes and optional tensors it has."""

import helpers
import pytest
import torch
from helpers import make_inputs
from hypothesis import given, settings
from hypothesis import strategies as st

import flash_qla
from flash_qla import _ffi, _options, _torch

# How a tensor may lie in memory.
LAYOUTS = ["plain", "plain", "off by one", "gaps", "last dimension first", "expanded"]


def lay_out(t, layout):
    """The tensor's values (or, expanded, some of them) in another layout."""
    if t is None or layout == "plain" or t.numel() == 0:
        return t
    if layout == "off by one":
        return torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape)
    if layout == "gaps":
        return torch.stack([t, t], dim=-1)[..., 0]
    if layout == "last dimension first":
        return t.movedim(-1, 0).contiguous().movedim(0, -1)
    return t[..., :1].expand(t.shape)


def workspace_of(texts):
    return int(next(line for line in texts[0].splitlines() if line.startswith("workspace: ")).split()[1])


@st.composite
def calls(draw, contiguous=False):
    """(what workspace_size() is asked, the bytes that a smaller call takes)"""
    op = draw(st.sampled_from(["chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "backward",
                               "fused_recurrent_gated_delta_rule", "gated_delta_rule_prefill", "gated_delta_rule_decode"]))
    K, V = draw(st.sampled_from([(128, 128), (128, 128), (64, 32), (3, 5)]))
    Hq, group = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([1, 2, 3]))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    gate_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    state_dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    raw = op not in ("chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd") and draw(st.booleans())
    v_first = draw(st.booleans())
    sizes = dict(Hq=Hq, Hv=Hq * group, K=K, V=V, dtype=dtype, gate_dtype=gate_dtype, beta_dtype=gate_dtype, state_dtype=state_dtype,
                 raw=raw, state_v_first=v_first, drawn_on=helpers.settings.device)
    longest = 1500 if helpers.settings.device == "cpu" else 20_000  # nothing is computed, but the inputs are made
    decode = op == "gated_delta_rule_decode"
    if decode or draw(st.booleans()):
        x = make_inputs(B=draw(st.integers(1, 9)), T=draw(st.integers(1, 16 if decode else 700)), **sizes)
    else:
        x = make_inputs(seqlens=draw(st.lists(st.sampled_from([0, 1, 64, 65, 300, longest]), min_size=1, max_size=5)),
                        padding=draw(st.integers(0, 70)), **sizes)
    tokens, N = x.q.shape[0] * x.q.shape[1], x.num_sequences

    def laid_out(t):
        return t if contiguous else lay_out(t, draw(st.sampled_from(LAYOUTS)))

    x = x.replace(**{name: laid_out(getattr(x, name)) for name in ("q", "k", "v", "g", "beta", "initial_state", "cu_seqlens", "do", "dht")})
    if not contiguous and draw(st.booleans()):
        x = x.replace(do=x.do.float())
    auto_cp, force = draw(st.sampled_from([True, False, "invariant"])), draw(st.booleans())
    asked = dict(op="chunk_gated_delta_rule_bwd" if op == "backward" else op, max_tokens=tokens + draw(st.sampled_from([0, 1, 3000])),
                 max_seqs=N + draw(st.sampled_from([0, 1, 40])), Hq=Hq, Hv=Hq * group, K=K, V=V, dtype=dtype, gate_dtype=gate_dtype,
                 state_dtype=state_dtype, contiguous=contiguous, device=helpers.settings.device, state_v_first=v_first, auto_cp=auto_cp)
    if raw:
        asked |= dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True)
    return asked, bytes_of(draw, op, x, asked, auto_cp, force)


def bytes_of(draw, op, x, asked, auto_cp, force):
    some = dict(g=x.g if x.options.get("use_gate_in_kernel") or draw(st.booleans()) else None, beta=x.beta)
    common = dict(q=x.q, k=x.k, v=x.v, **some)
    state = x.initial_state if draw(st.booleans()) else None
    raw = {key: x.options[key] for key in x.options if key.startswith("use_")} | dict(A_log=x.A_log, dt_bias=x.dt_bias)
    Hv, K, V, v_first = asked["Hv"], asked["K"], asked["V"], asked["state_v_first"]
    A = torch.zeros(*x.v.shape[:3], 64, dtype=x.dtype, device=x.q.device) if draw(st.booleans()) else None
    incoming = dict(do=x.do if draw(st.booleans()) else None, dht=x.dht if draw(st.booleans()) else None)
    with _ffi.explaining() as texts:
        if op == "chunk_gated_delta_rule":
            asked["force_intra_cp"] = force
            flash_qla.chunk_gated_delta_rule(**common, **raw, initial_state=state, cu_seqlens=x.cu_seqlens, auto_cp=auto_cp,
                                             force_intra_cp=force, state_v_first=v_first, output_final_state=draw(st.booleans()))
        elif op == "chunk_gated_delta_rule_fwd":
            flash_qla.chunk_gated_delta_rule_fwd(**common, initial_state=state, cu_seqlens=x.cu_seqlens, auto_cp=auto_cp,
                                                 state_v_first=v_first, output_h=draw(st.booleans()))
        elif op == "chunk_gated_delta_rule_bwd":
            flash_qla.chunk_gated_delta_rule_bwd(**common, A=A, **incoming, initial_state=state, cu_seqlens=x.cu_seqlens,
                                                 auto_cp=auto_cp, state_v_first=v_first)
        elif op == "backward":  # as autograd makes it: only the gradients that are wanted
            asked["force_intra_cp"] = force
            options = _options.make_options("backward", None, v_first, *(bool(x.options.get(key)) for key in (
                "use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")), False, auto_cp, force)
            wanted = [draw(st.booleans()) for _ in range(8)]
            inputs = (x.q, x.k, x.v, some["g"], x.beta, x.A_log, x.dt_bias, x.cu_seqlens, state)
            _torch._implementations["chunk_backward"](options, inputs, (False, A, *incoming.values(), False, wanted))
        elif op == "fused_recurrent_gated_delta_rule":
            flash_qla.fused_recurrent_gated_delta_rule(**common, **raw, initial_state=state, cu_seqlens=x.cu_seqlens,
                                                       state_v_first=v_first, output_final_state=draw(st.booleans()))
        else:
            slots, n = draw(st.sampled_from([1, 20])), x.num_sequences
            pool = torch.zeros(slots, Hv, *((V, K) if v_first else (K, V)), dtype=asked["state_dtype"], device=x.q.device)
            pooled = dict(state_pool=pool, initial_state_indices=torch.zeros(n, dtype=torch.int64, device=pool.device),
                          out=None if asked["contiguous"] else torch.zeros(*x.v.shape, 2, dtype=x.dtype, device=pool.device)[..., 0])
            if op == "gated_delta_rule_prefill":
                pooled |= dict(cu_seqlens=x.cu_seqlens, auto_cp=auto_cp)
                listed = draw(st.sampled_from([0, 1, 100]))
                if listed:
                    indices = torch.zeros(listed, dtype=torch.int32, device=pool.device)
                    pooled |= dict(checkpoint_offsets=indices, checkpoint_indices=indices.clone())
                    asked["checkpoint_offsets"] = listed + draw(st.sampled_from([0, 5]))
            getattr(flash_qla, op)(**common, **raw, **pooled, state_v_first=v_first)
    return workspace_of(texts)


@settings(max_examples=100)
@given(calls())
def test_no_call_takes_more(call):
    asked, taken = call
    assert taken <= flash_qla.workspace_size(**asked)


@settings(max_examples=100)
@given(calls(contiguous=True))
def test_no_contiguous_call_takes_more(call):
    asked, taken = call
    bound = flash_qla.workspace_size(**asked)
    assert taken <= bound <= flash_qla.workspace_size(**asked | dict(contiguous=False))


def test_the_backward_of_a_cumsum_counts():
    # The low-level backward takes the forward's cumsum, which some paths take apart in scratch; and it may lack A.
    x = make_inputs(seqlens=[300, 500], Hq=2, Hv=4, K=64, V=32)
    with _ffi.explaining() as texts:
        flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, x.g, x.beta, None, x.do, dht=x.dht, cu_seqlens=x.cu_seqlens)
    bound = flash_qla.workspace_size("chunk_gated_delta_rule_bwd", 800, 2, 2, 4, 64, 32, dtype="float32", device=helpers.settings.device)
    assert workspace_of(texts) <= bound


@pytest.mark.cpu_only
def test_torchs_number_of_threads_counts():
    x = make_inputs(B=40, T=3, Hq=2, Hv=4, K=64, V=32, grads=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4 * before + 3)
        with _ffi.explaining() as texts:
            flash_qla.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta)
        bound = flash_qla.workspace_size("chunk_gated_delta_rule", 120, 40, 2, 4, 64, 32, dtype="float32", device="cpu")
    finally:
        torch.set_num_threads(before)
    assert workspace_of(texts) <= bound


@pytest.mark.cuda
def test_gates_and_strides_that_need_copies_count():
    if "sm90" not in flash_qla.build_info()["chunk_forward"].split() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("copies are the Hopper path's")
    sizes = dict(max_tokens=8192, max_seqs=4, Hq=8, Hv=16, K=128, V=128)
    plain = flash_qla.workspace_size("gated_delta_rule_prefill", **sizes, contiguous=True)
    gates = flash_qla.workspace_size("gated_delta_rule_prefill", **sizes, contiguous=True, gate_dtype="bfloat16")
    strided = flash_qla.workspace_size("gated_delta_rule_prefill", **sizes)
    assert gates >= plain + 2 * 8192 * 16 * 4, "g and beta in float32"
    assert strided >= gates + 8192 * (2 * 8 + 2 * 16) * 128 * 2, "q, k, v and o"
