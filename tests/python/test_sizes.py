"""Requirements 5, 6 and 17: more tiles than a grid dimension holds, offsets beyond 2^31, and time that grows linearly."""

import time

import helpers
import numpy as np
import pytest
import torch
from helpers import check, make_inputs

import flash_qla


@pytest.mark.requirement(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=helpers.dtype_name)
def test_sequences_times_heads_beyond_65535(dtype):
    # 16,500 sequences of 4 heads; lengths 0, 1, 2, 3 in turn.
    check(make_inputs(Hq=2, Hv=4, K=8, V=8, dtype=dtype, seqlens=[i % 4 for i in range(16_500)], state=dtype == torch.float32))


@pytest.mark.requirement(5)
@pytest.mark.path("sm90")
@pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
def test_sequences_times_heads_beyond_65535_on_tensor_cores(dtype):
    # States of all sequences are gigabytes, and numpy's are more: none come in or go out, and the first, the last and those
    # around head number 65,536 stand for all.
    count = 16_500
    x = make_inputs(Hq=2, Hv=4, K=128, dtype=dtype, seqlens=[i % 4 for i in range(count)], state=False, grads=False)
    x.do = torch.randn(x.v.shape, generator=torch.Generator().manual_seed(1)).to(x.v)
    leaves = {name: getattr(x, name).requires_grad_() for name in ("q", "k", "v", "g", "beta")}
    o, _ = flash_qla.chunk_gated_delta_rule(*leaves.values(), cu_seqlens=x.cu_seqlens)
    gradients = torch.autograd.grad(o, list(leaves.values()), x.do)
    got = {"o": o.detach(), **{helpers.GRADIENT_NAMES[name]: gradient for name, gradient in zip(leaves, gradients)}}
    offsets = x.cu_seqlens.tolist()
    for first in (0, 65_536 // 4 - 50, count - 100):
        tokens = slice(offsets[first], offsets[first + 100])
        part = x.replace(**{name: getattr(x, name).detach()[:, tokens] for name in (*leaves, "do")},
                         cu_seqlens=x.cu_seqlens[first:first + 101] - offsets[first])
        want = helpers.reference(part)
        helpers.compare({name: value[:, tokens] for name, value in got.items()}, {name: want[name] for name in got}, dtype,
                        where=f"sequences from {first}: ")


@pytest.mark.requirement(5)
@pytest.mark.early
def test_65536_sequences_of_one_token():
    check(make_inputs(Hq=1, Hv=1, K=8, V=8, seqlens=[1] * 65_536, state=False))


@pytest.mark.requirement(5)
def test_65536_rows_of_a_dense_batch():
    check(make_inputs(B=65_536, T=1, Hq=1, Hv=1, K=8, V=8, state=False))


@pytest.mark.requirement(5)
def test_decode_of_65536_rows():
    N, K = 65_536, 8
    x = make_inputs(B=N, T=1, Hq=1, Hv=2, K=K, grads=False, state_v_first=True)
    pool = x.initial_state.clone()
    o = flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, torch.arange(N, device=pool.device, dtype=torch.int32))
    want = helpers.reference(x, grads=False)
    helpers.compare({"o": o, "pool": pool}, {"o": want["o"], "pool": want["final_state"]}, x.dtype)


BEYOND = 2**31


def sparse(shape, strides, dtype, device):
    """A strided tensor in a buffer of which only the touched pages exist on the CPU."""
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides))
    return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, strides)


