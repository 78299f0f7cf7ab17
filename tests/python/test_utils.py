"""flash_qla.utils and flash_qla.ops.utils: each against sums and slices written out here, in float64."""

import importlib
import math

import helpers
import numpy as np
import pytest
import torch

import flash_qla
from flash_qla.ops.utils import chunk_local_cumsum, group_reduce_vector
from flash_qla.utils import (
    fill_last_chunk_of_g, input_guard, l2norm, l2norm_bwd, l2norm_fwd, pack, pad_and_reshape, prepare_chunk_indices,
    prepare_chunk_offsets, tensor_cache, unpack)

floats = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=helpers.dtype_name)
# Offsets: sequences of one chunk and of several, empty ones at the start, in the middle and at the end.
OFFSETS = [[0, 70, 70, 200, 264], [0, 64, 128], [0, 0, 0, 5], [0, 1, 2, 3], [0, 129, 129], [0, 0], [0]]
offsets = pytest.mark.parametrize("offsets", OFFSETS, ids=str)
indices = pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])

# Unit roundoff of each dtype: what one rounding may cost.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float64: 2.0**-52}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(helpers.settings.device, dtype)


def on_device(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype, device=helpers.settings.device)


def test_names_and_import_paths():
    assert set(flash_qla.utils.__all__) == {
        "l2norm", "l2norm_fwd", "l2norm_bwd", "pack", "unpack", "pad_and_reshape", "fill_last_chunk_of_g", "prepare_chunk_indices",
        "prepare_chunk_offsets", "tensor_cache", "input_guard"}
    homes = dict(pack="pack", unpack="pack", pad_and_reshape="pack", fill_last_chunk_of_g="pack", l2norm="math", l2norm_fwd="math",
                 l2norm_bwd="math", prepare_chunk_indices="index", prepare_chunk_offsets="index", tensor_cache="index",
                 input_guard="contiguous")
    for name, home in homes.items():
        assert getattr(importlib.import_module(f"flash_qla.utils.{home}"), name) is getattr(flash_qla.utils, name)
    assert importlib.import_module("flash_qla.ops.gated_delta_rule.chunk").CHUNK_SIZE == 64


def test_importing_flash_qla_does_not_import_utils():
    done = helpers.in_subprocess("import sys, flash_qla\nassert 'flash_qla.utils' not in sys.modules\nflash_qla.utils.pack\nprint('lazily')")
    assert "lazily" in done.stdout, done.stderr[-2000:]


@floats
@pytest.mark.parametrize("shape", [(3, 5, 2, 128), (7, 1), (4, 100), (0, 8)], ids=str)
def test_l2norm(shape, dtype):
    x = draw(*shape, dtype=dtype)
    exact = helpers.to_numpy(x)
    root = np.sqrt((exact**2).sum(-1, keepdims=True) + 1e-6)
    y, rstd = l2norm_fwd(x)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert (y.shape, y.dtype, rstd.shape, rstd.dtype) == (x.shape, dtype, x.shape[:-1], wide)
    np.testing.assert_allclose(helpers.to_numpy(rstd), 1 / root[..., 0], rtol=8 * ROUNDING[wide])
    np.testing.assert_allclose(helpers.to_numpy(y), exact / root, rtol=8 * ROUNDING[wide] + ROUNDING[dtype], atol=1e-7)
    helpers.assert_bitwise("y", l2norm(x), y)
    # The gradient of x / sqrt(sum x^2 + eps), from y as it was rounded.
    dy, exact_y = draw(*shape, dtype=dtype, seed=1), helpers.to_numpy(y)
    exact_dy = helpers.to_numpy(dy)
    want = (exact_dy - (exact_dy * exact_y).sum(-1, keepdims=True) * exact_y) / root
    dx = l2norm_bwd(y, rstd, dy)
    assert (dx.shape, dx.dtype) == (x.shape, wide)
    scale = np.abs(exact_dy).max(-1, keepdims=True, initial=0) / root * math.sqrt(shape[-1])
    assert (np.abs(helpers.to_numpy(dx) - want) <= 16 * ROUNDING[wide] * scale).all()


