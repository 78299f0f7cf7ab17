"""Requirement 9: what the library must overwrite holds NaN, what it must not touch holds canaries, and inputs keep their bits."""

import contextlib

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import make_inputs

import flash_qla

pytestmark = pytest.mark.requirement(9)

# Sequences of the low-level pair: on a GPU also as many tokens as have their gradients computed on tensor cores.
lengths = pytest.mark.parametrize(
    "K, lengths", helpers.with_cuda([(64, [70, 0, 130])], [(128, [70, 0, 130]), (128, [170, 0, 130])]), ids=str)
every_dtype = pytest.mark.parametrize("dtype", helpers.dtypes(), ids=helpers.dtype_name)


@contextlib.contextmanager
def fresh_memory_is_nan():
    """torch.empty fills with NaN: outputs and workspaces that the call allocates start poisoned."""
    before = torch.utils.deterministic.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3, device=helpers.settings.device).isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = before[0]
        torch.use_deterministic_algorithms(before[1])


@every_dtype
@pytest.mark.parametrize("options", helpers.with_cuda(
    [dict(), dict(seqlens=[70, 0, 3, 64], padding=9), dict(raw=True, state_v_first=True), dict(T=600, force_intra_cp=True)],
    [dict(K=128, V=128, **more) for more in (
        dict(T=300), dict(seqlens=[70, 0, 203, 64], padding=9), dict(T=300, raw=True, state_v_first=True), dict(T=1000, auto_cp=False),
        dict(T=1000, force_intra_cp=True), dict(seqlens=[600, 0, 400], padding=70, force_intra_cp=True), dict(T=4096),
        dict(T=4096, auto_cp="invariant"))]), ids=str)
def test_poisoned_outputs_and_workspace(options, dtype):
    x = make_inputs(**(dict(T=130, Hq=1, Hv=2, K=48, V=80, dtype=dtype) | options))
    with fresh_memory_is_nan():
        got = helpers.run(x)
    reference = helpers.library_reference if options.get("T") == 4096 else helpers.reference
    helpers.compare(got, reference(x), dtype)


