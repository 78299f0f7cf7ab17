"""What test_fla.py checks, each case in a fresh interpreter: `python fla_cases.py CASE`, with a package `fla` on the path.

CPU tensors stand for CUDA tensors: the rule that tells them apart is replaced, and so is the answer of slow_reason().
"""

import logging
import sys
import types

import torch

records = []


class Keep(logging.Handler):
    def emit(self, record):
        records.append(record.getMessage())


logging.getLogger("flash_qla").addHandler(Keep())
logging.getLogger("flash_qla").setLevel(logging.INFO)


def tensors(K=128, V=128, dtype=torch.bfloat16, T=70):
    x = torch.Generator().manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, K, generator=x), dim=-1).to(dtype) for _ in range(2))
    v, gate = torch.randn(1, T, 2, V, generator=x).to(dtype), torch.rand(1, T, 2, generator=x)
    return [q, k, v, -gate, gate]


def pretend(slow=None):
    """CPU tensors count as CUDA tensors, and slow_reason() answers `slow`."""
    from flash_qla import _paths
    from flash_qla.integrations import fla as integration

    asked = []
    integration._device_index = lambda q: 3
    _paths.slow_reason = lambda *key: asked.append(key) or slow
    return asked


def whose(result):
    return "fla" if isinstance(result[0], str) else "flash_qla"


def entry():
    """The backend that fla's registry holds for packages called flash_qla."""
    for name, attribute in (("fla.backends", "_operation_registries"), ("fla.ops.backends", "BackendRegistry")):
        if name in sys.modules:
            found = getattr(sys.modules[name], attribute)
            registry = (found if isinstance(found, dict) else found._registries)["gated_delta_rule"]
            assert list(registry._backends) == ["flash_qla"], "one entry, whose place was taken"
            return registry._backends["flash_qla"]


def fla_first():
    """Registered when flash_qla is imported: the first call is decided already."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    old = entry() if "fla.backends" in sys.modules else None  # before 0.6 there is none until the first call
    import flash_qla

    assert type(entry()).__name__ == "FlashQLANativeBackend" and entry() is not old
    assert not torch.cuda.is_initialized()
    asked = pretend("path cuda_generic: sm90 needs a GPU of compute capability 9.0")
    assert whose(chunk_gated_delta_rule(*tensors())) == "fla"
    assert asked == [(3, torch.bfloat16, 128, 128, False)]
    pretend(None)
    assert whose(chunk_gated_delta_rule(*tensors())) == "flash_qla"
    from flash_qla.integrations import fla as integration

    before = entry()
    assert integration.register() == integration.register() == before.__class__.__mro__[-2].__module__
    assert entry() is before, "a second register() changes nothing"
    (line,) = records
    assert line.startswith(f"flash_qla {flash_qla.__version__}: fla's chunk_gated_delta_rule") and "sm90" in line, line
    integration.unregister()
    assert whose(chunk_gated_delta_rule(*tensors())) == "fla"


def flash_qla_first():
    """Registered at the first call on a device that finds fla there: that call may still pass fla's old object."""
    import flash_qla

    flash_qla.chunk_gated_delta_rule(*tensors())
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from flash_qla.integrations import fla as integration

    assert not records
    flash_qla.chunk_gated_delta_rule(*tensors())
    assert integration.awaited, "a call on the CPU registers nothing"
    pretend("slow")
    assert whose(chunk_gated_delta_rule(*tensors())) == "flash_qla", "fla's own rule still decides"
    assert type(entry()).__name__ == "FlashQLANativeBackend"
    assert not integration.awaited and len(records) == 1
    assert whose(chunk_gated_delta_rule(*tensors())) == "fla"
    assert whose(chunk_gated_delta_rule(*tensors())) == "fla"


