"""The convolution's states: one or several next tokens, pools by index, rings, drafts, checkpoints."""

import layer_oracle as oracle
import numpy as np
import pytest
import torch
from helpers import Guarded, assert_bitwise, assert_close, dtype_name, in_subprocess, offsets, settings, to_numpy
from layer_helpers import BOUNDS, drawn, dtypes

import flash_qla

POISON = float("nan")
SILU = oracle.Conv("silu")


def index(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=settings.device)


class Case:
    """States in a pool, with slots that no sequence uses filled with NaN."""

    def __init__(self, N=4, T=1, C=24, W=4, L=None, slots=9, used=(7, 2, 5, 0), dtype=torch.float32, state_dtype=None, seed=0):
        L = W - 1 if L is None else L
        self.used = list(used[:N])
        self.x = drawn((N, T, C), dtype, seed=seed)
        self.weight, self.bias = drawn((C, W), dtype, 0.5, seed=seed + 1), drawn((C,), dtype, seed=seed + 2)
        self.pool = torch.full((slots, C, L), POISON, dtype=state_dtype or dtype, device=settings.device)
        self.pool[self.used] = drawn((N, C, L), state_dtype or dtype, seed=seed + 3)
        self.before = self.pool.clone()

    def oracle(self, n, **how):
        return oracle.update(to_numpy(self.x[n]), to_numpy(self.weight), to_numpy(self.bias), to_numpy(self.before[self.used[n]]), SILU,
                             **how)

    def check(self, y, states=None, **how):
        """`how[name][n]`: what the oracle's update is told of sequence n."""
        for n, slot in enumerate(self.used):
            want_y, after, _ = self.oracle(n, **{name: values[n] for name, values in how.items()})
            assert_close(f"y[{n}]", y[n], want_y, BOUNDS[self.x.dtype])
            found = self.pool[slot] if states is None else states[n]
            assert_bitwise(f"state[{n}]", found, torch.from_numpy(after).to(found))
        unused = [slot for slot in range(self.pool.shape[0]) if slot not in self.used]
        if states is None:
            assert_bitwise("unused slots", self.pool[unused], self.before[unused])


@pytest.mark.parametrize("dtype", dtypes(), ids=dtype_name)
@pytest.mark.parametrize("W, L", [(2, 1), (3, 2), (4, 3), (4, 4), (4, 9), (1, 1), (6, 5)])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_decode(dtype, W, L, T):
    case = Case(T=T, W=W, L=L, dtype=dtype)
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used))
    case.check(y)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_decode_with_states_of_another_dtype(state_dtype):
    case = Case(T=2, dtype=torch.bfloat16, state_dtype=state_dtype)
    case.check(flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used, torch.int64)))


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
def test_update_of_causal_conv1d(T, channels_last):
    case = Case(T=T, L=5)
    x = case.x.transpose(1, 2) if channels_last else case.x.transpose(1, 2).contiguous()
    y = flash_qla.causal_conv1d_update(x, case.pool, case.weight, case.bias, "silu", conv_state_indices=index(case.used))
    case.check(y.transpose(1, 2))


def test_update_of_one_token_without_a_dimension_and_indices():
    case = Case(N=4, used=(0, 1, 2, 3), slots=4)
    y = flash_qla.causal_conv1d_update(case.x[:, 0], case.pool, case.weight, case.bias, "silu")
    assert y.shape == (4, 24)
    case.check(y[:, None])


def test_out_may_be_x():
    case = Case(T=3)
    want = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool.clone(), index(case.used))
    given, version = case.x.clone(), case.x._version
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), out=case.x)
    assert y is case.x and case.x._version > version
    assert_bitwise("y", y, want)
    case.x = given
    case.check(y)


def test_null_rows_are_skipped():
    case = Case(T=2)
    slots = list(case.used)
    slots[1], slots[2] = -1, 100
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(slots))
    assert not y[1].any() and not y[2].any()
    for n in (1, 2):
        assert_bitwise("pool", case.pool[case.used[n]], case.before[case.used[n]])
    for n in (0, 3):
        want_y, after, _ = case.oracle(n)
        assert_close("y", y[n], want_y, BOUNDS[torch.float32])
        assert_bitwise("state", case.pool[case.used[n]], torch.from_numpy(after).to(case.pool))


def test_null_block_0_of_vllm():
    case = Case(used=(7, 2, 5, 3))
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index([7, 0, 5, 3]), null_index=0)
    assert not y[1].any()
    assert_bitwise("pool", case.pool[2], case.before[2])


