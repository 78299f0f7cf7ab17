"""Requirement 22, the part without an installation: names, signatures and docstrings of the public functions."""

import doctest
import importlib
import inspect
import pkgutil
import threading
from concurrent.futures import ThreadPoolExecutor

import helpers
import oracle
import pytest
import torch

import flash_qla
from flash_qla import _options

pytestmark = [pytest.mark.requirement(22), pytest.mark.cpu_only]

IN_KERNEL = {"use_qk_l2norm_in_kernel": False, "use_gate_in_kernel": False, "A_log": None, "dt_bias": None,
             "use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": False}
required = inspect.Parameter.empty

# The contract, word for word: (positional parameters, keyword-only parameters), each name with its default.
SIGNATURES = {
    "chunk_gated_delta_rule": (
        dict(q=required, k=required, v=required, g=required, beta=required, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False),
        dict(use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
             state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, auto_cp=True,
             cp_tolerance=None, force_intra_cp=False, head_first=False, enable_fwd_cp_cache=True, chunk_size=64,
             transpose_state_layout=None)),
    "chunk_gated_delta_rule_fwd": (
        dict(q=required, k=required, v=required, g=required, beta=required, scale=None, initial_state=None, cu_seqlens=None,
             output_final_state=True, output_h=False, auto_cp=True, state_v_first=False, enable_fwd_cp_cache=None,
             cp_context=None, is_train=None, cu_seqlens_cpu=None), {}),
    "chunk_gated_delta_rule_bwd": (
        dict(q=required, k=required, v=required, g=required, beta=required, A=required, do=required, dht=None, scale=None,
             initial_state=None, cu_seqlens=None, state_v_first=False, auto_cp=True, cp_cache=None, cp_context=None), {}),
    "fused_recurrent_gated_delta_rule": (
        dict(q=required, k=required, v=required, g=None, gk=None, gv=None, beta=None, scale=None, initial_state=None,
             output_final_state=False, use_qk_l2norm_in_kernel=False, use_gate_in_kernel=False, A_log=None, dt_bias=None,
             use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None), dict(transpose_state_layout=None)),
    "gated_delta_rule_prefill": (
        dict(q=required, k=required, v=required, g=required, beta=required, state_pool=required, initial_state_indices=required,
             final_state_indices=None),
        dict(cu_seqlens=required, has_initial_state=None, null_index=-1, out=None, checkpoint_every=0, checkpoint_offsets=None,
             checkpoint_indices=None, checkpoints=None, checkpoint_cu_starts=None, state_v_first=True, scale=None, **IN_KERNEL)),
    "gated_delta_rule_decode": (
        dict(q=required, k=required, v=required, g=required, beta=required, state_pool=required, initial_state_indices=required,
             final_state_indices=None),
        dict(num_accepted_tokens=None, null_index=-1, out=None, state_v_first=True, scale=None, **IN_KERNEL)),
    "causal_conv1d": (
        dict(x=required, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None, backend=None,
             cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None), dict(seq_idx=None, l2norm_heads=0, head_dim=None)),
    "causal_conv1d_fn": (
        dict(x=required, weight=required, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
             activation=None), {}),
    "causal_conv1d_update": (
        dict(x=required, conv_state=required, weight=required, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None), {}),
    "causal_conv1d_prefill": (
        dict(x=required, weight=required, bias=required, state_pool=required, initial_state_indices=required, final_state_indices=None),
        dict(cu_seqlens=required, has_initial_state=None, null_index=-1, out=None, checkpoint_offsets=None, checkpoint_indices=None,
             activation="silu", l2norm_heads=0, head_dim=None)),
    "causal_conv1d_decode": (
        dict(x=required, weight=required, bias=required, state_pool=required, initial_state_indices=required, final_state_indices=None),
        dict(num_accepted_tokens=None, cache_seqlens=None, cu_seqlens=None, max_tokens=None, draft_states=None, draft_state_indices=None,
             null_index=-1, out=None, activation="silu", l2norm_heads=0, head_dim=None)),
    "rms_norm_gated": (
        dict(x=required, g=required, weight=required, bias=None, activation="swish", residual=None, prenorm=False, residual_in_fp32=False,
             eps=1e-6), dict(norm_before_gate=True)),
    "gated_delta_rule_verify": (
        dict(q=required, k=required, v=required, g=required, beta=required, state_pool=required, initial_state_indices=required),
        dict(parents=None, states_out=None, states_out_indices=None, null_index=-1, out=None, state_v_first=True, scale=None, **IN_KERNEL)),
}
# Parameters of ours beyond the contract's list; all keyword-only, so that no position is taken.
BEYOND = {"gated_delta_rule_prefill": {"auto_cp"}}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    parameters = inspect.signature(getattr(flash_qla, name)).parameters
    positional = {p.name: p.default for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD}
    keyword_only = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY}
    assert len(positional) + len(keyword_only) == len(parameters), "no *args or **kwargs: some callers filter those away"
    want_positional, want_keyword_only = SIGNATURES[name]
    assert list(positional.items()) == list(want_positional.items())
    beyond = BEYOND.get(name, set())
    assert {key: value for key, value in keyword_only.items() if key not in beyond} == want_keyword_only
    assert beyond <= set(keyword_only)


