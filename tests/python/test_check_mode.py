"""FLASH_QLA_CHECK=1: offsets and indices are read and refused; without it, they can do no harm.

The variable is read by the library at each call, so a test sets it around one.
"""

import helpers
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


def packed(offsets, **more):
    x = make_inputs(**(dict(B=1, T=100, Hq=1, Hv=2, K=16, V=8, state=False, grads=False) | more))
    return x.replace(cu_seqlens=tensor(offsets))


BROKEN_OFFSETS = [
    ([5, 50, 100], "cu_seqlens[0]", "(5)"), ([-5, 50, 100], "cu_seqlens[0]", "(-5)"), ([0, 60, 50], "cu_seqlens[2]", "(50)"),
    ([0, 50, 101], "cu_seqlens[2]", "(101)"), ([0, 2**31 - 1, 100], "cu_seqlens", "(2147483647)"), ([0, -1, 100], "cu_seqlens[1]", "(-1)")]


@pytest.mark.parametrize("offsets,argument,given", BROKEN_OFFSETS, ids=lambda value: str(value))
def test_offsets_are_refused(offsets, argument, given, checking):
    x = packed(offsets)
    state = torch.zeros(2, 2, 16, 8, device=x.q.device)
    with pytest.raises(ValueError) as caught:
        helpers.call(x)
    assert str(caught.value).startswith("chunk_gated_delta_rule: ") and argument in str(caught.value) and given in str(caught.value)
    with pytest.raises(ValueError, match="^fused_recurrent_gated_delta_rule: cu_seqlens"):
        flash_qla.fused_recurrent_gated_delta_rule(x.q, x.k, x.v, g=x.g, beta=x.beta, cu_seqlens=x.cu_seqlens)
    with pytest.raises(ValueError, match="^chunk_gated_delta_rule_bwd: cu_seqlens"):
        flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, x.g, x.beta, None, x.v, initial_state=state, cu_seqlens=x.cu_seqlens)


@pytest.mark.parametrize("offsets", [offsets for offsets, _, _ in BROKEN_OFFSETS], ids=str)
def test_offsets_are_clamped_without_the_check(offsets):
    # What such a call computes is not promised, but it must stay inside its tensors: canaries stand around them.
    x = packed(offsets)
    width = 4096
    guarded = torch.full((2 * width + x.v.numel(),), 7.0, device=x.q.device)
    out = guarded[width:-width].view(x.v.shape)
    pool = torch.full((12, 2, 8, 16), 7.0, device=x.q.device)
    flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, pool[5:7], tensor([0, 1]), cu_seqlens=x.cu_seqlens, out=out)
    assert (guarded[:width] == 7).all() and (guarded[-width:] == 7).all()
    assert (pool[:5] == 7).all() and (pool[7:] == 7).all()
    gradients = flash_qla.chunk_gated_delta_rule_bwd(x.q, x.k, x.v, x.g, x.beta, None, x.v, cu_seqlens=x.cu_seqlens)
    assert gradients[0].shape == x.q.shape


def test_offsets_in_order_are_accepted(checking):
    for offsets in ([0, 0, 0], [0, 40, 40, 90], [0, 100]):
        x = packed(offsets)
        o, final_state = helpers.call(x)
        want_o, want_final, _ = oracle.forward(*(to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), cu_seqlens=offsets)
        helpers.compare({"o": o, "final_state": final_state}, {"o": want_o, "final_state": want_final}, x.dtype)


def prefill(initial, final=None, *, offsets=(0, 40, 100), **options):
    """A prefill whose pool and out hold canaries; returns (exception or None, unchanged)."""
    x = packed(list(offsets))
    pool, out = torch.full((5, 2, 8, 16), 7.0, device=x.q.device), torch.full_like(x.v, 7.0)
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


