"""Requirement 19: what PyTorch does around the operations: compile, FakeTensor, opcheck, gradcheck, autocast, checkpointing."""

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs
from torch._subclasses.fake_tensor import FakeTensorMode

import flash_qla
from flash_qla._options import make_options

pytestmark = pytest.mark.requirement(19)

small = dict(T=70, Hq=1, Hv=2, K=16, V=8)
# On a GPU the Hopper path as well, in each of its dtypes: 300 tokens have their gradients computed there, too.
LARGE = [dict(T=300, Hq=1, Hv=2, K=128, V=128, dtype=dtype) for dtype in helpers.LOW]
sizes = pytest.mark.parametrize(
    "size", helpers.with_cuda([small], LARGE), ids=lambda size: f"{size['K']} {helpers.dtype_name(size.get('dtype', torch.float32))}")
NAMES = ("q", "k", "v", "g", "beta", "initial_state")


def call(q, k, v, g, beta, initial_state=None, **options):
    return flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, initial_state=initial_state, output_final_state=True, **options)


def leaves(x, names=NAMES):
    return [getattr(x, name).detach().clone().requires_grad_() for name in names]


def gradients(function, x, names=NAMES, **options):
    inputs = leaves(x, names)
    o, final_state = function(*inputs, **options)
    loss = (o.float() * x.do.float()).sum() + (final_state * x.dht).sum()
    return [o.detach(), final_state.detach(), *torch.autograd.grad(loss, inputs)]


@pytest.mark.cpu_only
@pytest.mark.parametrize("v_first", [False, True], ids=["kv", "vk"])
def test_gradcheck(v_first):
    x = make_inputs(T=5, Hq=1, Hv=2, K=3, V=4, dtype=torch.float64, state_v_first=v_first)
    assert torch.autograd.gradcheck(lambda *t: call(*t, state_v_first=v_first), leaves(x))


@pytest.mark.cpu_only
def test_gradcheck_across_chunks_and_sequences():
    x = make_inputs(seqlens=[66, 0, 3], Hq=1, Hv=1, K=2, V=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: call(*t, cu_seqlens=x.cu_seqlens), leaves(x), fast_mode=True)


@pytest.mark.cpu_only
@pytest.mark.parametrize("negative", [False, True])
def test_gradcheck_of_the_activations(negative):
    x = make_inputs(T=5, Hq=1, Hv=2, K=4, V=3, dtype=torch.float64, raw=True, allow_neg_eigval=negative)
    inputs = leaves(x, (*NAMES, "A_log", "dt_bias"))
    assert torch.autograd.gradcheck(lambda *t: call(*t[:6], A_log=t[6], dt_bias=t[7], **x.options), inputs)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("size", helpers.with_cuda([small, small | dict(dtype=torch.bfloat16)], LARGE), ids=str)
def test_compile_fullgraph(size, fresh_compiler):
    x = make_inputs(**size)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(call, x), gradients(compiled, x)):
        assert_bitwise("value", a, b)


@sizes
def test_compile_of_a_model_with_every_option(size, fresh_compiler):
    x = make_inputs(**size, seqlens=[size["T"], 0, 30], raw=True, allow_neg_eigval=True)

    def model(q, k, v, g, beta, initial_state):
        o, final_state = flash_qla.chunk_gated_delta_rule(
            q * 2, k + 0.1, torch.tanh(v), g, beta, initial_state=initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            A_log=x.A_log, dt_bias=x.dt_bias, **x.options)
        return torch.nn.functional.silu(o), final_state

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for a, b in zip(gradients(model, x), gradients(compiled, x)):
        # The compiler may round what is around the call elsewhere.
        helpers.assert_close("value", b, helpers.to_numpy(a), 1e-6 if x.dtype == torch.float32 else helpers.LOW_PRECISION["state"])


@sizes
def test_compile_serves_other_lengths_without_graph_breaks(size, fresh_compiler):
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    for T in (10, size["T"], 130):
        x = make_inputs(**(size | dict(T=T)))
        for a, b in zip(gradients(call, x), gradients(compiled, x)):
            assert_bitwise("value", a, b)


