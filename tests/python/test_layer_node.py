"""gated_delta_net against the three operations it is made of, the oracles, and itself: layouts, states, packing,
compilation."""

import layer_oracle
import numpy as np
import oracle
import pytest
import torch
from helpers import BOUNDS, assert_bitwise, assert_close, dtype_name, offsets, settings, to_numpy
from layer_helpers import drawn

import flash_qla

B, T, HQ, HV, K, V, W = 2, 70, 2, 4, 16, 24, 4
C = 2 * HQ * K + HV * V
SIZES = dict(num_k_heads=HQ, num_v_heads=HV, head_k_dim=K, head_v_dim=V)


class Layer:
    """Inputs of one call in the joined layout, and the same values in the others."""

    def __init__(self, dtype=torch.float32, B=B, T=T, seqlens=None, bias=False, seed=0):
        if seqlens is not None:
            B, T = 1, sum(seqlens)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.tensors = dict(
            qkv=drawn((B, T, C), dtype, seed=seed), z=drawn((B, T, HV * V), dtype, seed=seed + 1), a=drawn((B, T, HV), dtype, seed=seed + 2),
            b=drawn((B, T, HV), dtype, seed=seed + 3), conv_weight=drawn((C, W), wide, 0.5, seed=seed + 4),
            conv_bias=drawn((C,), wide, seed=seed + 5) if bias else None, A_log=drawn((HV,), wide, 0.5, seed=seed + 6) - 1,
            dt_bias=drawn((HV,), wide, seed=seed + 7), norm_weight=drawn((V,), wide, seed=seed + 8))
        self.cu_seqlens = None if seqlens is None else offsets(seqlens)
        self.options = dict(norm_eps=1e-6, **SIZES)
        self.dout = drawn((B, T, HV * V), dtype, seed=seed + 9)

    def call(self, tensors=None, **changes):
        return flash_qla.gated_delta_net(**(tensors or self.tensors), **{**self.options, "cu_seqlens": self.cu_seqlens, **changes})

    def run(self, **changes):
        leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in self.tensors.items()}
        out = self.call(leaves, **changes)
        given = [name for name, t in leaves.items() if t is not None]
        gradients = torch.autograd.grad(out, [leaves[name] for name in given], self.dout)
        return {"out": out.detach(), **{"d" + name: g for name, g in zip(given, gradients)}}

    def composed(self, **changes):
        """The same by the three operations."""
        leaves = {name: None if t is None else t.detach().requires_grad_() for name, t in self.tensors.items()}
        x = leaves["qkv"]
        y, _ = flash_qla.causal_conv1d(x, leaves["conv_weight"], leaves["conv_bias"], activation="silu", cu_seqlens=self.cu_seqlens)
        q, k, v = y.split([HQ * K, HQ * K, HV * V], -1)
        rows = x.shape[:2]
        o, _ = flash_qla.chunk_gated_delta_rule(
            q.reshape(*rows, HQ, K), k.reshape(*rows, HQ, K), v.reshape(*rows, HV, V), leaves["a"], leaves["b"], cu_seqlens=self.cu_seqlens,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, A_log=leaves["A_log"], dt_bias=leaves["dt_bias"],
            use_beta_sigmoid_in_kernel=True, **changes)
        out = flash_qla.rms_norm_gated(o, leaves["z"].view(o.shape), leaves["norm_weight"]).flatten(2)
        given = [name for name, t in leaves.items() if t is not None]
        gradients = torch.autograd.grad(out, [leaves[name] for name in given], self.dout)
        return {"out": out.detach(), **{"d" + name: g for name, g in zip(given, gradients)}}

    def reference(self):
        """The output in fp64 by the oracles."""
        t = {name: to_numpy(value) for name, value in self.tensors.items()}
        cu = None if self.cu_seqlens is None else self.cu_seqlens.cpu().numpy()
        y, _ = layer_oracle.conv_forward(t["qkv"], t["conv_weight"], t["conv_bias"],
                                         options=layer_oracle.Conv("silu", 2 * HQ, K, cu_seqlens=cu))
        q, k, v = np.split(y, [HQ * K, 2 * HQ * K], -1)
        rows = y.shape[:2]
        g, beta = layer_oracle.gates(t["a"], t["b"], t["A_log"], t["dt_bias"])
        o, _, _ = oracle.forward(q.reshape(*rows, HQ, K), k.reshape(*rows, HQ, K), v.reshape(*rows, HV, V), g=g, beta=beta, cu_seqlens=cu,
                                 options=oracle.Options())
        return layer_oracle.norm_gated(o, t["z"].reshape(o.shape), t["norm_weight"]).reshape(*rows, -1)


