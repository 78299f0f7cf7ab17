"""Requirement 18, data that no call can refuse without waiting for it: offsets, slots, gates and keys in device memory, with K = V = 128.

tests/fuzz/malformed.py makes the calls, in a process of its own: one that went wrong would take the CUDA context of the other
tests with it.
"""

from pathlib import Path

import helpers
import pytest
import torch
from helpers import Guarded, assert_bitwise, make_inputs

import flash_qla

PROGRAM = Path(__file__).resolve().parents[1] / "fuzz" / "malformed.py"
pytestmark = [pytest.mark.requirement(18), pytest.mark.early]
OPERATIONS = ["forward", "backward", "prefill", "checkpoints", "listed", "decode"]
DRAWN = {"cpu": 60, "cuda": 300}
chosen_path = pytest.mark.skipif(helpers.settings.path != "auto", reason="the program's calls take the path that the library chooses")


def run(device, request, *arguments):
    """Runs the program; its calls count as this test's."""
    arguments = [str(PROGRAM), "--device", "cpu" if device == "cpu" else "cuda", *arguments]
    # One thread: of small calls on a busy machine threads wait for each other for most of the time.
    code = f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
    # The program takes 4 s with a GPU to itself, and 20 times as long where a dozen workers of the suite share it.
    done = helpers.in_subprocess(code, timeout=220, OMP_NUM_THREADS="1")
    assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout[-2500:]}\n{done.stderr[-2500:]}"
    for line in done.stdout.splitlines():
        name, _, value = line.partition(": ")
        if name in ("calls", "planned"):
            request.node.user_properties.append((name, value))


@chosen_path
@pytest.mark.parametrize("operation", OPERATIONS if helpers.settings.device == "cuda" else ["all"])
def test_malformed_device_data_does_no_harm(operation, device, request):
    run(device, request, *(["--operation", operation] if operation != "all" else []))


@chosen_path
def test_drawn_malformed_device_data_does_no_harm(device, request):
    run(device, request, "--seed", "0", "--cases", str(DRAWN[device]))


@pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
def test_a_refused_call_writes_nothing_and_harms_nothing(dtype):
    x = make_inputs(seqlens=[300, 65], Hq=1, Hv=2, dtype=dtype)
    first = helpers.run(x)
    helpers.compare(first, helpers.reference(x), dtype)
    pool, out = Guarded(torch.full((3, 2, 128, 128), 7.0, device=x.q.device)), Guarded(torch.full_like(x.v, 7.0))
    tensors, slots = (x.q, x.k, x.v, x.g, x.beta), torch.tensor([0, 2], device=x.q.device)
    prefill, serving = flash_qla.gated_delta_rule_prefill, dict(cu_seqlens=x.cu_seqlens, out=out.tensor)
    refused = [
        (ValueError, "chunk_gated_delta_rule: ", lambda: helpers.call(x.replace(k=x.k[:, 1:]))),
        (TypeError, "chunk_gated_delta_rule: ", lambda: helpers.call(x.replace(v=x.v.float()))),
        (ValueError, "chunk_gated_delta_rule: ", lambda: helpers.call(x, auto_cp="always")),
        (ValueError, "chunk_gated_delta_rule_bwd: ",
         lambda: flash_qla.chunk_gated_delta_rule_bwd(*tensors, None, x.do[:, :, :1], cu_seqlens=x.cu_seqlens)),
        (ValueError, "gated_delta_rule_prefill: ", lambda: prefill(*tensors, pool.tensor, slots[:1], **serving)),
        (ValueError, "gated_delta_rule_prefill: ", lambda: prefill(*tensors, pool.tensor, slots, checkpoint_every=65, **serving)),
        (ValueError, "gated_delta_rule_decode: ", lambda: flash_qla.gated_delta_rule_decode(*tensors, pool.tensor, slots, out=out.tensor))]
    for exception, beginning, call in refused:
        with pytest.raises(exception, match=f"^{beginning}"):
            call()
        assert (pool.tensor == 7).all() and (out.tensor == 7).all() and pool.intact() and out.intact()
        for name, value in helpers.run(x).items():
            assert_bitwise(name, value, first[name])
