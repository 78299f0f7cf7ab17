"""Rungs 11, 12 and 20: the same bits from run to run, captured graphs that are replayed with other lengths, sanitizers."""

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


@pytest.mark.early
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
@pytest.mark.parametrize("options", [dict(), dict(raw=True)], ids=["plain", "raw"])
def test_rung11_bitwise_from_run_to_run(options, dtype, device):
    x = make_inputs(seqlens=[200, 0, 65, 130], Hq=2, Hv=4, K=64, dtype=dtype, **options)
    first = helpers.run(x)
    for _ in range(RUNS[device]):
        again = helpers.run(x)
        for name in first:
            assert_bitwise(name, first[name], again[name])


@pytest.mark.cpu_only
def test_rung11_bitwise_for_any_number_of_threads():
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


@pytest.mark.cpu_only
def test_rung11_in_a_forked_child():
    # Data loaders fork.
    done = helpers.in_subprocess(FORKED, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.early
@pytest.mark.cuda
def test_rung11_beside_another_kernel(device):
    x = make_inputs(seqlens=[2000, 65, 1300], Hq=2, Hv=4, K=128, dtype=torch.bfloat16)
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


@pytest.mark.early
@pytest.mark.cuda
@pytest.mark.parametrize(
    "lengths, Hq, Hv", [([5809, 1244, 406, 733], 16, 32), ([2000], 16, 32), ([8192], 2, 4), ([170] * 24, 8, 8)], ids=str)
def test_rung11_over_stale_memory(lengths, Hq, Hv, device):
    # The backward of the first of these once went wrong in one call of twenty: a row of V kept what had been in its place.
    # The C++ tests do the same for every form of the kernels (tests/cpp/cuda/sm90_stale_tests.cuh).
    x = make_inputs(seqlens=lengths, Hq=Hq, Hv=Hv, dtype=torch.bfloat16, drawn_on=device)
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


@pytest.mark.early
@pytest.mark.cuda
@pytest.mark.parametrize("N", [33, 49, 64, 128])
def test_rung12_graph_replay_with_other_lengths(N, request):
    # FlashInfer #3329: a captured prefill hung when it was replayed with one long and many short sequences.
    first = [512] + [6] * (N - 1)
    x = make_inputs(seqlens=first, Hq=2, Hv=4, K=128, dtype=torch.bfloat16, grads=False)
    with torch.no_grad():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            helpers.call(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, final_state = helpers.call(x)
    generator = torch.Generator().manual_seed(N)
    replays = 10_000 if request.config.getoption("--runslow") else 300
    for i in range(replays):
        lengths = first if i % 3 == 0 else replay_lengths(N, sum(first), generator)
        x.cu_seqlens.copy_(helpers.offsets(lengths))
        graph.replay()
        if i % (replays // 10) == 0:
            want = helpers.reference(x, grads=False)
            helpers.compare({"o": o, "final_state": final_state}, want, x.dtype, where=f"replay {i}: ")
    torch.cuda.synchronize()


@pytest.mark.cuda
def test_rung12_decode_graph(device):
    x = make_inputs(B=8, T=1, Hq=2, Hv=4, K=128, dtype=torch.bfloat16, grads=False, state_v_first=True)
    pool, indices = x.initial_state.clone(), torch.arange(8, device=device, dtype=torch.int32)
    flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool.clone(), indices)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, indices)
    expected = x.initial_state.clone()
    for _ in range(100):
        graph.replay()
        want = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, expected, indices)
        assert_bitwise("o", o, want)
    assert_bitwise("pool", pool, expected)


@pytest.mark.cuda
def test_no_synchronisation_and_no_copies_to_the_host():
    x = make_inputs(seqlens=[200, 0, 65], Hq=2, Hv=4, K=128, dtype=torch.bfloat16)
    helpers.run(x)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        helpers.run(x)
    names = [event.key for event in profile.key_averages()]
    waits = [name for name in names if "Synchronize" in name and "cudaDeviceSynchronize" not in name or "DtoH" in name]
    assert not waits, waits
    assert not [name for name in names if "cudaMalloc" == name or "ModuleLoadData" in name], names


SANITIZED = """
import torch, helpers
helpers.settings.device = "cuda"
for dtype in (torch.float32, torch.bfloat16):
    helpers.run(helpers.make_inputs(seqlens=[65, 0, 3, 64], Hq=1, Hv=2, K=128, dtype=dtype))
    helpers.run(helpers.make_inputs(T=70, Hq=1, Hv=2, K=17, V=33, dtype=dtype, raw=True))
torch.cuda.synchronize()
"""


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck", "initcheck"])
def test_rung20_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    done = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", SANITIZED], cwd=Path(__file__).parent,
        capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