def test_l2norm_takes_a_large_epsilon_and_zeros():
    x = torch.zeros(2, 8, device=helpers.settings.device)
    assert not l2norm(x).any()
    np.testing.assert_allclose(helpers.to_numpy(l2norm(x + 1, eps=8.0)), 0.25, rtol=1e-6)


def test_l2norm_is_differentiable():
    x = draw(3, 4, 6, dtype=torch.float64).transpose(0, 1).requires_grad_()  # not contiguous
    assert torch.autograd.gradcheck(lambda x: l2norm(x, 1e-3), x)
    low = draw(2, 64, dtype=torch.bfloat16).requires_grad_()
    (dx,) = torch.autograd.grad(l2norm(low).sum(), low)
    assert dx.dtype == torch.bfloat16 and dx.any()


def test_l2norm_compiles():
    x = draw(3, 16).requires_grad_()
    compiled = torch.compile(l2norm, fullgraph=True, backend="aot_eager")
    helpers.assert_bitwise("y", compiled(x), l2norm(x))
    (a,), (b,) = (torch.autograd.grad(f(x).square().sum() + f(x).sum(), x) for f in (compiled, l2norm))
    # The compiler takes square() apart in another way than autograd: roundings differ on a GPU.
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_l2norm_refuses_other_dimensions_and_strides():
    x = draw(4, 4)
    with pytest.raises(ValueError, match=r"^l2norm_fwd: dim \(0\) must be the last dimension of x"):
        l2norm_fwd(x, dim=0)
    with pytest.raises(ValueError, match=r"^l2norm_fwd: x.stride\(-1\) \(4\) must be 1"):
        l2norm_fwd(x.t())
    with pytest.raises(ValueError, match=r"^l2norm_bwd: dy.stride\(-1\) \(4\) must be 1"):
        l2norm_bwd(x, x[:, 0], x.t())
    assert l2norm_fwd(x, dim=1)[0].shape == x.shape


@indices
@offsets
def test_pack_and_unpack(offsets, index):
    lengths = np.diff(offsets)
    longest = int(max(lengths, default=0))
    x = draw(len(lengths), longest + 3, 2, 3)
    packed = pack(x, on_device(offsets, index))
    assert packed.shape == (1, offsets[-1], 2, 3)
    for i, (begin, end) in enumerate(zip(offsets, offsets[1:])):
        assert torch.equal(packed[0, begin:end], x[i, :end - begin])
    behind = torch.cat([packed, torch.full((1, 4, 2, 3), torch.nan, device=x.device)], 1)  # tokens after the last offset
    back = unpack(behind, on_device(offsets, index))
    assert back.shape == (len(lengths), longest, 2, 3)
    for i, length in enumerate(lengths):
        assert torch.equal(back[i, :length], x[i, :length]) and not back[i, length:].any()


def test_pack_is_differentiable():
    x = draw(2, 4).requires_grad_()
    (dx,) = torch.autograd.grad(pack(x, on_device([0, 3, 4])).sum(), x)
    assert dx.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("call, message", [
    (lambda cu: pack(draw(2, 4), cu([0, 5, 6])), r"^pack: the longest sequence of cu_seqlens \(5\) must not be above x.shape\[1\] \(4\)"),
    (lambda cu: pack(draw(1, 4), cu([0, 2, 4])), r"^pack: cu_seqlens.shape\[0\] \(3\) must be x.shape\[0\] \+ 1 \(2\)"),
    (lambda cu: pack(draw(2, 4), cu([0, 3, 2])), r"^pack: cu_seqlens \(\[0, 3, 2\]\) must begin with 0"),
    (lambda cu: pack(draw(2, 4), cu([[0, 3]])), r"^pack: cu_seqlens.shape \(1, 2\) must be"),
    (lambda cu: unpack(draw(1, 4), cu([0, 5])), r"^unpack: the last of cu_seqlens \(5\) must not be above x.shape\[1\] \(4\)"),
    (lambda cu: unpack(draw(2, 4), cu([0, 4])), r"^unpack: x.shape\[0\] \(2\) must be 1"),
    (lambda cu: unpack(draw(1, 4), cu([1, 4])), r"^unpack: cu_seqlens \(\[1, 4\]\) must begin with 0"),
], ids=range(7))
def test_offsets_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(on_device)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_pad_and_reshape(size, dim):
    shape = [2, 3, 5]
    shape[dim] = size
    x = draw(*shape)
    y = pad_and_reshape(x, dim)
    axis = dim % 3
    chunks = math.ceil(size / 64)
    assert y.shape == (*shape[:axis], chunks, 64, *shape[axis + 1:])
    flat = y.flatten(axis, axis + 1).movedim(axis, 0)
    assert torch.equal(flat[:size], x.movedim(axis, 0)) and not flat[size:].any()
    assert pad_and_reshape(x, dim, chunk_size=5).shape[axis:axis + 2] == (math.ceil(size / 5), 5)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("tokens", [128, 70, 1, [70, 0, 130, 64], [5]], ids=str)