def test_public_names():
    expected = {*SIGNATURES, "workspace_size", "explain", "build_info", "build_cp_context", "use_path"}
    assert expected <= set(flash_qla.__all__)
    for name in flash_qla.__all__:
        assert hasattr(flash_qla, name), name


def test_import_paths_of_the_public_packages():
    chunk = importlib.import_module("flash_qla.ops.gated_delta_rule.chunk")
    for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_fwd", "chunk_gated_delta_rule_bwd", "build_cp_context"):
        assert getattr(chunk, name) is getattr(flash_qla, name)
    assert importlib.import_module("flash_qla.ops.gated_delta_rule.chunk.cp").FlashQLACPContext is flash_qla.FlashQLACPContext


def public_functions():
    return [name for name in flash_qla.__all__ if inspect.isfunction(getattr(flash_qla, name))]


@pytest.mark.parametrize("name", public_functions())
def test_docstring_names_every_parameter(name):
    function = getattr(flash_qla, name)
    text = inspect.getdoc(function)
    assert text and len(text.splitlines()[0]) > 20
    if name not in SIGNATURES:
        return
    for section in ("Args:", "Returns:", "Raises:"):
        assert section in text, section
    # Serving and recurrent calls refer to the chunked call for what they share with it.
    shared = text + (inspect.getdoc(flash_qla.chunk_gated_delta_rule) if "chunk_gated_delta_rule()" in text else "")
    shared += inspect.getdoc(flash_qla.gated_delta_rule_prefill) if "gated_delta_rule_prefill()" in text else ""
    missing = [p for p in inspect.signature(function).parameters if p not in shared]
    assert not missing, missing


def modules():
    return ["flash_qla", *(m.name for m in pkgutil.walk_packages(flash_qla.__path__, "flash_qla.")
                           if not m.name.endswith("__main__") and "integrations.fla" not in m.name)]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name):
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"needs an optional package: {error}")
    failed, _ = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not failed
    assert module.__doc__, "a module says what it is for"


def test_typed_package():
    from pathlib import Path

    assert (Path(flash_qla.__file__).parent / "py.typed").exists()


def test_version_is_that_of_the_header():
    from pathlib import Path

    header = Path(__file__).parents[2] / "include/flash_qla/flash_qla.h"
    numbers = [line.split()[-1] for line in header.read_text().splitlines() if line.startswith("#define FLASH_QLA_VERSION_")]
    assert flash_qla.__version__ == ".".join(numbers)


def test_context_objects_are_accepted_by_their_fields():
    from types import SimpleNamespace

    x = helpers.make_inputs(seqlens=[40, 30], Hq=1, Hv=2, K=16)
    plain = helpers.run(x)
    context = flash_qla.build_cp_context(x.cu_seqlens)
    assert context.is_first_rank and context.is_last_rank and context.num_seqs == 2
    lookalike = SimpleNamespace(cu_seqlens=x.cu_seqlens, group=None, pre_num_ranks=0, post_num_ranks=0)
    for given in (context, lookalike):
        got = helpers.run(x.replace(cu_seqlens=None), cp_context=given)
        for name, value in plain.items():
            helpers.assert_bitwise(name, value, got[name])


def test_a_context_of_several_cards_is_of_its_group_unless_told_otherwise():
    from types import SimpleNamespace

    group = SimpleNamespace(size=lambda: 4, rank=lambda: 1)
    offsets = torch.tensor([0, 5, 12])
    assert flash_qla.build_cp_context(offsets, group).cu_seqlens.tolist() == [0, 2, 3]
    for alone in (flash_qla.build_cp_context(offsets, group, enable_inter=False), flash_qla.build_cp_context(offsets)):
        assert alone.cu_seqlens is offsets and alone.ranks is None and not alone.is_cp_enabled