@sizes
@pytest.mark.parametrize("T", [2, 130])  # decode, and a prefill of as many rows
def test_compile_the_serving_calls(T, size, fresh_compiler):
    x = make_inputs(**(size | dict(B=2, T=T)), grads=False, state_v_first=True)
    slots = torch.tensor([2, 0], device=x.q.device)

    def step(pool, q, k, v, g, beta):
        if T > 2:
            return flash_qla.gated_delta_rule_prefill(q, k, v, g, beta, pool, slots, cu_seqlens=None) * 2
        return flash_qla.gated_delta_rule_decode(q, k, v, g, beta, pool, slots) * 2

    pools = [torch.ones(3, 2, size["V"], size["K"], device=x.q.device) for _ in range(2)]
    inputs = (x.q, x.k, x.v, x.g, x.beta)
    a = step(pools[0], *inputs)
    b = torch.compile(step, fullgraph=True, backend="aot_eager")(pools[1], *inputs)
    assert_bitwise("o", a, b)
    assert_bitwise("pool", *pools)
    assert (pools[0][0] != 1).any() and (pools[0][1] == 1).all()


@sizes
def test_compile_the_low_level_pair_and_the_recurrent_call(size, fresh_compiler):
    x = make_inputs(**size)

    def pair(q, k, v, g, beta):
        c, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_h=True)
        return o, h, final_state, *flash_qla.chunk_gated_delta_rule_bwd(q, k, v, c, beta, A, x.do, dht=x.dht)[:5]

    def recurrent(q, k, v, g, beta):
        return flash_qla.fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, output_final_state=True)

    for function in (pair, recurrent):
        inputs = (x.q, x.k, x.v, x.g, x.beta)
        for a, b in zip(function(*inputs), torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)):
            assert_bitwise("value", a, b)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fake_tensors_have_the_right_shapes_without_a_gpu(device):
    # A PyTorch built without CUDA aborts in its own autograd on a fake CUDA tensor, whatever the function is.
    grads = device == "cpu" or torch.backends.cuda.is_built()
    with FakeTensorMode():
        q = torch.empty(1, 100, 2, 16, dtype=torch.bfloat16, device=device, requires_grad=grads)
        v = torch.empty(1, 100, 4, 8, dtype=torch.bfloat16, device=device, requires_grad=grads)
        g = torch.empty(1, 100, 4, device=device, requires_grad=grads)
        offsets = torch.empty(4, dtype=torch.int32, device=device)
        state = torch.empty(3, 4, 8, 16, device=device, requires_grad=grads)
        o, final_state = flash_qla.chunk_gated_delta_rule(
            q, q, v, g, g, initial_state=state, output_final_state=True, cu_seqlens=offsets, state_v_first=True)
        assert (o.shape, o.dtype, o.device.type) == (v.shape, torch.bfloat16, device)
        assert (final_state.shape, final_state.dtype) == ((3, 4, 8, 16), torch.float32)
        if grads:
            dq, dg, dstate = torch.autograd.grad(o.sum() + final_state.sum(), [q, g, state])
            assert (dq.shape, dq.dtype) == (q.shape, q.dtype) and (dg.shape, dg.dtype) == (g.shape, g.dtype)
            assert dstate.shape == state.shape
        with torch.no_grad():
            c, A, o, h, _ = flash_qla.chunk_gated_delta_rule_fwd(q, q, v, g, g, cu_seqlens=offsets, output_h=True)
        assert (c.shape, A.shape, A.dtype, h.shape) == (g.shape, (1, 100, 4, 64), torch.bfloat16, (1, 100 // 64 + 3, 4, 16, 8))


@sizes
def test_opcheck(size, fresh_compiler):
    x = make_inputs(**size)
    path = None if helpers.settings.path == "auto" else helpers.settings.path
    options = make_options("opcheck")._replace(path=path)
    inputs = (x.q, x.k, x.v, x.g, x.beta, None, None, None)
    pool, slots = torch.zeros(3, 2, size["K"], size["V"], device=x.q.device), torch.tensor([1], device=x.q.device)
    ops = torch.ops.flash_qla
    torch.library.opcheck(ops.chunk_forward, (*options, *inputs, x.initial_state, True, True, True, -(-size["T"] // 64)))
    torch.library.opcheck(ops.recurrent, (*options, *inputs, x.initial_state, True))
    torch.library.opcheck(ops.chunk_backward, (
        *options, *inputs, x.initial_state, False, None, x.do, x.dht, True, [True, True, True, True, True, False, False, True]))
    torch.library.opcheck(ops.pool_forward, (
        *options, *inputs, False, pool, slots, None, None, None, -1, 0, None, None, None, None, torch.zeros_like(x.v)))


@pytest.mark.parametrize("size", helpers.with_cuda([small | dict(dtype=torch.bfloat16)], LARGE), ids=str)
def test_autocast_casts_what_a_norm_left_in_float32(size, device):
    x = make_inputs(**size)
    with torch.autocast(device, dtype=x.dtype):
        o, final_state = call(x.q.float(), x.k, x.v, x.g, x.beta, x.initial_state)
        again, _ = call(x.q, x.k, x.v, x.g, x.beta, x.initial_state)
    assert o.dtype == x.dtype and final_state.dtype == torch.float32
    assert_bitwise("o", o, again)
    assert_bitwise("o", o, call(x.q, x.k, x.v, x.g, x.beta, x.initial_state)[0])


@pytest.mark.parametrize("size", helpers.with_cuda([small], [dict(T=300, Hq=1, Hv=2, K=128)]), ids=str)
def test_autocast_around_a_layer_and_its_backward(size, device):
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(size["K"], size["K"]).to(device), make_inputs(**size)

    def loss():
        q = torch.nn.functional.normalize(layer(x.q), dim=-1)
        o, _ = call(q, x.k.to(q.dtype), x.v.to(q.dtype), x.g, x.beta, use_qk_l2norm_in_kernel=True)
        return o.float().square().mean()

    with torch.autocast(device, dtype=torch.bfloat16):
        low = loss()
    low.backward()
    gradient = layer.weight.grad.clone()
    layer.zero_grad()
    loss().backward()
    assert gradient.dtype == torch.float32
    error = (gradient - layer.weight.grad).norm() / layer.weight.grad.norm()
    assert error < 3e-2  # bf16 linear layers in front of the call; the gradient must be the same one


@sizes
def test_gradient_checkpointing(size):
    x = make_inputs(**size, seqlens=[size["T"], 30], raw=True)

    def whole(*inputs):
        return call(*inputs, cu_seqlens=x.cu_seqlens, A_log=x.A_log, dt_bias=x.dt_bias, **x.options)

    def checkpointed(*inputs):
        return torch.utils.checkpoint.checkpoint(whole, *inputs, use_reentrant=False)

    for a, b in zip(gradients(whole, x), gradients(checkpointed, x)):
        assert_bitwise("value", a, b)


@sizes
def test_inference_mode_and_no_grad(size):
    x = make_inputs(**size)
    expected = helpers.call(x)
    with torch.inference_mode():
        o, final_state = helpers.call(x)
    assert o.is_inference() and not o.requires_grad
    assert_bitwise("o", o, expected[0])
    with torch.no_grad():
        o, _ = helpers.call(x.replace(q=x.q.clone().requires_grad_()))
    assert not o.requires_grad


def test_inference_tensors_feed_the_serving_calls():
    x = make_inputs(B=2, T=1, Hq=1, Hv=2, K=16, V=8, grads=False, state_v_first=True)
    with torch.inference_mode():
        pool = x.initial_state.clone()
        flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, torch.arange(2, device=x.q.device))
    assert not torch.equal(pool, x.initial_state)


@sizes
def test_second_derivatives_are_refused_with_a_sentence(size):
    x = make_inputs(**size)
    q, *rest = leaves(x)
    o, _ = call(q, *rest)
    (dq,) = torch.autograd.grad(o.square().sum(), [q], create_graph=True)
    with pytest.raises(NotImplementedError, match="chunk_gated_delta_rule: second derivatives"):
        dq.sum().backward()


def test_modified_inputs_are_noticed():
    # Autograd's own protection: what was saved for the backward must not change before it.
    x = make_inputs(**small)
    q, *rest = leaves(x)
    doubled = q * 1.0
    o, _ = call(doubled, *rest)
    with torch.no_grad():
        doubled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@sizes
def test_backward_twice_with_a_retained_graph(size):
    x = make_inputs(**size)
    inputs = leaves(x)
    o, final_state = call(*inputs)
    loss = o.sum() + final_state.sum()
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, inputs)):
        assert_bitwise("gradient", a, b)


@sizes
def test_vmap_free_use_in_threads(size):
    # Data loaders and servers call from several threads: results do not mix.
    import concurrent.futures

    cases = [make_inputs(**(size | dict(T=size["T"] + i)), seed=i) for i in range(4)]
    expected = [helpers.run(x) for x in cases]

    def work(i):
        return [helpers.run(cases[i]) for _ in range(5)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, results in enumerate(pool.map(work, range(4))):
            for result in results:
                for name, value in result.items():
                    assert_bitwise(name, value, expected[i][name])


def test_explain_names_the_path():
    x = make_inputs(**small)
    text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta)
    first = text.splitlines()[0]
    assert first.startswith("path: ")
    if helpers.settings.path != "auto":
        assert first == f"path: {helpers.settings.path}"
    assert any(line.startswith("workspace: ") for line in text.splitlines())
    for operation in ("chunk_gated_delta_rule_fwd", flash_qla.fused_recurrent_gated_delta_rule):
        assert flash_qla.explain(x.q, x.k, x.v, x.g, beta=x.beta, op=operation).startswith("path: ")


def test_gradients_of_few_tokens_are_computed_in_float32(device):
    if device == "cpu" or torch.cuda.get_device_capability() != (9, 0) or helpers.settings.path != "auto":
        pytest.skip("the choice between the Hopper path and float32")

    def path(T, dht=True, **options):
        x = make_inputs(T=T, Hq=1, Hv=2, K=128, dtype=torch.bfloat16)
        A = torch.empty(1, T, 2, 64, dtype=x.dtype, device=x.q.device)
        text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, A, x.do, x.dht if dht else None, **options, op="chunk_gated_delta_rule_bwd")
        return text.splitlines()[0].removeprefix("path: ")

    for dht in (True, False):
        assert path(64, dht) == "cuda_generic" and path(65, dht) == "sm90"
    # A sequence's bits must not depend on how many tokens are computed beside it.
    assert path(64, auto_cp=False) == "sm90"


@sizes
def test_explain_says_what_training_keeps(size):
    x = make_inputs(**size)
    assert "saved" not in flash_qla.explain(x.q, x.k, x.v, x.g, x.beta)
    text = flash_qla.explain(x.q, x.k, x.v.requires_grad_(), x.g, x.beta)
    A = flash_qla.chunk_gated_delta_rule_fwd(x.q, x.k, x.v.detach(), x.g, x.beta)[1]
    assert f"saved for the backward pass beside the inputs: {A.numel() * A.element_size()} bytes" in text


def test_explain_computes_nothing():
    x = make_inputs(B=2, T=1, Hq=1, Hv=2, K=16, V=8, grads=False, state_v_first=True)
    pool = torch.full_like(x.initial_state, torch.nan)
    text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, pool, torch.arange(2, device=pool.device), op="gated_delta_rule_decode")
    assert text.startswith("path: ") and pool.isnan().all()


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "gated_delta_rule_prefill", "gated_delta_rule_decode"])
@pytest.mark.parametrize("dtype", ["float32", torch.bfloat16])
def test_workspace_size_grows_with_the_bounds(op, dtype, device):
    def size(max_tokens, max_seqs):
        return flash_qla.workspace_size(op, max_tokens, max_seqs, 2, 4, 64, 64, dtype=dtype, device=device, use_qk_l2norm_in_kernel=True)

    sizes = [size(tokens, 8) for tokens in (0, 1, 64, 65, 1000, 8192)]
    assert sizes == sorted(sizes) and sizes[0] >= 0
    sizes = [size(1000, n) for n in (0, 1, 7, 64, 1000)]
    assert sizes == sorted(sizes)


