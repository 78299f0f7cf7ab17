"""The four functions of Megatron's context parallelism, between which the test gathers summaries as Megatron does."""

from types import SimpleNamespace

import helpers
import pytest
import torch

from flash_qla.integrations import megatron


def inputs_of(x, tokens, cu_seqlens):
    return SimpleNamespace(q=x.q[:, tokens], k=x.k[:, tokens], v=x.v[:, tokens], g=x.g[:, tokens], beta=x.beta[:, tokens],
                           cu_seqlens=cu_seqlens, num_householder=1, scale=x.q.shape[-1] ** -0.5)


def run(x, world):
    """o and the gradients of a stream over `world` equal shares: Megatron's slices, from sequence ids of tokens."""
    T = x.q.shape[1]
    share = T // world
    shares = [slice(rank * share, (rank + 1) * share) for rank in range(world)]
    offsets = None if x.cu_seqlens is None else x.cu_seqlens.tolist()
    local, before, behind = [], [0] * world, [world] * world
    for rank, tokens in enumerate(shares):
        if offsets is None:
            local.append(None)
            continue
        inside = [min(max(n, tokens.start), tokens.stop) - tokens.start for n in offsets]
        local.append(torch.tensor(sorted(set(inside)), dtype=torch.int32, device=x.q.device))
        begin = max(n for n in offsets if n <= tokens.start)
        end = min(n for n in offsets if n >= tokens.stop)
        before[rank], behind[rank] = begin // share, (end - 1) // share + 1

    def gather(summaries, chosen):
        packed = torch.stack([summary.packed for summary in summaries])
        assert packed.dtype == torch.float32 and all(summary.packed.is_contiguous() for summary in summaries)
        return SimpleNamespace(packed=packed[chosen])

    prepared = [megatron.cp_forward_prepare(inputs_of(x, tokens, cu)) for tokens, cu in zip(shares, local)]
    summaries = [summary for summary, _ in prepared]
    applied = [megatron.cp_forward_apply(context, gather(summaries, slice(before[rank], rank)))
               for rank, (_, context) in enumerate(prepared)]
    back = [megatron.cp_backward_prepare(x.do[:, tokens], saved) for tokens, (_, saved) in zip(shares, applied)]
    summaries = [summary for summary, _ in back]
    gradients = [megatron.cp_backward_apply(context, gather(summaries, slice(rank + 1, behind[rank])))
                 for rank, (_, context) in enumerate(back)]
    result = {"o": torch.cat([o for o, _ in applied], 1)}
    for i, name in enumerate(("dq", "dk", "dv", "dg", "dbeta")):
        result[name] = torch.cat([found[i] for found in gradients], 1)
    return result


# Megatron's own cases: tokens a rank, and samples that begin and end beside the shares' borders.
@pytest.mark.parametrize("share", [63, 64, 65, 128, 257])
@pytest.mark.parametrize("packed", [False, True])
def test_shares_and_packed_samples(share, packed):
    T = 2 * share
    x = helpers.make_inputs(B=1 if packed else 2, T=T, Hq=1, Hv=2 if share % 2 else 1, K=16, V=8, state=False,
                            seqlens=[40, T - 80, 40] if packed else None)
    helpers.compare(run(x, 2), helpers.reference(x.replace(dht=None)), x.dtype, only=("o", "dq", "dk", "dv", "dg", "dbeta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_four_ranks(dtype):
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, state=False, seqlens=[30, 330, 40], dtype=dtype)
    helpers.compare(run(x, 4), helpers.reference(x.replace(dht=None)), x.dtype, only=("o", "dq", "dk", "dv", "dg", "dbeta"))


def test_samples_do_not_change_each_other_s_bits():
    x = helpers.make_inputs(Hq=1, Hv=2, K=16, V=8, state=False, seqlens=[50, 100, 50])
    changed = x.replace(q=x.q.clone(), v=x.v.clone())
    changed.q[:, :50], changed.v[:, :50] = 3.0, -2.0
    before, after = run(x, 2), run(changed, 2)
    for name, value in before.items():
        helpers.assert_bitwise(name, after[name][:, 50:], value[:, 50:])


def test_a_loss_on_the_last_rank_alone():
    x = helpers.make_inputs(T=128, Hq=1, Hv=2, K=16, V=8, state=False)
    x.do[:, :64] = 0
    got = run(x, 2)
    assert got["dv"][:, :64].abs().max() > 1e-6
    helpers.compare(got, helpers.reference(x.replace(dht=None)), x.dtype, only=("o", "dq", "dk", "dv", "dg", "dbeta"))


def test_saved_tensors_and_what_is_no_tensor():
    """Megatron saves the tensors with save_for_backward and keeps the metadata beside them."""
    x = helpers.make_inputs(T=64, Hq=1, Hv=2, K=16, V=8, state=False)
    _, context = megatron.cp_forward_prepare(inputs_of(x, slice(None), None))
    none = SimpleNamespace(packed=torch.empty((0, 1, 2, 16 * 24 + 4), device=x.q.device))
    _, saved = megatron.cp_forward_apply(context, none)
    assert all(isinstance(t, torch.Tensor) for t in saved.tensors)
    assert not any(isinstance(value, torch.Tensor) for value in saved.metadata)


def test_householder_products_are_refused():
    x = helpers.make_inputs(T=8, Hq=1, Hv=2, K=16, V=8, state=False)
    inputs = inputs_of(x, slice(None), None)
    inputs.num_householder = 2
    with pytest.raises(NotImplementedError, match=r"^cp_forward_prepare: num_householder \(2\) must be 1"):
        megatron.cp_forward_prepare(inputs)
