"""Rung 9: what the library must overwrite holds NaN, what it must not touch holds canaries, and inputs keep their bits."""

import contextlib

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import make_inputs

import flash_qla

both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)


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


class Guarded:
    """A tensor between two stretches of canaries."""

    WIDTH = 256
    CANARY = -12345.0

    def __init__(self, value):
        n = value.numel()
        self.buffer = torch.full((n + 2 * self.WIDTH,), self.CANARY, dtype=value.dtype, device=value.device)
        self.tensor = self.buffer[self.WIDTH:self.WIDTH + n].view(value.shape)
        self.tensor.copy_(value)

    def intact(self):
        canary = torch.tensor(self.CANARY, dtype=self.buffer.dtype).item()
        return bool((self.buffer[:self.WIDTH] == canary).all() and (self.buffer[-self.WIDTH:] == canary).all())


@both
@pytest.mark.parametrize("options", [dict(), dict(seqlens=[70, 0, 3, 64], padding=9), dict(raw=True, state_v_first=True), dict(T=600, force_intra_cp=True)], ids=str)
def test_poisoned_outputs_and_workspace(options, dtype):
    x = make_inputs(**(dict(T=130, Hq=1, Hv=2, K=48, V=80, dtype=dtype) | options))
    with fresh_memory_is_nan():
        got = helpers.run(x)
    helpers.compare(got, helpers.reference(x), dtype)


@both
def test_poisoned_low_level_outputs(dtype):
    x = make_inputs(seqlens=[70, 0, 130], padding=5, Hq=1, Hv=2, K=64, dtype=dtype)
    with fresh_memory_is_nan():
        g, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(
            x.q, x.k, x.v, x.g, x.beta, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens, output_h=True)
        gradients = flash_qla.chunk_gated_delta_rule_bwd(
            x.q, x.k, x.v, g, x.beta, A, x.do, dht=x.dht, initial_state=x.initial_state, cu_seqlens=x.cu_seqlens)
    for name, value in zip(("g", "A", "o", "h", "final_state", "dq", "dk", "dv", "db", "dg", "dh0"), (g, A, o, h, final_state, *gradients)):
        assert value.isfinite().all(), f"{name} has elements that were not written"


@both
def test_inputs_are_read_only(dtype):
    x = make_inputs(seqlens=[70, 0, 65], Hq=1, Hv=2, K=64, dtype=dtype, raw=True)
    guarded = {name: Guarded(getattr(x, name)) for name in (*x.DIFFERENTIABLE, "do", "dht", "cu_seqlens")}
    helpers.run(x.replace(**{name: g.tensor for name, g in guarded.items()}))
    for name, g in guarded.items():
        helpers.assert_bitwise(name, g.tensor, getattr(x, name))
        assert g.intact(), name


@both
def test_pool_out_and_checkpoints_between_canaries(dtype):
    lengths, Hv, K = [130, 0, 64, 3], 2, 32
    x = make_inputs(seqlens=lengths, padding=4, Hq=1, Hv=Hv, K=K, dtype=dtype, grads=False)
    pool = torch.full((9, Hv, K, K), torch.nan, device=x.q.device)
    read, write = [1, 3, 5, 7], [1, 4, 5, 8]
    pool[read] = x.initial_state
    before = pool.clone()
    guarded = dict(
        pool=Guarded(pool), out=Guarded(torch.full_like(x.v, torch.nan)),
        checkpoints=Guarded(torch.full((3, Hv, K, K), torch.nan, device=x.q.device)))
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


@both
def test_decode_leaves_other_slots_alone(dtype):
    N, Hv, K = 4, 4, 64
    x = make_inputs(B=N, T=1, Hq=2, Hv=Hv, K=K, dtype=dtype, grads=False, state_v_first=True)
    pool = torch.full((12, Hv, K, K), torch.nan, device=x.q.device)
    slots = [2, 3, 7, 11]
    pool[slots] = x.initial_state
    guarded, before = Guarded(pool), pool.clone()
    o = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, guarded.tensor, torch.tensor(slots, device=x.q.device))
    want = helpers.reference(x, grads=False)
    helpers.compare({"o": o, "pool": guarded.tensor[slots]}, {"o": want["o"], "pool": want["final_state"]}, dtype)
    unused = [slot for slot in range(12) if slot not in slots]
    helpers.assert_bitwise("pool", guarded.tensor[unused], before[unused])
    assert guarded.intact()


def test_out_in_the_middle_of_a_larger_tensor():
    x = make_inputs(seqlens=[70], Hq=1, Hv=2, K=32, grads=False, state_v_first=True)
    wide = torch.full((1, 70, 2, 96), 7.0, device=x.q.device)
    flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, x.initial_state.clone(), torch.tensor([0], device=x.q.device),
                                       cu_seqlens=x.cu_seqlens, out=wide[..., 32:64])
    helpers.compare({"o": wide[..., 32:64]}, {"o": helpers.reference(x, grads=False)["o"]}, x.dtype)
    assert (wide[..., :32] == 7).all() and (wide[..., 64:] == 7).all()