@every_dtype
@lengths
def test_poisoned_low_level_outputs(K, lengths, dtype):
    x = make_inputs(seqlens=lengths, padding=5, Hq=1, Hv=2, K=K, dtype=dtype)
    with fresh_memory_is_nan():
        g, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, output_h=True)
        gradients = flash_qla.chunk_gated_delta_rule_bwd(
            x.q, x.k, x.v, g, x.beta, A, x.do, dht=x.dht, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    for name, value in zip(("g", "A", "o", "h", "final_state", "dq", "dk", "dv", "db", "dg", "dh0"), (g, A, o, h, final_state, *gradients)):
        assert value.isfinite().all(), f"{name} has elements that were not written"


@every_dtype
@pytest.mark.parametrize("options", helpers.with_cuda(
    [dict(K=64, raw=True)],
    [dict(K=128), dict(K=128, seqlens=[270, 0, 65]), dict(K=128, seqlens=[270, 0, 65], raw=True),
     dict(K=128, seqlens=[1270, 0, 65], force_intra_cp=True)]), ids=str)
def test_inputs_are_read_only(options, dtype):
    x = make_inputs(**(dict(seqlens=[70, 0, 65], Hq=1, Hv=2, dtype=dtype) | options))
    names = [name for name in (*x.DIFFERENTIABLE, "do", "dht", "cu_seqlens") if getattr(x, name) is not None]
    guarded = {name: helpers.Guarded(getattr(x, name)) for name in names}
    helpers.run(x.replace(**{name: g.tensor for name, g in guarded.items()}))
    for name, g in guarded.items():
        helpers.assert_bitwise(name, g.tensor, getattr(x, name))
        assert g.intact(), name


@every_dtype
@pytest.mark.parametrize("K", helpers.with_cuda([32], [128]))
def test_pool_out_and_checkpoints_between_canaries(K, dtype):
    lengths, Hv = [130, 0, 64, 3], 2
    x = make_inputs(seqlens=lengths, padding=4, Hq=1, Hv=Hv, K=K, dtype=dtype, grads=False)
    pool = torch.full((9, Hv, K, K), torch.nan, device=x.q.device)
    read, write = [1, 3, 5, 7], [1, 4, 5, 8]
    pool[read] = x.initial_state
    before = pool.clone()
    guarded = dict(
        pool=helpers.Guarded(pool), out=helpers.Guarded(torch.full_like(x.v, torch.nan)),
        checkpoints=helpers.Guarded(torch.full((3, Hv, K, K), torch.nan, device=x.q.device)))
    starts = torch.tensor([0, 2, 2, 3, 3], device=x.q.device)
    with fresh_memory_is_nan():
        o = flash_qla.gated_delta_rule_prefill(
            x.q, x.k, x.v, x.g, x.beta, guarded["pool"].tensor, torch.tensor(read, device=x.q.device),
            torch.tensor(write, device=x.q.device), cu_seqlens=x.cu_seqlens, out=guarded["out"].tensor, checkpoint_every=64,
            checkpoints=guarded["checkpoints"].tensor, checkpoint_cu_starts=starts, state_v_first=False)
    assert o is guarded["out"].tensor or o.data_ptr() == guarded["out"].tensor.data_ptr()
    for name, g in guarded.items():
        assert g.intact(), f"written outside {name}"
    want_o, want_pool, rows = oracle.pooled(
        *(helpers.to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), pool=np.nan_to_num(helpers.to_numpy(pool)), initial_indices=read,
        final_indices=write, cu_seqlens=x.cu_seqlens.cpu().numpy(), checkpoint_every=64)
    helpers.compare({"o": o, "checkpoints": guarded["checkpoints"].tensor, "pool": guarded["pool"].tensor[write]},
                    {"o": want_o, "checkpoints": rows, "pool": want_pool[write]}, dtype)
    unused = [slot for slot in range(9) if slot not in write]
    helpers.assert_bitwise("pool", guarded["pool"].tensor[unused], before[unused])


@every_dtype
@pytest.mark.parametrize("K", helpers.with_cuda([64], [128]))
def test_decode_leaves_other_slots_alone(K, dtype):
    N, Hv = 4, 4
    x = make_inputs(B=N, T=1, Hq=2, Hv=Hv, K=K, dtype=dtype, grads=False, state_v_first=True)
    pool = torch.full((12, Hv, K, K), torch.nan, device=x.q.device)
    slots = [2, 3, 7, 11]
    pool[slots] = x.initial_state
    guarded, before = helpers.Guarded(pool), pool.clone()
    o = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, guarded.tensor, torch.tensor(slots, device=x.q.device))
    want = helpers.reference(x, grads=False)
    helpers.compare({"o": o, "pool": guarded.tensor[slots]}, {"o": want["o"], "pool": want["final_state"]}, dtype)
    unused = [slot for slot in range(12) if slot not in slots]
    helpers.assert_bitwise("pool", guarded.tensor[unused], before[unused])
    assert guarded.intact()


@every_dtype
@pytest.mark.parametrize("K", helpers.with_cuda([32], [128]))
def test_out_in_the_middle_of_a_larger_tensor(K, dtype):
    x = make_inputs(seqlens=[70], Hq=1, Hv=2, K=K, dtype=dtype, grads=False, state_v_first=True)
    wide = torch.full((1, 70, 2, 3 * K), 7.0, dtype=dtype, device=x.q.device)
    flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, x.initial_state.clone(), torch.tensor([0], device=x.q.device),
                                       cu_seqlens=x.cu_seqlens, out=wide[..., K:2 * K])
    helpers.compare({"o": wide[..., K:2 * K]}, {"o": helpers.reference(x, grads=False)["o"]}, x.dtype)
    assert (wide[..., :K] == 7).all() and (wide[..., 2 * K:] == 7).all()