def test_importing_opens_no_device_and_takes_no_torch_extension():
    done = helpers.in_subprocess(
        "import sys, flash_qla\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not any(m.startswith(('triton', 'torch._inductor', 'torch.utils.cpp_extension')) for m in sys.modules), 'a compiler was imported'\n"
        "print('clean')")
    assert "clean" in done.stdout, done.stderr[-2000:]


def path_taken():
    x = helpers.make_inputs(T=3, Hq=1, Hv=1, K=16, grads=False)
    return flash_qla.explain(x.q, x.k, x.v, x.g, x.beta).splitlines()[0].removeprefix("path: ")


def test_use_path_is_of_one_thread():
    with ThreadPoolExecutor(2) as threads:
        outside = path_taken()
        assert outside != "reference"
        with flash_qla.use_path("reference"):
            assert path_taken() == "reference"
            assert threads.submit(path_taken).result() == outside
            inside, leave = threading.Event(), threading.Event()

            def nested():
                with flash_qla.use_path("no such path"):
                    inside.set()
                    leave.wait(60)
                return path_taken()

            other = threads.submit(nested)
            inside.wait(60)
            assert path_taken() == "reference"
            with flash_qla.use_path(None):
                assert path_taken() == outside
            leave.set()
            assert other.result() == outside
            assert path_taken() == "reference"
        assert path_taken() == outside


def test_use_path_in_many_threads_at_once():
    names = ["reference", "no such path", None, "another", "reference", None]
    outside, open_before = path_taken(), _options._open_contexts
    meet = threading.Barrier(len(names), timeout=60)

    def work(name):
        meet.wait()
        for turn in range(20):
            with pytest.raises(KeyError), flash_qla.use_path(name):
                meet.wait()  # all threads are inside now, each with its own
                assert _options.chosen_path() == name
                with flash_qla.use_path("reference"):
                    assert path_taken() == "reference"
                assert _options.chosen_path() == name
                raise KeyError(turn)
            assert _options.chosen_path() is None
        return path_taken()

    with ThreadPoolExecutor(len(names)) as threads:
        library_choice = list(threads.map(work, names))
    assert len(set(library_choice)) == 1 and library_choice[0] != "reference"
    assert path_taken() == outside and _options._open_contexts == open_before


def test_two_backward_passes_at_once_take_their_own_paths():
    x = helpers.make_inputs(T=70, Hq=1, Hv=1, K=16)
    meet = threading.Barrier(2, timeout=60)

    def gradient(path, other):
        q = x.q.detach().clone().requires_grad_()
        with flash_qla.use_path(path):
            o = flash_qla.chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)[0]
        with flash_qla.use_path(other):  # of this thread, but not of the forward pass
            meet.wait()
            return torch.autograd.grad(o, q, x.do)[0]

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(gradient, "reference", "no such path")
        second = threads.submit(gradient, None, "reference")
        by_reference, plain = first.result(), second.result()
    expected = oracle.backward(*(helpers.to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), do=helpers.to_numpy(x.do))["dq"]
    for got in (by_reference, plain):
        helpers.assert_close("dq", got, expected, 5e-5)
    assert not torch.equal(by_reference, plain), "two paths that differ in no bit cannot tell which was taken"


def test_a_backward_pass_takes_the_path_of_its_forward_pass():
    x = helpers.make_inputs(T=70, Hq=1, Hv=1, K=16)
    q = x.q.requires_grad_()
    with flash_qla.use_path("reference"):
        o = flash_qla.chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)[0]
        with ThreadPoolExecutor(1) as thread:
            inside = thread.submit(torch.autograd.grad, o, q, x.do, retain_graph=True).result()[0]
    helpers.assert_bitwise("dq", torch.autograd.grad(o, q, x.do)[0], inside)
    plain = torch.autograd.grad(flash_qla.chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)[0], q, x.do)[0]
    assert not torch.equal(inside, plain), "two paths that differ in no bit cannot tell which was taken"


def test_a_compiled_call_follows_use_path():
    x = helpers.make_inputs(T=70, Hq=1, Hv=1, K=16, grads=False)

    def call(q):
        return flash_qla.chunk_gated_delta_rule(q, x.k, x.v, x.g, x.beta)[0]

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    plain = call(x.q)
    helpers.assert_bitwise("o", compiled(x.q), plain)
    with flash_qla.use_path("reference"):
        reference = call(x.q)
        helpers.assert_bitwise("o", compiled(x.q), reference)
        with ThreadPoolExecutor(1) as thread:
            helpers.assert_bitwise("o", thread.submit(compiled, x.q).result(), plain)
    helpers.assert_bitwise("o", compiled(x.q), plain)
    assert not torch.equal(plain, reference)