# Against fp64 the whole has the delta rule's bound: its error and those of the other two.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=dtype_name)
@pytest.mark.parametrize("seqlens", [None, [3, 0, 67, 40]])
def test_output(dtype, seqlens):
    layer = Layer(dtype, seqlens=seqlens, bias=True)
    out = layer.call()
    assert out.shape == layer.dout.shape and out.dtype == dtype
    assert_close("out", out, layer.reference(), BOUNDS[dtype]["state"] * (1 if dtype == torch.float32 else 2))


@pytest.mark.parametrize("seqlens", [None, [3, 0, 67, 40]])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_are_those_of_the_three_operations(seqlens, bias):
    layer = Layer(seqlens=seqlens, bias=bias)
    want = layer.composed()
    for name, value in layer.run().items():
        assert_close(name, value, to_numpy(want[name]), 2e-5)


def test_gradients_in_fp64_are_exact():
    if settings.device == "cuda":
        pytest.skip("fp64 is for the CPU")
    layer = Layer(torch.float64, bias=True)
    want = layer.composed()
    for name, value in layer.run().items():
        assert_close(name, value, to_numpy(want[name]), 1e-11)


@pytest.mark.cpu_only
def test_gradcheck():
    layer = Layer(torch.float64, B=1, T=5, bias=True)
    names = [name for name, t in layer.tensors.items() if t is not None]
    assert torch.autograd.gradcheck(lambda *given: layer.call(dict(zip(names, given))), [layer.tensors[n].requires_grad_() for n in names],
                                    fast_mode=True)