def test_reading_and_writing_slots_differ():
    case = Case(T=2, slots=12)
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), index([11, -1, 8, 9]))
    for slot in case.used:
        assert_bitwise("read slot", case.pool[slot], case.before[slot])
    for n, slot in ((0, 11), (2, 8), (3, 9)):
        want_y, after, _ = case.oracle(n)
        assert_close("y", y[n], want_y, BOUNDS[torch.float32])
        assert_bitwise("written slot", case.pool[slot], torch.from_numpy(after).to(case.pool))


@pytest.mark.parametrize("T", [1, 2, 4, 7])
def test_ring(T):
    case = Case(T=T, L=6)
    positions = [0, 3, 5, 1003]
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), cache_seqlens=index(positions))
    case.check(y, ring=positions)


def test_ring_of_causal_conv1d():
    case = Case(N=4, used=(0, 1, 2, 3), slots=4, T=2, L=5)
    positions = [4, 5, 6, 7]
    y = flash_qla.causal_conv1d_update(case.x.transpose(1, 2), case.pool, case.weight, case.bias, "silu", cache_seqlens=index(positions))
    case.check(y.transpose(1, 2), ring=positions)


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("W", [3, 4])
def test_accepted_tokens(T, W):
    case = Case(T=T, W=W, L=W - 2 + T + 2)
    accepted = [1, 2, 3, 1]
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), num_accepted_tokens=index(accepted))
    case.check(y, accepted=accepted)


def test_speculative_chain_is_single_steps_bitwise():
    """Draft tokens of which some are accepted, step after step, against the same tokens one at a time."""
    W, T, C = 4, 4, 24
    weight, bias = drawn((C, W), scale=0.5, seed=1), drawn((C,), seed=2)
    first = drawn((1, C, W - 1), seed=3)
    chain = torch.zeros(1, C, W - 2 + T, device=settings.device)
    chain[:, :, :W - 1] = first
    single = first.clone()
    slots, before = index([0]), 1
    for step, accepted in enumerate((2, 4, 1, 3)):
        tokens = drawn((1, T, C), seed=10 + step)
        y = flash_qla.causal_conv1d_decode(tokens, weight, bias, chain, slots, num_accepted_tokens=index([before]))
        for t in range(accepted):
            want = flash_qla.causal_conv1d_decode(tokens[:, t:t + 1], weight, bias, single, slots)
            assert_bitwise(f"step {step} token {t}", y[:, t:t + 1], want)
        before = accepted


@pytest.mark.parametrize("rows", [None, [3, -1, 0, 2]])
def test_draft_states(rows):
    case = Case(T=3, C=20)
    drafts = torch.full((5, 3, 20, 3), POISON, device=settings.device)
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), draft_states=drafts,
                                       draft_state_indices=None if rows is None else index(rows), l2norm_heads=0)
    case.check(y)
    written = rows or [0, 1, 2, 3]
    for n, row in enumerate(written):
        if row >= 0:
            assert_bitwise(f"drafts[{n}]", drafts[row], torch.from_numpy(case.oracle(n)[2]).to(drafts))
    for row in set(range(5)) - set(written):
        assert drafts[row].isnan().all()


def test_packed_decode():
    """Sequences of 2, 0, 3 and 1 tokens in one row, drafts among them."""
    lengths = [2, 0, 3, 1]
    case = Case(T=3)
    packed = torch.cat([case.x[n, :length] for n, length in enumerate(lengths)])[None]
    packed = torch.cat([packed, torch.full_like(packed[:, :2], POISON)], 1)
    y = flash_qla.causal_conv1d_decode(packed, case.weight, case.bias, case.pool, index(case.used), cu_seqlens=offsets(lengths), max_tokens=3)
    assert not y[0, 6:].any()
    begin = 0
    for n, length in enumerate(lengths):
        want_y, after, _ = oracle.update(to_numpy(case.x[n, :length]), to_numpy(case.weight), to_numpy(case.bias),
                                         to_numpy(case.before[case.used[n]]), SILU)
        assert_close("y", y[0, begin:begin + length], want_y, BOUNDS[torch.float32])
        assert_bitwise("state", case.pool[case.used[n]], torch.from_numpy(after).to(case.pool))
        begin += length


@pytest.mark.parametrize("L", [3, 5])
@pytest.mark.parametrize("dtype", dtypes()[:3], ids=dtype_name)
def test_prefill(L, dtype):
    lengths = [40, 0, 1, 270]
    case = Case(L=L, dtype=dtype)
    x = drawn((1, sum(lengths) + 2, 24), dtype, seed=8)
    fresh = [True, True, False, True]
    has = torch.tensor(fresh, device=settings.device)
    y = flash_qla.causal_conv1d_prefill(x, case.weight, case.bias, case.pool, index(case.used), cu_seqlens=offsets(lengths),
                                        has_initial_state=has)
    begin = 0
    for n, length in enumerate(lengths):
        state = to_numpy(case.before[case.used[n]]) if fresh[n] else np.zeros((24, L))
        want_y, after, _ = oracle.update(to_numpy(x[0, begin:begin + length]), to_numpy(case.weight), to_numpy(case.bias), state, SILU)
        assert_close("y", y[0, begin:begin + length], want_y, BOUNDS[dtype])
        assert_bitwise("state", case.pool[case.used[n]], torch.from_numpy(after).to(case.pool))
        begin += length
    assert not y[0, -2:].any()
    unused = [slot for slot in range(9) if slot not in case.used]
    assert_bitwise("unused", case.pool[unused], case.before[unused])


