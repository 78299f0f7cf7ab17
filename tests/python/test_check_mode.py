"""FLASH_QLA_CHECK=1: offsets and indices are read and refused; without it, they can do no harm.

The variable is read by the library at each call, so a test sets it around one.
"""

import time

import helpers
import numpy as np
import oracle
import pytest
import torch
from helpers import assert_bitwise, make_inputs, to_numpy

import flash_qla


@pytest.fixture
def checking(monkeypatch):
    monkeypatch.setenv("FLASH_QLA_CHECK", "1")


def tensor(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=helpers.settings.device)


# Sizes that any path takes, and those of the Hopper kernels.
SIZES = {"any": dict(K=16, V=8), "hopper": dict(K=128, V=128, dtype=torch.bfloat16)}
sizes = pytest.mark.parametrize("size", SIZES)


def packed(offsets, size="any", **more):
    x = make_inputs(**(dict(B=1, T=100, Hq=1, Hv=2, state=False, grads=False) | SIZES[size] | more))
    return x.replace(cu_seqlens=tensor(offsets))


def canaries(x, rows):
    """States [rows, Hv, V, K] of sevens."""
    return torch.full((rows, *x.v.shape[2:], x.q.shape[3]), 7.0, device=x.q.device)


BROKEN_OFFSETS = [
    ([5, 50, 100], "cu_seqlens[0]", "(5)"), ([-5, 50, 100], "cu_seqlens[0]", "(-5)"), ([0, 60, 50], "cu_seqlens[2]", "(50)"),
    ([0, 50, 101], "cu_seqlens[2]", "(101)"), ([0, 2**31 - 1, 100], "cu_seqlens", "(2147483647)"), ([0, -1, 100], "cu_seqlens[1]", "(-1)")]


@sizes
@pytest.mark.parametrize("offsets,argument,given", BROKEN_OFFSETS, ids=lambda value: str(value))
def test_offsets_are_refused(offsets, argument, given, size, checking):
    x = packed(offsets, size)
    state = canaries(x, 2).mT
    with pytest.raises(ValueError) as caught:
        helpers.call(x)
    assert str(caught.value).startswith("chunk_gated_delta_rule: ") and argument in str(caught.value) and given in str(caught.value)
    with pytest.raises(ValueError, match="^fused_recurrent_gated_delta_rule: cu_seqlens"):
        flash_qla.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta, cu_seqlens=x.cu_seqlens)
    with pytest.raises(ValueError, match="^chunk_gated_delta_rule_bwd: cu_seqlens"):
        flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, x.g, x.beta, None, x.v, initial_state=state, cu_seqlens=x.cu_seqlens)


@sizes
@pytest.mark.parametrize("offsets", [offsets for offsets, _, _ in BROKEN_OFFSETS], ids=str)
def test_offsets_are_clamped_without_the_check(offsets, size):
    # What such a call computes is not promised, but it must stay inside its tensors: canaries stand around them.
    x = packed(offsets, size)
    width = 4096
    guarded = torch.full((2 * width + x.v.numel(),), 7.0, dtype=x.dtype, device=x.q.device)
    out = guarded[width:-width].view(x.v.shape)
    pool = canaries(x, 12)
    flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, pool[5:7], tensor([0, 1]), cu_seqlens=x.cu_seqlens, out=out)
    assert (guarded[:width] == 7).all() and (guarded[-width:] == 7).all()
    assert (pool[:5] == 7).all() and (pool[7:] == 7).all()
    gradients = flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, x.g, x.beta, None, x.v, cu_seqlens=x.cu_seqlens)
    assert gradients[0].shape == x.q.shape


LENGTHS = {"cpu": [300, 2100], "cuda": [300, 2100, 4096, 16384]}