def interleaved(layer):
    """Qwen3-Next's projections of the same values."""
    rows, group = layer.tensors["qkv"].shape[:2], HV // HQ
    q, k, v = layer.tensors["qkv"].split([HQ * K, HQ * K, HV * V], -1)
    parts = [t.reshape(*rows, HQ, -1) for t in (q, k, v, layer.tensors["z"])]
    gates = [t.reshape(*rows, HQ, group) for t in (layer.tensors["b"], layer.tensors["a"])]
    return {**layer.tensors, "qkv": torch.cat(parts, -1).flatten(2), "z": None, "a": torch.cat(gates, -1).flatten(2), "b": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
def test_interleaved(dtype):
    layer = Layer(dtype)
    want = layer.run()
    tensors = {name: None if t is None else t.detach().requires_grad_() for name, t in interleaved(layer).items()}
    out = layer.call(tensors, layout="interleaved")
    assert_bitwise("out", out, want["out"])
    given = [name for name, t in tensors.items() if t is not None]
    got = dict(zip(given, torch.autograd.grad(out, [tensors[name] for name in given], layer.dout)))
    rows, group = out.shape[:2], HV // HQ
    by_head = got["qkv"].view(*rows, HQ, -1)
    dq, dk, dv, dz = by_head.split([K, K, group * V, group * V], -1)
    assert_bitwise("dqkv", torch.cat([t.reshape(*rows, -1) for t in (dq, dk, dv)], -1), want["dqkv"])
    assert_bitwise("dz", dz.reshape(*rows, -1), want["dz"])
    db, da = got["a"].view(*rows, HQ, -1).split(group, -1)
    assert_bitwise("da", da.reshape(*rows, -1), want["da"])
    assert_bitwise("db", db.reshape(*rows, -1), want["db"])
    for name in ("conv_weight", "A_log", "dt_bias", "norm_weight"):
        assert_bitwise("d" + name, got[name], want["d" + name])


def test_separate():
    layer = Layer()
    want = layer.run()
    parts = [t.detach().contiguous().requires_grad_() for t in layer.tensors["qkv"].split([HQ * K, HQ * K, HV * V], -1)]
    out = layer.call({**layer.tensors, "qkv": tuple(parts)}, layout="separate")
    assert_bitwise("out", out, want["out"])
    assert_bitwise("dqkv", torch.cat(torch.autograd.grad(out, parts, layer.dout), -1), want["dqkv"])


def test_recompute_is_bitwise_equal():
    layer = Layer(torch.bfloat16)
    want = layer.run()
    for name, value in layer.run(recompute=True).items():
        assert_bitwise(name, value, want[name])


def test_negative_eigenvalues_and_sigmoid_gate():
    layer = Layer()
    doubled = layer.call(allow_neg_eigval=True)
    assert not torch.equal(doubled, layer.call())
    want = layer.composed(allow_neg_eigval=True)
    got = layer.run(allow_neg_eigval=True)
    for name in want:
        assert_close(name, got[name], to_numpy(want[name]), 2e-5)
    assert not torch.equal(layer.call(gate_activation="sigmoid"), layer.call())


def states(layer, N, dtype=torch.float32, L=W):
    return (torch.zeros(N, C, L, dtype=layer.tensors["qkv"].dtype, device=settings.device),
            torch.zeros(N, HV, K, V, dtype=dtype, device=settings.device))


def part(layer, begin, end):
    return {name: t[:, begin:end] if name in ("qkv", "z", "a", "b") else t for name, t in layer.tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=dtype_name)
@pytest.mark.parametrize("layout", ["joined", "interleaved"])
def test_prefill_and_decode_with_states_are_one_prefill(dtype, layout):
    layer = Layer(dtype, T=72)
    layer.tensors = {name: t for name, t in layer.tensors.items()}
    tensors = layer.tensors if layout == "joined" else interleaved(layer)
    whole = layer.call(tensors, layout=layout)
    conv_state, recurrent_state = states(layer, B)

    def step(begin, end):
        cut = {name: t[:, begin:end] if t is not None and t.dim() == 3 else t for name, t in tensors.items()}
        return layer.call(cut, layout=layout, conv_state=conv_state, recurrent_state=recurrent_state)

    with torch.no_grad():
        parts = [step(0, 64), *(step(t, t + 1) for t in range(64, 68)), step(68, 72)]
    bound = 1e-4 if dtype == torch.float32 else 1e-2
    assert_close("out", torch.cat(parts, 1), to_numpy(whole), bound)
    assert_bitwise("conv_state", conv_state, layer.tensors["qkv"][:, 68:72].transpose(1, 2).contiguous())


def test_prefill_in_parts_of_whole_chunks_is_bitwise_equal():
    layer = Layer(T=192)
    whole = layer.call(auto_cp=False)
    state = dict(zip(("conv_state", "recurrent_state"), states(layer, B)))
    with torch.no_grad():
        parts = [layer.call(part(layer, begin, end), auto_cp=False, **state) for begin, end in ((0, 64), (64, 192))]
    assert_bitwise("out", torch.cat(parts, 1), whole)


def test_packed_is_single_bitwise():
    layer = Layer(seqlens=[70, 3, 0, 130])
    packed = layer.call(auto_cp=False)
    for begin, end in ((0, 70), (70, 73), (73, 203)):
        assert_bitwise("out", packed[:, begin:end], layer.call(part(layer, begin, end), cu_seqlens=None, auto_cp=False))


def test_calls_with_states_are_forward_only():
    layer = Layer()
    state = dict(zip(("conv_state", "recurrent_state"), states(layer, B)))
    leaves = {**layer.tensors, "qkv": layer.tensors["qkv"].requires_grad_()}
    with pytest.raises(NotImplementedError, match="gated_delta_net: a call with states must be made without gradients"):
        layer.call(leaves, **state)


@pytest.mark.parametrize("layout", ["joined", "interleaved"])
def test_compiled(layout):
    layer = Layer()
    tensors = layer.tensors if layout == "joined" else interleaved(layer)
    names = [name for name, t in tensors.items() if t is not None]
    leaves = [tensors[name].detach().requires_grad_() for name in names]

    def step(*given):
        return layer.call({**tensors, **dict(zip(names, given))}, layout=layout).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(torch.autograd.grad(compiled(*leaves), leaves), torch.autograd.grad(step(*leaves), leaves)):
        assert_bitwise("gradient", got, want)


def test_compiled_step_mutates_its_states():
    layer = Layer(T=1)
    given, want_states = states(layer, B), states(layer, B)
    names = ("conv_state", "recurrent_state")
    with torch.no_grad():
        want = layer.call(**dict(zip(names, want_states)))
        torch._dynamo.reset()
        compiled = torch.compile(lambda *s: layer.call(**dict(zip(names, s))) + 0, fullgraph=True, backend="aot_eager")
        assert_bitwise("out", compiled(*given), want)
    for a, b in zip(given, want_states):
        assert_bitwise("state", a, b)


def test_autocast_and_other_dtypes_beside_qkv():
    layer = Layer(torch.bfloat16)
    want = layer.call()
    tensors = {**layer.tensors, "z": layer.tensors["z"].float(), "a": layer.tensors["a"].float()}
    assert_bitwise("out", layer.call(tensors), want)


REFUSED = {
    "sizes": (dict(num_v_heads=3), r"num_v_heads must be a multiple of num_k_heads \(3 and 2\)"),
    "channels": (dict(head_k_dim=17), r"qkv.shape .* must be"),
    "layout": (dict(layout="other"), "layout"),
    "separate": (dict(layout="separate"), "must be a tuple of three"),
    "interleaved": (dict(layout="interleaved"), r"z and b \(given\) must be None"),
    "gate": (dict(gate_activation="relu"), "gate_activation"),
    "one state": (dict(conv_state=torch.zeros(2, C, 4)), "must both be given"),
    "scale": (dict(scale=float("nan")), "scale must not be NaN"),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name):
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match="gated_delta_net: .*" + message):
        Layer().call(**changes)