def declines():
    """Each reason, in the order in which they are looked at: a call that breaks all of the rest too is named first."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    import flash_qla  # noqa: F401
    from flash_qla.integrations import fla as integration

    assert entry().chunk_gated_delta_rule_verifier(*tensors()) == (False, "needs CUDA tensors")
    pretend("slow")
    verify = entry().chunk_gated_delta_rule_verifier
    q, k, v, g, beta = tensors(K=300)
    rules = [
        ("needs q, k, v of one dtype", dict(v=v.float())),
        ("does not support context parallelism over cards", dict(cp_context=object())),
        ("needs chunk_size 64 (32)", dict(chunk_size=32)),
        ("does not support head_first", dict(head_first=True)),
        ("leaves it to fla to refuse state_v_first", dict(state_v_first=True, transpose_state_layout=True)),
        ("needs head dimensions up to 256 (300, 128)", {}),
    ]
    broken = {}
    for reason, options in reversed(rules):
        broken |= options
        call = {**dict(q=q, k=k, v=v, g=g, beta=beta), **broken}
        accepted, said = verify(**call)
        assert not accepted and said.startswith(reason), (reason, said)
        assert whose(chunk_gated_delta_rule(**call)) == "fla"
    assert verify(*tensors()) == (False, "slow")
    integration.unregister()
    assert verify(*tensors()) == (False, "was unregistered")
    integration.register()
    asked = pretend(None)
    for options in ({}, dict(chunk_size=64), dict(head_first=False), dict(transpose_state_layout=True), dict(state_v_first=True),
                    dict(use_gate_in_kernel=True, A_log=torch.zeros(2)), dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)):
        assert verify(*tensors(), **options) == (True, None), options
    assert {key[-1] for key in asked} == {False}
    for i in range(5):
        leaf = tensors()
        leaf[i].requires_grad_()
        assert verify(*leaf) == (True, None) and asked[-1][-1]
        with torch.no_grad():
            assert verify(*leaf) == (True, None) and not asked[-1][-1]
    for name in ("A_log", "dt_bias"):
        options = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2), name: torch.zeros(2, requires_grad=True)}
        assert verify(*tensors(), use_gate_in_kernel=True, **options) == (True, None) and asked[-1][-1], name


def computed_calls():
    """What a taken call computes, and that calls which fla's class knows go through its method."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

    import flash_qla

    pretend(None)
    watched, original = [], FlashQLABackend.chunk_gated_delta_rule

    def spy(self, *args, **kwargs):
        watched.append(kwargs)
        return original(self, *args, **kwargs)

    FlashQLABackend.chunk_gated_delta_rule = spy
    state = torch.randn(1, 2, 128, 128)
    gate = dict(use_gate_in_kernel=True, A_log=torch.zeros(2), dt_bias=torch.ones(2))
    sigmoid = dict(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)
    offsets = dict(cu_seqlens=torch.tensor([0, 30, 70]))
    cases = [
        (True, tensors(), dict(scale=0.5, use_qk_l2norm_in_kernel=True)),
        (True, tensors(), dict(initial_state=state, output_final_state=True, state_v_first=True)),
        (True, tensors(), offsets),
        (True, tensors(), offsets | dict(cu_seqlens_cpu=torch.tensor([0, 30, 70]), chunk_indices=torch.zeros(2, 2))),
        (False, tensors(), gate),
        (False, tensors(), sigmoid),
        (False, tensors(), gate | sigmoid | dict(initial_state=state, output_final_state=True)),
        (False, tensors(K=64, V=96), {}),
        (False, tensors(dtype=torch.float32), {}),
        (False, tensors(), dict(initial_state=state, transpose_state_layout=True, output_final_state=True)),
    ]
    for through_theirs, x, options in cases:
        watched.clear()
        got = chunk_gated_delta_rule(*x, unknown_keyword=1, **options)
        assert bool(watched) == through_theirs, options
        want = flash_qla.chunk_gated_delta_rule(*x, **options)
        assert torch.equal(got[0], want[0]) and (want[1] is None) == (got[1] is None)
        assert want[1] is None or torch.equal(got[1], want[1])
        plain = flash_qla.chunk_gated_delta_rule(*x)
        assert not options or not torch.equal(plain[0], want[0]), "an option that changes nothing tells nothing"
    q, k, v, g, beta = tensors()
    q.requires_grad_()
    chunk_gated_delta_rule(q, k, v, g, beta)[0].sum().backward()
    assert q.grad.abs().sum() > 0