@pytest.mark.parametrize("arguments,argument,given", [
    (dict(initial=[0, 5]), "initial_state_indices[1]", "(5)"),
    (dict(initial=[0, 1], final=[0, 9]), "final_state_indices[1]", "(9)"),
    (dict(initial=[3, 3]), "initial_state_indices[1]", "(3)"),
    (dict(initial=[0, 1], final=[2, 2]), "final_state_indices[1]", "(2)"),
    (dict(initial=[0, 1], final=[1, 2]), "initial_state_indices[1]", "(1)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10, 101], checkpoint_indices=[2, 3]), "checkpoint_offsets[1]", "(101)"),
    (dict(initial=[0, 1], checkpoint_offsets=[0], checkpoint_indices=[2]), "checkpoint_offsets[0]", "(0)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10], checkpoint_indices=[7]), "checkpoint_indices[0]", "(7)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10, 20], checkpoint_indices=[2, 2]), "checkpoint_indices[1]", "(2)"),
    (dict(initial=[0, 1], checkpoint_offsets=[10], checkpoint_indices=[1]), "checkpoint_indices[0]", "(1)"),
    (dict(initial=[0, 1], offsets=(0, 0, 100), checkpoints=torch.zeros(1, 2, 8, 16), **CHECKPOINTS), "checkpoint_cu_starts[1]", "(0)"),
], ids=str)
def test_indices_are_refused(arguments, argument, given, checking):
    arguments = {name: value.to(helpers.settings.device) if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}
    message, unchanged = prefill(**arguments)
    assert message is not None, "the call was accepted"
    assert message.startswith("gated_delta_rule_prefill: ") and argument in message and given in message, message
    assert unchanged, "a refused call wrote"


@pytest.mark.parametrize("arguments", [
    dict(initial=[-1, -1]), dict(initial=[0, 1], final=[-1, -1]), dict(initial=[0, 1], final=[-1, 4]),
    dict(initial=[2, 1], final=[0, 1], has_initial_state=[False, True]),
    dict(initial=[1, 1], final=[0, 1], has_initial_state=[False, True]),
    dict(initial=[3, 3], final=[0, 1])], ids=str)
def test_legal_indices_are_accepted(arguments, checking):
    # Several rows may read one slot that nobody writes: a shared prefix.
    message, _ = prefill(**arguments)
    assert message is None, message


@pytest.mark.parametrize("accepted,given", [([0, 1], "(0)"), ([1, 3], "(3)"), ([-1, 1], "(-1)")])
def test_accepted_counts_are_refused_or_clamped(accepted, given, monkeypatch):
    x = make_inputs(B=2, T=1, Hq=1, Hv=2, K=16, V=8, state=False, grads=False)
    pool = torch.full((4, 2, 8, 16), 7.0, device=x.q.device)

    def decode():
        return flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, tensor([[0, 1], [2, 3]]), tensor([0, 2]),
                                                 num_accepted_tokens=tensor(accepted))

    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    with pytest.raises(ValueError, match="^gated_delta_rule_decode: num_accepted_tokens") as caught:
        decode()
    assert given in str(caught.value) and (pool == 7).all()
    monkeypatch.setenv("FLASH_QLA_CHECK", "0")
    assert decode().isfinite().all()


def test_checking_changes_no_bit(monkeypatch):
    x = make_inputs(seqlens=[40, 0, 60], Hq=1, Hv=2, K=16, V=8)
    plain = helpers.run(x)
    monkeypatch.setenv("FLASH_QLA_CHECK", "1")
    for name, value in helpers.run(x).items():
        assert_bitwise(name, value, plain[name])


def test_strided_indices_are_read_right(checking):
    x = packed([0, 40, 100])
    x = x.replace(cu_seqlens=tensor([0, -9, 40, -9, 100])[::2])
    helpers.call(x)
    with pytest.raises(ValueError, match=r"cu_seqlens\[1\] \(-9\)"):
        helpers.call(x.replace(cu_seqlens=tensor([0, 40, -9, 60, 100, 100])[::2]))