def workspace_of(text):
    return int(next(line for line in text.splitlines() if line.startswith("workspace: ")).split()[1])


@pytest.mark.parametrize("seqlens", [[1000], [1] * 20, [64] * 15, [65] * 15, [0] * 20 + [500, 500]], ids=lambda x: f"{len(x)}x{max(x)}")
def test_workspace_size_serves_every_smaller_call(seqlens, device):
    bound = flash_qla.workspace_size("chunk_gated_delta_rule_fwd", 1024, 24, 2, 4, 64, 32, dtype="float32", device=device)
    x = make_inputs(seqlens=seqlens, Hq=2, Hv=4, K=64, V=32, grads=False)
    text = flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, output_h=True,
                             op="chunk_gated_delta_rule_fwd")
    assert workspace_of(text) <= bound


@pytest.mark.parametrize("op", ["chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd", "gated_delta_rule_decode"])
def test_workspace_size_serves_whatever_path_takes_the_call(op, device):
    # The preferred path may refuse a tensor's strides or address, which this question cannot know.
    sizes = {}
    for path in (None, "cpu" if device == "cpu" else "cuda_generic"):
        with flash_qla.use_path(path):
            sizes[path] = flash_qla.workspace_size(op, 1024, 2, 2, 4, 128, 128, device=device)
    assert sizes.pop(None) >= max(sizes.values()) > 0


def test_build_info_names_version_and_paths():
    info = flash_qla.build_info()
    assert info["version"] == flash_qla.__version__
    for operation in ("chunk_forward", "recurrent", "chunk_backward"):
        assert "reference" in info[operation].split()