@pytest.mark.requirement(6)
@pytest.mark.parametrize("K, dtype", helpers.with_cuda([(16, torch.float32)], [(128, torch.bfloat16), (128, torch.float16)]), ids=str)
def test_pool_slots_beyond_2_31_elements(K, dtype, device):
    slots, Hv = 3, 2
    pool = sparse((slots, Hv, K, K), (BEYOND // 2 + 64, K * K, K, 1), torch.bfloat16, device)
    x = make_inputs(seqlens=[65, 3], Hq=1, Hv=Hv, K=K, dtype=dtype, state_dtype=torch.bfloat16, grads=False, state_v_first=True)
    pool[0] = x.initial_state[0]
    pool[2] = x.initial_state[1]
    indices = torch.tensor([0, 2], device=device)
    o = flash_qla.gated_delta_rule_prefill(x.q, x.k, x.v, x.g, x.beta, pool, indices, cu_seqlens=x.cu_seqlens)
    want = helpers.reference(x, grads=False)
    helpers.compare({"o": o}, {"o": want["o"]}, dtype)
    for row, slot in enumerate((0, 2)):
        helpers.assert_close("pool", pool[slot], want["final_state"][row], helpers.LOW_PRECISION["state"], 0)


@pytest.mark.requirement(6)
@pytest.mark.parametrize(
    "K, T, dtype", helpers.with_cuda([(16, 3, torch.bfloat16)], [(128, 70, torch.bfloat16), (128, 70, torch.float16)]), ids=str)
def test_strides_beyond_2_31_elements(K, T, dtype, device):
    # From 65 tokens on the gradients are a Hopper path's own, where no gradient of a final state comes in.
    x = make_inputs(T=T, Hq=1, Hv=1, K=K, dtype=dtype).replace(dht=None)
    for name in ("q", "k", "v", "do"):  # one after another: each takes 4 GB of a GPU
        t = getattr(x, name)
        far = sparse(t.shape, (0, (BEYOND // (T - 1) // 8 + 1) * 8, K, 1), t.dtype, device)
        check(x.replace(**{name: far.copy_(t)}))
        del far


@pytest.mark.requirement(6)
@pytest.mark.slow
@pytest.mark.cuda
def test_long_sequence_tail_equals_slice(device):
    # v has 2.2e9 elements. With the state handed over, the tail alone must give the same bits as the tail of the whole.
    T, Hv, K = 540_672, 32, 128
    generator = torch.Generator(device).manual_seed(0)
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, 1, K, device=device, generator=generator), dim=-1).bfloat16() for _ in range(2))
    v = torch.randn(1, T, Hv, K, device=device, generator=generator, dtype=torch.bfloat16)
    g = torch.full((1, T, Hv), -0.05, device=device)
    beta = torch.full((1, T, Hv), 0.5, device=device)
    assert v.numel() > BEYOND
    with torch.no_grad():
        o, _ = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, auto_cp=False)
        cut = T - 4096
        _, state = flash_qla.chunk_gated_delta_rule(*(t[:, :cut] for t in (q, k, v, g, beta)), output_final_state=True, auto_cp=False)
        tail, _ = flash_qla.chunk_gated_delta_rule(*(t[:, cut:] for t in (q, k, v, g, beta)), initial_state=state, auto_cp=False)
    helpers.assert_bitwise("o", o[:, cut:], tail)


def seconds(x, repeats=3):
    times = []
    for _ in range(repeats):
        if x.q.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        helpers.run(x)
        if x.q.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


# Tokens of the smaller of two calls: on a GPU enough for the time not to be that of the launches.
SMALL = {"cpu": 4_096, "cuda": 65_536}


def grows_linearly(small, large):
    """`large` is four times `small`, and may cost at most six times the time: room for a noisy machine, none for a
    quadratic term."""
    helpers.run(small)
    return seconds(large) < 6 * seconds(small)


@pytest.mark.requirement(17)
@pytest.mark.parametrize("K, dtype", helpers.with_cuda([(32, torch.float32), (128, torch.bfloat16)], [(128, torch.float16)]), ids=str)
def test_time_grows_linearly_with_the_length(device, K, dtype):
    T = SMALL[device]
    assert grows_linearly(*(make_inputs(T=n, Hq=1, Hv=2, K=K, dtype=dtype, state=False, drawn_on=device) for n in (T, 4 * T)))


@pytest.mark.requirement(17)
def test_time_grows_linearly_with_the_number_of_sequences(device):
    n = SMALL[device] // 4  # of four tokens: up to 65,536 on a GPU
    assert grows_linearly(*(make_inputs(seqlens=[4] * count, Hq=1, Hv=1, K=16, state=False) for count in (n, 4 * n)))


@pytest.mark.requirement(17)
@pytest.mark.slow
def test_a_million_tokens(device):
    T, K = 1_000_000, 128 if device == "cuda" else 16
    x = make_inputs(T=T, Hq=1, Hv=2, K=K, dtype=torch.bfloat16, state=False, grads=False, drawn_on=device)
    whole = helpers.run(x, grads=False, auto_cp=False)
    assert whole["o"].isfinite().all()
    # The last tokens from a state that the oracle carried over the last 3,000: decayed heads have forgotten what was before.
    tail = x.replace(**{name: getattr(x, name)[:, -3_000:] for name in ("q", "k", "v", "g", "beta")})
    want = helpers.reference(tail, grads=False)["o"][:, -64:, 1:]
    helpers.assert_close("o", whole["o"][:, -64:, 1:], want, helpers.LOW_PRECISION["state"], 2)


@pytest.mark.requirement(17)
@pytest.mark.slow
@pytest.mark.cuda
def test_largest_heads():
    check(make_inputs(B=1, T=4_096, Hq=64, Hv=64, K=16, dtype=torch.bfloat16))


@pytest.mark.requirement(17)
@pytest.mark.slow
@pytest.mark.cuda
def test_many_sequences():
    # K = 8: the oracle keeps the states of all sequences at once, in gigabytes from there on.
    lengths = np.random.default_rng(0).integers(0, 40, 65_536).tolist()
    check(make_inputs(seqlens=lengths, Hq=1, Hv=1, K=8, dtype=torch.bfloat16, state=False))