@pytest.mark.parametrize("auto_cp,force", [(True, False), (False, False), ("invariant", False), (True, True)], ids=str)
def test_offsets_that_break_their_rules_stay_inside_in_every_mode(auto_cp, force, device):
    # At the sizes where sequences are cut, forward and backward. Afterwards a legal call gives what it gave before.
    for T in LENGTHS[device]:
        for g in (0.0, -1.0):
            x = make_inputs(B=1, T=T, Hq=2, Hv=4, state=False, **SIZES["hopper"])
            x = x.replace(g=torch.full_like(x.g, g), dht=None)
            legal, modes = x.replace(cu_seqlens=tensor([0, T // 2, T])), dict(auto_cp=auto_cp, force_intra_cp=force)
            before = helpers.run(legal, **modes)
            for offsets in ([0, T, 0, T], [0, T, 0, T, 0, T, 0, T], [T, 0, T, 0], [0, 2 * T, T], [-T, 0, T], [0, -T, 2**31 - 1, T]):
                found = helpers.run(x.replace(cu_seqlens=tensor(offsets)), **modes)
                assert found["o"].shape == x.v.shape and found["dq"].shape == x.q.shape
                guarded = torch.full((2 * 4096 + x.v.numel(),), 7.0, dtype=x.dtype, device=x.q.device)
                pool = canaries(x, 12)
                flash_qla.gated_delta_rule_prefill(
                    x.q, x.k, x.v, x.g, x.beta, pool[4:8], torch.arange(len(offsets) - 1, device=pool.device).clamp(max=3),
                    cu_seqlens=tensor(offsets), out=guarded[4096:-4096].view(x.v.shape), auto_cp=auto_cp)
                assert (guarded[:4096] == 7).all() and (guarded[-4096:] == 7).all()
                assert (pool[:4] == 7).all() and (pool[8:] == 7).all()
            for name, value in helpers.run(legal, **modes).items():
                assert_bitwise(name, value, before[name])


@sizes
def test_offsets_in_order_are_accepted(size, checking):
    for offsets in ([0, 0, 0], [0, 40, 40, 90], [0, 100]):
        x = packed(offsets, size)
        o, final_state = helpers.call(x)
        want_o, want_final, _ = oracle.forward(*(to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), cu_seqlens=offsets)
        helpers.compare({"o": o, "final_state": final_state}, {"o": want_o, "final_state": want_final}, x.dtype)


def prefill(initial, final=None, *, offsets=(0, 40, 100), size="any", **options):
    """A prefill whose pool and out hold canaries; returns (exception or None, unchanged)."""
    x = packed(list(offsets), size)
    pool, out = canaries(x, 5), torch.full_like(x.v, 7.0)
    if "checkpoint_every" in options:
        options["checkpoints"] = canaries(x, 1)
    tensors = {name: tensor(value, torch.bool if name == "has_initial_state" else torch.int32) if isinstance(value, list) else value
               for name, value in options.items()}
    try:
        flash_qla.gated_delta_rule_prefill(
            x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial), None if final is None else tensor(final), cu_seqlens=x.cu_seqlens,
            out=out, **tensors)
    except ValueError as error:
        return str(error), bool((pool == 7).all() and (out == 7).all())
    return None, bool((pool == 7).all() and (out == 7).all())


CHECKPOINTS = dict(checkpoint_every=64, checkpoint_cu_starts=[0, 0, 0])


@sizes
@pytest.mark.parametrize("arguments,argument,given", [
    (dict(initial=[0, 5]), "initial_state_indices[1]", "(5)"),
    (dict(initial=[0, -2], null_index=-3), "initial_state_indices[1]", "(-2)"),
    (dict(initial=[0, 1], final=[0, 9]), "final_state_indices[1]", "(9)"),
    (dict(initial=[3, 3]), "initial_state_indices[1]", "(3)"),
    (dict(initial=[0, 1], final=[2, 2]), "final_state_indices[1]", "(2)"),
    (dict(initial=[0, 1], final=[1, 2]), "initial_state_indices[1]", "(1)"),
    (dict(initial=[0, -1], final=[2, 2], has_initial_state=[True, False]), "final_state_indices[1]", "(2)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10, 101], checkpoint_indices=[2, 3]), "checkpoint_offsets[1]", "(101)"),
    (dict(initial=[0, 1], checkpoint_offsets=[0], checkpoint_indices=[2]), "checkpoint_offsets[0]", "(0)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10], checkpoint_indices=[7]), "checkpoint_indices[0]", "(7)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10, 20], checkpoint_indices=[2, 2]), "checkpoint_indices[1]", "(2)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10], checkpoint_indices=[1]), "checkpoint_indices[0]", "(1)"),
    (dict(initial=[0, 1], final=[2, 3], checkpoint_offsets=[10], checkpoint_indices=[1]), "initial_state_indices[1]", "(1)"),
    (dict(initial=[0, 1], offsets=(0, 0, 100), **CHECKPOINTS), "checkpoint_cu_starts[1]", "(0)"),
], ids=str)
def test_indices_are_refused(arguments, argument, given, size, checking):
    message, unchanged = prefill(**arguments, size=size)
    assert message is not None, "the call was accepted"
    assert message.startswith("gated_delta_rule_prefill: ") and argument in message and given in message, message
    assert unchanged, "a refused call wrote"


@sizes
@pytest.mark.parametrize("arguments", [
    dict(initial=[-1, -1]), dict(initial=[0, 1], final=[-1, -1]), dict(initial=[0, 1], final=[-1, 4]),
    dict(initial=[2, 1], final=[0, 1], has_initial_state=[False, True]),
    dict(initial=[1, 1], final=[0, 1], has_initial_state=[False, True]),
    # Several rows may read one slot that nobody writes: a shared prefix.
    dict(initial=[3, 3], final=[0, 1]),
    # A row that is skipped writes nothing: not twice, not past the pool, nor what another row reads.
    dict(initial=[1, -1], final=[2, 2]), dict(initial=[-1, 1], final=[9, 2]), dict(initial=[1, -1], final=[2, 1]),
    dict(initial=[-1, 1], checkpoint_offsets=[10, 20, 50], checkpoint_indices=[2, 2, 2]),
    dict(initial=[0, -1], offsets=(0, 0, 100), **CHECKPOINTS),
    # An index that has_initial_state makes no use of may be anything.
    dict(initial=[77, 1], final=[0, 1], has_initial_state=[False, True]),
    # The row that starts from a slot may put a state of its own there.
    dict(initial=[0, 1], final=[2, 3], checkpoint_offsets=[10, 70], checkpoint_indices=[0, 1]),
    # Tokens behind the last sequence have no state.
    dict(initial=[0, 1], offsets=(0, 40, 60), checkpoint_offsets=[90], checkpoint_indices=[0])], ids=str)
def test_legal_indices_are_accepted(arguments, size, checking):
    message, _ = prefill(**arguments, size=size)
    assert message is None, message


def test_listed_tokens_of_a_dense_batch_are_counted_through_it(checking):
    x = make_inputs(B=2, T=50, Hq=1, Hv=2, K=16, V=8, state=False, grads=False)
    pool, arguments = canaries(x, 5), (x.q, x.k, x.v, x.g, x.beta)
    listed = dict(cu_seqlens=None, checkpoint_indices=tensor([2]))
    flash_qla.gated_delta_rule_prefill(*arguments, pool, tensor([0, 1]), checkpoint_offsets=tensor([100]), **listed)
    assert_bitwise("state after the last token", pool[2], pool[1])
    with pytest.raises(ValueError, match=r"checkpoint_offsets\[0\] \(101\) must be from 1 to 100 tokens"):
        flash_qla.gated_delta_rule_prefill(*arguments, pool, tensor([0, 1]), checkpoint_offsets=tensor([101]), **listed)


def test_a_batch_of_thousands_is_checked_in_a_second(checking):
    n = 4096
    x = make_inputs(seqlens=[1] * n, Hq=1, Hv=1, K=16, V=8, state=False, grads=False, index_dtype=torch.int32)
    pool, slots = torch.zeros(n, 1, 8, 16, device=x.q.device), torch.arange(2 * n, device=x.q.device)[::2] // 2
    arguments = dict(cu_seqlens=x.cu_seqlens, has_initial_state=torch.ones(n, dtype=torch.bool, device=x.q.device))

    def seconds(pool_slots):
        start = time.perf_counter()
        flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, pool, pool_slots, **arguments)
        if x.q.is_cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    seconds(slots)
    assert min(seconds(slots) for _ in range(3)) < 1
    with pytest.raises(ValueError, match=rf"initial_state_indices\[{n - 1}\] \(0\) must not name a slot that is written twice"):
        seconds(torch.cat([slots[:-1], slots[:1]]))


@pytest.mark.cuda
def test_the_check_refuses_a_stream_that_is_captured(checking):
    x = packed([0, 40, 100], "hopper")
    helpers.call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: FLASH_QLA_CHECK \(1\) must be off while the stream is captured"):
            helpers.call(x)
        y = x.v + 1  # the capture goes on
    graph.replay()
    torch.cuda.synchronize()
    assert_bitwise("y", y, x.v + 1)


HOST_OFFSETS = [([0, 40, 90], "cu_seqlens_cpu[2]", "(90)", "(100)"), ([0, 41, 100], "cu_seqlens_cpu[1]", "(41)", "(40)"),
                ([0, 100], "cu_seqlens_cpu.shape[0]", "(2)", "(3)")]


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array], ids=["list", "tensor", "array"])
@pytest.mark.parametrize("host,argument,given,device_value", HOST_OFFSETS, ids=str)
def test_host_offsets_that_differ_are_refused(host, argument, given, device_value, kind, checking, monkeypatch):
    x = packed([0, 40, 100])
    for function in (flash_qla.chunk_gated_delta_rule, flash_qla.chunk_gated_delta_rule_fwd):
        arguments = dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, cu_seqlens=x.cu_seqlens)
        with pytest.raises(ValueError) as caught:
            function(**arguments, cu_seqlens_cpu=kind(host))
        message = str(caught.value)
        assert message.startswith(f"{function.__name__}: {argument} {given} ") and device_value in message, message
        function(**arguments, cu_seqlens_cpu=kind([0, 40, 100]))
    monkeypatch.setenv("FLASH_QLA_CHECK", "0")
    helpers.call(x, cu_seqlens_cpu=kind(host))  # which has no effect on this call