def test_fresh_sequence_does_not_read_its_slot():
    case = Case()
    case.pool[:] = POISON
    x = drawn((1, 9, 24))
    y = flash_qla.causal_conv1d_prefill(x, case.weight, case.bias, case.pool, index([-1, 3]), index([4, 5]), cu_seqlens=offsets([4, 5]),
                                        has_initial_state=torch.tensor([False, False], device=settings.device))
    assert y.isfinite().all() and case.pool[[4, 5]].isfinite().all() and case.pool[3].isnan().all()


@pytest.mark.parametrize("L", [3, 6])
def test_checkpoints(L):
    """The state before listed positions, within a sequence and at its end, in slots of their own."""
    lengths = [5, 300, 0, 20]
    case = Case(L=L, slots=20)
    x = drawn((1, sum(lengths), 24), seed=8)
    positions, slots = [1, 5, 6, 261, 305, 306, 325], [10, 11, 12, 13, 14, 15, -1]
    flash_qla.causal_conv1d_prefill(x, case.weight, case.bias, case.pool, index(case.used), cu_seqlens=offsets(lengths),
                                    checkpoint_offsets=index(positions, torch.int64), checkpoint_indices=index(slots, torch.int64))
    starts = np.concatenate([[0], np.cumsum(lengths)])
    for position, slot in zip(positions, slots):
        n = int(np.searchsorted(starts, position, side="left")) - 1
        inputs = x[0, starts[n]:position].t()
        want = torch.cat([case.before[case.used[n]], inputs], 1)[:, -L:]
        if slot >= 0:
            assert_bitwise(f"position {position}", case.pool[slot], want)


def test_decode_after_prefill_is_a_longer_prefill_bitwise():
    weight, bias, x = drawn((24, 4), scale=0.5), drawn((24,)), drawn((2, 60, 24))
    whole, _ = flash_qla.causal_conv1d(x, weight, bias, activation="silu")
    pool = torch.zeros(2, 24, 3, device=settings.device)
    fresh = torch.tensor([False, False], device=settings.device)
    parts = [flash_qla.causal_conv1d_prefill(x[:, :50], weight, bias, pool, index([0, 1]), cu_seqlens=None, has_initial_state=fresh)]
    parts += [flash_qla.causal_conv1d_decode(x[:, t:t + 1], weight, bias, pool, index([0, 1])) for t in range(50, 60)]
    assert_bitwise("y", torch.cat(parts, 1), whole)


def test_norm_of_heads_in_decode():
    case = Case(T=2, C=40)
    norm = dict(l2norm_heads=2, head_dim=16)
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used), **norm)
    for n in range(4):
        want, _, _ = oracle.update(to_numpy(case.x[n]), to_numpy(case.weight), to_numpy(case.bias), to_numpy(case.before[case.used[n]]),
                                   oracle.Conv("silu", **norm))
        assert_close("y", y[n], want, BOUNDS[torch.float32])


def test_strided_pool_and_canaries():
    case = Case(T=2, L=4)
    guarded = Guarded(case.before.transpose(1, 2).contiguous())  # slots of [L, C], as an engine may keep them
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, guarded.tensor.transpose(1, 2), index(case.used))
    case.pool = guarded.tensor.transpose(1, 2)
    case.check(y)
    assert guarded.intact()


def test_the_front_of_a_longer_slot():
    """vLLM keeps the window at the front of a slot: its adapter passes that view."""
    case = Case(T=1, L=6)
    front = case.pool[:, :, :3]
    before = case.pool.clone()
    y = flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, front, index(case.used))
    for n, slot in enumerate(case.used):
        want, after, _ = oracle.update(to_numpy(case.x[n]), to_numpy(case.weight), to_numpy(case.bias), to_numpy(before[slot][:, :3]), SILU)
        assert_close("y", y[n], want, BOUNDS[torch.float32])
        assert_bitwise("front", case.pool[slot][:, :3], torch.from_numpy(after).to(case.pool))
        assert_bitwise("rest", case.pool[slot][:, 3:], before[slot][:, 3:])