def test_fill_last_chunk_of_g(tokens, reverse):
    lengths = [tokens] * 3 if isinstance(tokens, int) else tokens
    g = draw(len(lengths), -(-max(lengths) // 64), 64, 2)
    want = g.tolist()
    for row, length in zip(want, lengths):
        last, valid = length // 64, length % 64
        if valid and reverse:
            row[last][valid - 1] = [np.float32(a) + np.float32(b) for a, b in zip(row[last][valid - 1], row[last][63])]
        elif valid:
            row[last][valid:] = [row[last][valid - 1]] * (64 - valid)
    cu_seqlens = None if isinstance(tokens, int) else on_device(np.cumsum([0, *lengths]).tolist())
    result = fill_last_chunk_of_g(g, max(lengths), cu_seqlens, reverse=reverse)
    assert result is g
    assert torch.equal(g, torch.tensor(want, device=g.device))


@indices
@offsets
@pytest.mark.parametrize("size", [1, 16, 64])
def test_chunk_tables(size, offsets, index):
    counts = [math.ceil(length / size) for length in np.diff(offsets)]
    cu_seqlens = on_device(offsets, index)
    found = prepare_chunk_indices(cu_seqlens, size)
    assert (found.dtype, found.device) == (index, cu_seqlens.device)
    assert found.tolist() == [[i, j] for i, count in enumerate(counts) for j in range(count)] and found.shape == (sum(counts), 2)
    first, total = prepare_chunk_offsets(cu_seqlens, size)
    assert (first.dtype, first.tolist(), total) == (index, np.cumsum([0, *counts]).tolist(), sum(counts)) and type(total) is int


def test_varlen_metadata_is_the_offsets_themselves():
    from flash_qla.utils.index import prepare_varlen_metadata

    cu_seqlens = on_device([0, 3])
    assert prepare_varlen_metadata(cu_seqlens, cu_seqlens.cpu()) is cu_seqlens


def counted():
    calls = []

    @tensor_cache
    def twice(x, size=1):
        """Doubles."""
        calls.append(size)
        return x * 2

    return twice, calls


def test_tensor_cache_tells_tensors_by_identity_and_numbers_by_value():
    twice, calls = counted()
    assert (twice.__name__, twice.__doc__) == ("twice", "Doubles.")
    x = draw(3)
    assert twice(x, 1000) is twice(x, int("1000")) and len(calls) == 1
    assert twice(x.clone(), 1000) is not twice(x, 1000) and len(calls) == 2
    assert twice(x, 1000.0) is not twice(x, 1000) and len(calls) == 3, "a number of another type is another one"
    assert twice(x, size=1000) is twice(x, size=1000) and len(calls) == 4, "a name is not a position"
    assert twice(x) is twice(x)


def test_tensor_cache_keeps_the_last_four():
    twice, calls = counted()
    x = draw(3)
    for size in (1, 2, 3, 4):
        twice(x, size)
    assert len(calls) == 4
    twice(x, 1)  # used last: 2 is the oldest now
    assert len(calls) == 4
    twice(x, 5)
    for size in (5, 1, 4, 3):
        twice(x, size)
    assert len(calls) == 5
    twice(x, 2)
    assert calls == [1, 2, 3, 4, 5, 2]


def test_tensor_cache_under_capture(monkeypatch):
    twice, calls = counted()
    x = draw(3)
    kept = twice(x, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert twice(x, 1) is kept
    with pytest.raises(AssertionError, match="^twice: arguments must be those of an earlier call"):
        twice(x, 2)
    capturing[0] = False
    for size in range(10, 20):
        twice(x, size)
    assert twice(x, 1) is kept, "what a graph has used is never dropped"
    assert 2 not in calls and calls.count(1) == 1


def test_input_guard():
    @input_guard
    def seen(*args, **kwargs):
        """Passes on."""
        return args, kwargs

    x, y = draw(4, 6).t(), draw(2, 3)[:, ::2]
    args, kwargs = seen(x, 3, [x], name=y, other="text")
    assert seen.__doc__ == "Passes on."
    assert args[0].is_contiguous() and torch.equal(args[0], x) and args[1] == 3 and args[2][0] is x
    assert kwargs["name"].is_contiguous() and torch.equal(kwargs["name"], y) and kwargs["other"] == "text"
    assert seen() == ((), {})


@pytest.mark.cuda
def test_input_guard_enters_the_device_of_the_first_tensor():
    last = torch.cuda.device_count() - 1
    assert input_guard(lambda *x, **y: torch.cuda.current_device())(1, torch.zeros(1, device=f"cuda:{last}")) == last


@floats
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("size", [16, 64])
@pytest.mark.parametrize("offsets", [None, *OFFSETS[:-1]], ids=str)
def test_chunk_local_cumsum(offsets, size, reverse, dtype):
    B, behind = (2, 0) if offsets is None else (1, 7)
    T = 150 if offsets is None else offsets[-1] + behind
    g = draw(B, T, 3, dtype=dtype)
    if behind:
        g[:, T - behind:] = torch.nan
    exact, want = helpers.to_numpy(g), np.zeros((B, T, 3))
    for begin, end in zip(offsets or [0], (offsets or [0, T])[1:]):
        for start in range(begin, end, size):
            part = exact[:, start:min(start + size, end)]
            sums = part[:, ::-1].cumsum(1)[:, ::-1] if reverse else part.cumsum(1)
            want[:, start:min(start + size, end)] = sums
    for zero in (False, True):
        got = chunk_local_cumsum(g, size, None if offsets is None else on_device(offsets), reverse, zero_last_chunk=zero)
        assert (got.shape, got.dtype) == (g.shape, dtype)
        limit = ROUNDING[dtype] * np.abs(want) + 64 * ROUNDING[torch.float64 if dtype == torch.float64 else torch.float32] * 8 + 1e-12
        assert (np.abs(helpers.to_numpy(got) - want) <= limit).all()


def test_chunk_local_cumsum_does_not_clamp_and_keeps_sequences_apart():
    g = torch.zeros(1, 130, 1, device=helpers.settings.device)
    g[0, 3], g[0, 100] = -1e4, torch.inf
    sums = chunk_local_cumsum(g, cu_seqlens=on_device([0, 10, 130]))
    assert sums[0, 9, 0] == -1e4 and not sums[0, 10:74].any() and sums[0, 100:].isinf().all() and sums[0, :10].isfinite().all()


def test_refused_shapes():
    with pytest.raises(ValueError, match=r"^chunk_local_cumsum: g.shape \(2, 3\) must be \[B, T, H\]"):
        chunk_local_cumsum(draw(2, 3))
    with pytest.raises(ValueError, match=r"^chunk_local_cumsum: g.shape\[0\] \(2\) must be 1 with cu_seqlens"):
        chunk_local_cumsum(draw(2, 3, 1), cu_seqlens=on_device([0, 3]))
    with pytest.raises(ValueError, match=r"^group_reduce_vector: buffer.shape\[2\] \(6\) must be a multiple of Hg \(4\)"):
        group_reduce_vector(draw(1, 2, 6, 3), 4)


@floats
@pytest.mark.parametrize("Hg", [1, 2, 6])
def test_group_reduce_vector(Hg, dtype):
    x = draw(2, 5, 6, 8, dtype=dtype)
    exact = helpers.to_numpy(x)
    want = np.stack([sum(exact[:, :, i * (6 // Hg) + j] for j in range(6 // Hg)) for i in range(Hg)], 2)
    got = group_reduce_vector(x, Hg)
    assert (got.shape, got.dtype) == ((2, 5, Hg, 8), dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    np.testing.assert_allclose(helpers.to_numpy(got), want, rtol=ROUNDING[dtype], atol=6 * 6 * ROUNDING[wide])
