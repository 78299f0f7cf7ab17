"""The integration with an installed fla on a GPU, its own Triton kernels beside ours: whose kernels compute, and what comes out.

The rules themselves are tested without fla's kernels, and without a GPU, in tests/install/test_fla.py.
"""

import functools

import helpers
import pytest
import torch

import flash_qla
from flash_qla import _paths

pytestmark = pytest.mark.cuda


@pytest.fixture
def fla_calls(monkeypatch):
    """(fla's function, the calls that arrive in this library)."""
    operation = pytest.importorskip("fla.ops.gated_delta_rule", reason="fla (fla-core, with Triton) is not installed")
    from flash_qla.integrations import fla as integration

    integration.register()
    arrived, original = [], flash_qla.chunk_gated_delta_rule

    @functools.wraps(original)  # explain() asks for the signature
    def counted(*args, **kwargs):
        arrived.append(kwargs)
        return original(*args, **kwargs)

    for module in (flash_qla, flash_qla.ops.gated_delta_rule):
        monkeypatch.setattr(module, "chunk_gated_delta_rule", counted)
    yield operation.chunk_gated_delta_rule, arrived


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=helpers.dtype_name)
@pytest.mark.parametrize("K, V", [(128, 128), (64, 64), (128, 64)])
@pytest.mark.parametrize("grads", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("options", [{}, dict(raw=True)], ids=["plain", "raw"])
def test_the_fast_kernels_take_what_is_theirs(fla_calls, options, grads, K, V, dtype):
    function, arrived = fla_calls
    x = helpers.make_inputs(T=300, Hq=2, Hv=4, K=K, V=V, dtype=dtype, **options)
    tensors = [t.detach().requires_grad_(grads) for t in (x.q, x.k, x.v, x.g, x.beta)]
    gate = {name: t for name, t in (("A_log", x.A_log), ("dt_bias", x.dt_bias)) if t is not None}
    o, final_state = function(*tensors, initial_state=x.initial_state, output_final_state=True, **gate, **x.options)
    slow = _paths.slow_reason(x.q.device.index, dtype, K, V, grads)
    assert bool(arrived) == (slow is None), slow
    want = helpers.reference(x, grads=False)
    low = {"o": 2e-2, "final_state": 2e-2}  # fla's own kernels compute some of these calls, in TF32 where they are float32
    if arrived:
        helpers.compare({"o": o, "final_state": final_state}, {name: want[name] for name in low}, dtype)
    else:
        helpers.compare({"o": o, "final_state": final_state}, {name: want[name] for name in low}, dtype, bounds=low)
    if grads:
        assert torch.autograd.grad(o.float().sum(), tensors[0])[0].isfinite().all()