def pretend_built(paths):
    """The build passes for one whose convolution has these paths."""
    from flash_qla import _tools

    built = _tools.build_info
    _tools.build_info = lambda: {**built(), "conv_forward": paths}


def pretend_layer():
    """The build passes for one with CUDA kernels."""
    pretend()
    pretend_built("cuda_layer cpu")


def layer():
    """The convolution and the gated norm, as fla's autograd functions call their passes."""
    from fla.modules.causal_conv1d import causal_conv1d_bwd, causal_conv1d_fwd, causal_conv1d_update
    from fla.modules.norm.fused_norm_gate import layer_norm_gated_bwd, layer_norm_gated_fwd

    import flash_qla
    from flash_qla.integrations import fla as integration

    x, residual, dy = (torch.randn(2, 9, 24) for _ in range(3))
    weight, bias, state, dstate = torch.randn(24, 4), torch.randn(24), torch.randn(2, 24, 4), torch.randn(2, 24, 4)
    assert causal_conv1d_fwd(x, weight, bias, None)[0] == "fla", "importing flash_qla hands over the delta rule alone"
    pretend_built("cpu")
    try:
        integration.register_layer()
    except NotImplementedError as error:
        assert "this build (of the CPU alone)" in str(error)
    else:
        raise AssertionError("registered kernels that are not built")
    pretend_layer()
    names = integration.register_layer()
    assert len(names) == 5 and integration.register_layer() == names

    leaves = [t.clone().requires_grad_() for t in (x, weight, bias, residual, state)]
    want = flash_qla.causal_conv1d(*leaves, output_final_state=True, activation="silu")
    gradients = torch.autograd.grad(want, leaves, (dy, dstate))
    for shape in ((2, 9, 24), (2, 9, 3, 8)):  # fla's callers may keep heads apart
        shaped = [t.reshape(shape) for t in (x, residual, dy)]
        found = causal_conv1d_fwd(shaped[0], weight, bias, shaped[1], state, True, "silu", chunk_size=64)
        assert found[0].shape == shape and torch.equal(found[0].reshape(x.shape), want[0])
        assert torch.equal(found[1], want[1])
        back = causal_conv1d_bwd(x=shaped[0], dy=shaped[2], dht=dstate, weight=weight, bias=bias, residual=shaped[1],
                                 initial_state=state, activation="silu")
        assert back[0].shape == shape and all(torch.equal(a.reshape(b.shape), b) for a, b in zip(back, gradients))
    assert causal_conv1d_fwd(x, weight, None, None)[1] is None
    packed = dict(cu_seqlens=torch.tensor([0, 4, 9]))
    found = causal_conv1d_fwd(x[:1], weight, None, None, None, True, **packed)
    want = flash_qla.causal_conv1d(x[:1], weight, output_final_state=True, **packed)
    assert torch.equal(found[0], want[0]) and torch.equal(found[1], want[1])
    back = causal_conv1d_bwd(x[:1], dy[:1], None, weight, **packed)
    assert back[0].shape == (1, 9, 24) and [t is None for t in back] == [False, False, True, True, True]

    whole = flash_qla.causal_conv1d(x, weight, bias, None, state, activation="swish")[0]
    for shape in ((2, 24), (1, 2, 24), (2, 1, 24)):
        cache = state.clone()
        y, left = causal_conv1d_update(x[:, 0].reshape(shape), cache, None, weight, bias, "swish")
        assert left is cache and y.shape == shape and torch.equal(cache[..., -1], x[:, 0])
        torch.testing.assert_close(y.reshape(2, 24), whole[:, 0], rtol=1e-6, atol=1e-6)

    rows = [t.reshape(-1, 24) for t in (x, residual)]
    leaves = [t.clone().requires_grad_() for t in (*rows, torch.rand(24), bias)]
    want = flash_qla.rms_norm_gated(*leaves, activation="sigmoid", eps=1e-3)
    gradients = torch.autograd.grad(want, leaves, dy.view(-1, 24))
    named = dict(activation="sigmoid", eps=1e-3, is_rms_norm=True)
    with torch.no_grad():
        y, mean, rstd, kept = layer_norm_gated_fwd(*leaves, residual=None, residual_dtype=None, **named)
    assert torch.equal(y, want) and mean is None and kept is leaves[0]
    torch.testing.assert_close(rstd, (leaves[0].square().mean(-1) + 1e-3).rsqrt().detach())
    back = layer_norm_gated_bwd(dy.view(-1, 24), *leaves, mean=None, rstd=rstd, x_dtype=x.dtype, **named)
    assert len(back) == 5 and back[4] is None and all(torch.equal(a, b) for a, b in zip(back, gradients))

    declined = [
        lambda: causal_conv1d_fwd(x, weight.repeat(1, 3), bias, None),
        lambda: causal_conv1d_fwd(x, weight, bias, None, activation="gelu"),
        lambda: causal_conv1d_fwd(x, weight, bias, None, state[..., :3]),
        lambda: causal_conv1d_fwd(x, weight, bias, residual.double()),
        lambda: causal_conv1d_bwd(x, dy, None),
        lambda: causal_conv1d_update(x[:, 0], state, x[:, 0], weight),
        lambda: layer_norm_gated_fwd(*leaves, is_rms_norm=False),
        lambda: layer_norm_gated_fwd(*leaves, residual=x, is_rms_norm=True),
        lambda: layer_norm_gated_fwd(*leaves, out_dtype=torch.float64, is_rms_norm=True),
        lambda: layer_norm_gated_fwd(*leaves, activation="tanh", is_rms_norm=True),
        lambda: layer_norm_gated_bwd(dy, *leaves, recompute_output=True, is_rms_norm=True),
        lambda: layer_norm_gated_bwd(dy, *leaves, has_residual=True, is_rms_norm=True),
    ]
    for call in declined:
        assert call()[0] == "fla"
    integration.unregister()
    assert causal_conv1d_fwd(x, weight, bias, None)[0] == "fla"