@sizes
@pytest.mark.parametrize("accepted,given", [([0, 1], "(0)"), ([1, 3], "(3)"), ([-1, 1], "(-1)")])
def test_accepted_counts_are_refused_or_clamped(accepted, given, size, monkeypatch):
    x = make_inputs(B=2, T=1, Hq=1, Hv=2, state=False, grads=False, **SIZES[size])
    pool = canaries(x, 4)

    def decode():
        return flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, tensor([[0, 1], [2, 3]]), tensor([0, 2]),
                                                 num_accepted_tokens=tensor(accepted))

    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    with pytest.raises(ValueError, match="^gated_delta_rule_decode: num_accepted_tokens") as caught:
        decode()
    assert given in str(caught.value) and (pool == 7).all()
    monkeypatch.setenv("FLASH_QLA_CHECK", "0")
    assert decode().isfinite().all()


@sizes
def test_checking_changes_no_bit(size, monkeypatch):
    x = make_inputs(seqlens=[40, 0, 60], Hq=1, Hv=2, **SIZES[size])
    plain = helpers.run(x)
    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    for name, value in helpers.run(x).items():
        assert_bitwise(name, value, plain[name])


@sizes
def test_strided_indices_are_read_right(size, checking):
    x = packed([0, 40, 100], size)
    x = x.replace(cu_seqlens=tensor([0, -9, 40, -9, 100])[::2])
    helpers.call(x)
    with pytest.raises(ValueError, match=r"cu_seqlens\[1\] \(-9\)"):
        helpers.call(x.replace(cu_seqlens=tensor([0, 40, -9, 60, 100, 100])[::2]))
