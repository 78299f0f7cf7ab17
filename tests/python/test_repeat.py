"""Requirements 11, 12 and 20: the same bits from run to run, captured graphs that are replayed with other lengths, sanitizers."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs

import flash_qla

RUNS = {"cpu": 20, "cuda": 1_000}


low_precision = pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
# Long enough to be cut with auto_cp=True and "invariant".
LONG = dict(seqlens=[4200, 65], Hq=1, Hv=2)


def assert_repeats(x, runs, **options):
    first = helpers.run(x, **options)
    for _ in range(runs):
        again = helpers.run(x, **options)
        for name in first:
            assert_bitwise(name, first[name], again[name])


@pytest.mark.requirement(11)
@pytest.mark.early
@pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)
@pytest.mark.parametrize("options", [dict(), dict(raw=True)], ids=["plain", "raw"])
@pytest.mark.parametrize("K", helpers.with_cuda([64], [128]))
def test_bitwise_from_run_to_run(K, options, dtype, device):
    assert_repeats(make_inputs(seqlens=[200, 0, 65, 130], Hq=2, Hv=4, K=K, dtype=dtype, **options), RUNS[device])


@pytest.mark.requirement(11)
@pytest.mark.early
@pytest.mark.path("sm90", planned=True)
@low_precision
@pytest.mark.parametrize("mode", [dict(), dict(auto_cp="invariant"), dict(force_intra_cp=True)], ids=str)
def test_bitwise_from_run_to_run_where_sequences_are_cut(mode, dtype, device):
    assert_repeats(make_inputs(**LONG, dtype=dtype), RUNS[device] // 4, **mode)


@pytest.mark.requirement(11)
@pytest.mark.cpu_only
def test_bitwise_for_any_number_of_threads():
    x = make_inputs(seqlens=[200, 0, 65, 130], Hq=2, Hv=4, K=64, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = helpers.run(x)
    finally:
        torch.set_num_threads(threads)
    for name, value in helpers.run(x).items():
        assert_bitwise(name, single[name], value)


FORKED = """
import os, sys
sys.modules["torch"] = None  # its own thread pools do not survive a fork: numpy alone
import numpy as np, flash_qla
rng = np.random.default_rng(0)
q, k, v = (rng.standard_normal((2, 300, 4, 64)).astype(np.float32) / 8 for _ in range(3))
parent, _ = flash_qla.chunk_gated_delta_rule(q, k, v, None, None)  # the library's threads now run; a child has none of them
child = os.fork()
if child == 0:
    o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, None, None)
    os._exit(0 if np.array_equal(o, parent) else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.requirement(11)
@pytest.mark.cpu_only
def test_in_a_forked_child():
    # Data loaders fork.
    done = helpers.in_subprocess(FORKED, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.requirement(11)
@pytest.mark.early
@pytest.mark.cuda
@low_precision
def test_beside_another_kernel(dtype, device):
    x = make_inputs(seqlens=[2000, 65, 1300], Hq=2, Hv=4, K=128, dtype=dtype)
    first = helpers.run(x)
    other, noise = torch.cuda.Stream(), torch.randn(4096, 4096, device=device)
    for _ in range(RUNS[device]):
        with torch.cuda.stream(other):
            noise = (noise @ noise).clamp(-1, 1)
        again = helpers.run(x)
        for name in first:
            assert_bitwise(name, first[name], again[name])


def leave_stale(value, device):
    """Leaves `value` behind: in shared memory, by a product of large tiles, and in memory that the next call is given."""
    tiles = torch.full((4096, 512), value, device=device, dtype=torch.bfloat16)
    tiles @ tiles.T
    torch.full((2**26,), value, device=device)


@pytest.mark.requirement(11)
@pytest.mark.early
@pytest.mark.cuda
@low_precision
@pytest.mark.parametrize(
    "lengths, Hq, Hv", [([5809, 1244, 406, 733], 16, 32), ([2000], 16, 32), ([8192], 2, 4), ([170] * 24, 8, 8)], ids=str)
def test_over_stale_memory(lengths, Hq, Hv, dtype, device):
    # The backward of the first of these once went wrong in one call of twenty: a row of V kept what had been in its place.
    # The C++ tests do the same for every form of the kernels (tests/cpp/cuda/sm90_stale_tests.cuh).
    x = make_inputs(seqlens=lengths, Hq=Hq, Hv=Hv, dtype=dtype, drawn_on=device)
    first = helpers.run(x)
    for value in 15 * (torch.nan, torch.inf, 1.0, 1e38):
        leave_stale(value, device)
        again = helpers.run(x)
        for name in first:
            assert_bitwise(name, first[name], again[name])


def replay_lengths(N, bound, generator):
    """N lengths of at most `bound` tokens together, zero lengths among them."""
    cuts = torch.randint(0, bound + 1, (N - 1,), generator=generator).sort().values
    return torch.diff(cuts, prepend=torch.tensor([0]), append=torch.tensor([bound])).tolist()


@pytest.mark.requirement(12)
@pytest.mark.early
@pytest.mark.cuda
@pytest.mark.parametrize("N, dtype", [(33, torch.float16), *((N, torch.bfloat16) for N in (33, 49, 64, 128))], ids=str)
def test_graph_replay_with_other_lengths(N, dtype, request):
    # FlashInfer #3329: a captured prefill hung when it was replayed with one long and many short sequences.
    first = [512] + [6] * (N - 1)
    x = make_inputs(seqlens=first, Hq=2, Hv=4, K=128, dtype=dtype, grads=False)
    with torch.no_grad():
        graph, (o, final_state) = helpers.captured(lambda: helpers.call(x))
    generator = torch.Generator().manual_seed(N)
    replays = 10_000 if request.config.getoption("--runslow") else 300
    for i in range(replays):
        lengths = first if i % 3 == 0 else replay_lengths(N, sum(first), generator)
        x.cu_seqlens.copy_(helpers.offsets(lengths))
        graph.replay()
        if i % (replays // 10) == 0:
            want = helpers.library_reference(x, grads=False)
            helpers.compare({"o": o, "final_state": final_state}, want, x.dtype, where=f"replay {i}: ")
    torch.cuda.synchronize()


@pytest.mark.requirement(12)
@pytest.mark.early
@pytest.mark.cuda
@pytest.mark.path("sm90", planned=True)
@low_precision
@pytest.mark.parametrize("auto_cp", [True, "invariant"])
def test_graph_of_a_training_step_with_other_lengths(auto_cp, dtype):
    # Calls that are long enough to be cut: the plan is made anew in every replay.
    N, tokens = 3, 8192
    x = make_inputs(seqlens=[4096, 4000, 96], Hq=1, Hv=2, dtype=dtype)
    leaves = {name: getattr(x, name).requires_grad_() for name in x.DIFFERENTIABLE if getattr(x, name) is not None}

    def step():
        o, final_state = helpers.call(x, auto_cp=auto_cp)
        gradients = torch.autograd.grad([o, final_state], list(leaves.values()), [x.do, x.dht])
        return {"o": o.detach(), "final_state": final_state.detach()} | {
            helpers.GRADIENT_NAMES[name]: gradient for name, gradient in zip(leaves, gradients)}

    graph, results = helpers.captured(step)
    generator = torch.Generator().manual_seed(0)
    some = [[tokens, 0, 0], [0, tokens, 0], [0, 0, tokens], [2731, 2731, 2730], [1, 64, tokens - 65], [7000, 1000, 100]]
    for i, lengths in enumerate([*some, *(replay_lengths(N, tokens, generator) for _ in range(54))]):
        x.cu_seqlens.copy_(helpers.offsets(lengths))
        graph.replay()
        for name, value in step().items():
            assert_bitwise(f"{lengths}, {name}", results[name], value)
        if i < 10:
            helpers.compare(results, helpers.library_reference(x), dtype, where=f"{lengths}: ")


@pytest.mark.requirement(12)
@pytest.mark.cuda
@low_precision
def test_decode_graph(dtype, device):
    x = make_inputs(B=8, T=1, Hq=2, Hv=4, K=128, dtype=dtype, grads=False, state_v_first=True)
    pool, indices = x.initial_state.clone(), torch.arange(8, device=device, dtype=torch.int32)

    def step():
        return flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, indices)

    graph, o = helpers.captured(step)
    pool.copy_(x.initial_state)
    expected = x.initial_state.clone()
    for _ in range(100):
        graph.replay()
        want = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, expected, indices)
        assert_bitwise("o", o, want)
    assert_bitwise("pool", pool, expected)


def cuda_calls(function):
    """Names of the CUDA calls that function() makes, in this thread and in autograd's, and of what they do on the device.

    The profiler waits for the device when it ends: calls count from the function's beginning to its end.
    """
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profile:
        with torch.profiler.record_function("function under test"):
            function()
    events = profile.events()
    span = next(e.time_range for e in events if e.name == "function under test" and e.device_type == torch.autograd.DeviceType.CPU)
    return [
        e.name for e in events
        if e.device_type != torch.autograd.DeviceType.CPU or e.name.startswith("cu") and span.start <= e.time_range.start <= span.end]


# What waits for the device, copies to the host, allocates, or loads code. (cudaMemcpyAsync to pageable memory waits as well:
# that is told by what it does on the device.)
FORBIDDEN = re.compile(
    r"Synchronize|DtoH|^cu(da)?(Mem|Host)\w*(Alloc|Free)|^cudaMalloc|^cudaFree|ModuleLoad|LibraryLoad|^cudaMemcpy(?!\w*Async)")


@pytest.mark.requirement(11)
@pytest.mark.cuda
@low_precision
@pytest.mark.parametrize("case", [dict(seqlens=[200, 0, 165], Hq=2, Hv=4), LONG], ids=str)
def test_no_synchronisation_and_no_copies_to_the_host(case, dtype, request):
    x = make_inputs(**case, dtype=dtype)
    leaves = {name: getattr(x, name).requires_grad_() for name in x.DIFFERENTIABLE if getattr(x, name) is not None}
    outputs = []

    def forward():
        outputs[:] = helpers.call(x)

    def backward():
        torch.autograd.grad(outputs, list(leaves.values()), [x.do, x.dht])

    for _ in range(2):  # from then on all memory comes from PyTorch's cache
        forward()
        backward()
    for name, function in (("forward", forward), ("backward", backward)):
        calls = cuda_calls(function)
        assert not [call for call in calls if FORBIDDEN.search(call)], calls
        launches = [call for call in calls if re.match(r"cu(da)?LaunchKernel", call)]
        assert launches, f"no launch was seen: {calls}"
        count = f"{name} {helpers.dtype_name(dtype)} {x.q.shape[1]} tokens: {len(launches)} launches"
        request.node.user_properties.append(("cuda_calls", count))


def uncached_bytes():
    """More than PyTorch's cache has free, of which empty_cache() leaves what lies beside a tensor that is alive."""
    return torch.cuda.memory_reserved() - torch.cuda.memory_allocated() + (1 << 24)


@pytest.mark.requirement(11)
@pytest.mark.cuda
@pytest.mark.parametrize("planted", [
    lambda x: torch.cuda.synchronize(), lambda x: torch.cuda.current_stream().synchronize(), lambda x: x.q.flatten()[0].item(),
    lambda x: x.q.cpu(), lambda x: torch.empty(uncached_bytes(), dtype=torch.uint8, device=x.q.device)],
    ids=["device", "stream", "item", "copy", "allocation"])
def test_a_planted_synchronisation_is_seen(planted):
    x = make_inputs(T=300, Hq=1, Hv=2, dtype=torch.bfloat16, grads=False)
    helpers.run(x, grads=False)
    torch.cuda.empty_cache()

    def function():
        helpers.call(x)
        planted(x)

    helpers.call(x)
    assert [call for call in cuda_calls(function) if FORBIDDEN.search(call)]


SANITIZED = """
import torch, helpers
helpers.settings.device = "cuda"
for dtype in (torch.float32, torch.bfloat16):
    helpers.run(helpers.make_inputs(seqlens=[65, 0, 3, 64], Hq=1, Hv=2, K=128, dtype=dtype))
    helpers.run(helpers.make_inputs(T=70, Hq=1, Hv=2, K=17, V=33, dtype=dtype, raw=True))
torch.cuda.synchronize()
"""


@pytest.mark.requirement(20)
@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