def layer_of_an_old_fla():
    """0.5.2 hands over operations, not functions."""
    import fla.ops.backends  # noqa: F401

    from flash_qla.integrations import fla as integration

    pretend_layer()
    try:
        integration.register_layer()
    except NotImplementedError as error:
        assert "fla must be 0.6 or newer" in str(error)
    else:
        raise AssertionError("registered with a registry of operations alone")


def switched_off():
    """FLA_FLASH_QLA=0 or FLA_DISABLE_BACKEND_DISPATCH=1 is set by who starts this."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    import flash_qla  # noqa: F401

    pretend(None)
    assert whose(chunk_gated_delta_rule(*tensors())) == "fla"
    (line,) = records
    assert "switched off by FLA_" in line, line


def without_fla():
    """register() says what is missing; importing and calling flash_qla says nothing."""
    sys.modules["fla"] = None  # hides one that is installed
    import flash_qla
    from flash_qla.integrations import fla as integration

    try:
        integration.register()
    except ImportError as error:
        assert "fla must be installed" in str(error)
    else:
        raise AssertionError("registered with a fla that is not there")
    flash_qla.chunk_gated_delta_rule(*tensors())
    assert not records


def unknown_registry():
    """register() says so; importing flash_qla leaves a line and goes on."""
    for name in ("fla", "fla.backends"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["fla"].__path__ = []
    import flash_qla
    from flash_qla.integrations import fla as integration

    assert len(records) == 1 and "was not taken over" in records[0], records
    flash_qla.chunk_gated_delta_rule(*tensors())
    assert len(records) == 1
    try:
        integration.register()
    except NotImplementedError as error:
        assert "fla must be a version that hands chunk_gated_delta_rule to backends" in str(error)
    else:
        raise AssertionError("registered with a registry that is not there")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(sys.argv[1], "passed")