def test_pool_counts_as_modified():
    case = Case()
    version = case.pool._version
    flash_qla.causal_conv1d_decode(case.x, case.weight, case.bias, case.pool, index(case.used))
    assert case.pool._version > version


def test_gradients_are_refused():
    case = Case()
    weight = case.weight.requires_grad_()
    y = flash_qla.causal_conv1d_decode(case.x, weight, case.bias, case.pool, index(case.used))
    with pytest.raises(NotImplementedError, match="causal_conv1d_decode: backward"):
        y.sum().backward()


CHECKED = {
    "past the pool": ("causal_conv1d_decode(x, w, None, pool, i([1, 9]))", r"initial_state_indices\[1\] \(9\) must be below"),
    "twice": ("causal_conv1d_decode(x, w, None, pool, i([1, 1]))", r"initial_state_indices\[1\] \(1\) must not name a slot that is written"),
    "read and written": ("causal_conv1d_decode(x, w, None, pool, i([1, 2]), i([2, 3]))", r"initial_state_indices\[1\] \(2\) must not name"),
    "accepted": ("causal_conv1d_decode(x, w, None, pool, i([1, 2]), num_accepted_tokens=i([1, 5]))", r"num_accepted_tokens\[1\] \(5\)"),
    "draft row": ("causal_conv1d_decode(x, w, None, pool, i([1, 2]), draft_states=d, draft_state_indices=i([0, 0]))",
                  r"draft_state_indices\[1\] \(0\)"),
    "falling": ("causal_conv1d_prefill(x[:1], w, None, pool, i([1, 2]), cu_seqlens=i([0, 1, 0]))", r"cu_seqlens\[2\] \(0\) must not be below"),
    "past the end": ("causal_conv1d(x[:1], w, cu_seqlens=i([0, 5]))", r"cu_seqlens\[1\] \(5\) must not be above x.shape\[1\]"),
    "listed": ("causal_conv1d_prefill(x[:1], w, None, pool, i([1]), cu_seqlens=i([0, 1]), checkpoint_offsets=i([2]), "
               "checkpoint_indices=i([3]))", r"checkpoint_offsets\[0\] \(2\) must be from 1 to 1"),
}


def test_checked_device_data():
    """With FLASH_QLA_CHECK=1, in one process for all."""
    calls = "\n".join(f"attempt({name!r}, lambda: flash_qla.{call})" for name, (call, _) in CHECKED.items())
    code = f"""
import torch, flash_qla
i = lambda values: torch.tensor(values, dtype=torch.int32, device={settings.device!r})
x, w, pool = torch.ones(2, 1, 4, device={settings.device!r}), torch.ones(4, 4, device={settings.device!r}), torch.ones(5, 4, 4, device={settings.device!r})
d = torch.zeros(2, 1, 4, 3, device={settings.device!r})
def attempt(name, call):
    try:
        call()
        print(name, "| passed")
    except ValueError as error:
        print(name, "|", error)
attempt("legal", lambda: flash_qla.causal_conv1d_decode(x, w, None, pool, i([1, 2])))
{calls}
"""
    run = in_subprocess(code, FLASH_QLA_CHECK="1")
    assert run.returncode == 0, run.stderr
    found = dict(line.split(" | ") for line in run.stdout.strip().splitlines())
    assert found.pop("legal") == "passed"
    for name, (_, message) in CHECKED.items():
        import re

        assert re.search(message, found[name]), (name, found[name])


@pytest.mark.parametrize("slots", [[-5, 2**31 - 1], [-(2**31), 3]])
def test_wild_indices_touch_nothing_else(slots):
    guarded = Guarded(torch.zeros(5, 8, 3, device=settings.device))
    x, weight = drawn((2, 2, 8)), drawn((8, 4))
    flash_qla.causal_conv1d_decode(x, weight, None, guarded.tensor, index(slots))
    assert guarded.intact()


@pytest.mark.parametrize("cu", [[5, 2, 9], [-3, 4, 2**31 - 1], [9, 9, 0], [0, 100, 3]])
def test_wild_offsets_touch_nothing_else(cu):
    x, out = Guarded(drawn((1, 9, 8))), Guarded(torch.zeros(1, 9, 8, device=settings.device))
    pool = Guarded(torch.zeros(5, 8, 3, device=settings.device))
    for call in (flash_qla.causal_conv1d_prefill, flash_qla.causal_conv1d_decode):
        call(x.tensor, drawn((8, 4)), None, pool.tensor, index([1, 2]), cu_seqlens=index(cu), out=out.tensor)
        assert x.intact() and out.intact() and pool.intact()
    leaf = x.tensor.clone().requires_grad_()
    y, _ = flash_qla.causal_conv1d(leaf, drawn((8, 4)), cu_seqlens=index(cu))
    y.sum().backward()
