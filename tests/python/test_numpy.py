"""The low-level and serving calls on numpy arrays, also in a process that has no torch at all."""

import helpers
import numpy as np
import oracle
import pytest

import flash_qla

pytestmark = pytest.mark.cpu_only


def draw(B=2, T=70, Hq=1, Hv=2, K=16, V=8, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((B, T, Hq, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    arrays = dict(q=rng.standard_normal((B, T, Hq, K)) / K**0.5, k=k, v=rng.standard_normal((B, T, Hv, V)),
                  g=-rng.random((B, T, Hv)) / 16, beta=rng.random((B, T, Hv)))
    return {name: a.astype(dtype) for name, a in arrays.items()}


def close(name, got, want, bound=5e-5):
    assert isinstance(got, np.ndarray), type(got)
    helpers.assert_close(name, got, want, bound, helpers.TENSORS[name][1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_low_level_pair(dtype):
    x = draw(dtype=dtype)
    rng = np.random.default_rng(1)
    h0 = rng.standard_normal((2, 2, 16, 8)).astype(dtype)
    g, A, o, h, final_state = flash_qla.chunk_gated_delta_rule_fwd(**x, initial_state=h0, output_h=True)
    assert o.dtype == dtype and h.shape == (2, 2, 2, 16, 8) and A.shape == (2, 70, 2, 64)
    do, dht = rng.standard_normal(o.shape).astype(dtype), rng.standard_normal(h0.shape).astype(dtype)
    gradients = flash_qla.chunk_gated_delta_rule_bwd(x["q"], x["k"], x["v"], g, x["beta"], A, do, dht=dht, initial_state=h0)
    want_o, want_final, _ = oracle.forward(**x, initial_state=h0)
    close("o", o, want_o)
    close("final_state", final_state, want_final)
    want = oracle.backward(**x, initial_state=h0, do=do, dht=dht)
    for name, value in zip(("dq", "dk", "dv", "dbeta", "dg", "dh0"), gradients):
        close(name, value, want[name])


def test_chunk_call_and_recurrent_call():
    x = draw()
    want_o, want_final, _ = oracle.forward(**x)
    for function in (flash_qla.chunk_gated_delta_rule, flash_qla.fused_recurrent_gated_delta_rule):
        o, final_state = function(**x, output_final_state=True)
        close("o", o, want_o)
        close("final_state", final_state, want_final)
        assert function(**x)[1] is None


def test_serving_calls_write_in_place():
    x = draw(B=1, T=130)
    pool = np.random.default_rng(2).standard_normal((4, 2, 8, 16)).astype(np.float32)
    before, out = pool.copy(), np.full((1, 130, 2, 8), np.nan, np.float32)
    cu, slots = np.array([0, 60, 130], np.int32), np.array([2, 0], np.int64)
    o = flash_qla.gated_delta_rule_prefill(**x, state_pool=pool, initial_state_indices=slots, cu_seqlens=cu, out=out)
    assert o is out
    want_o, want_pool, _ = oracle.pooled(**x, pool=before, initial_indices=slots, cu_seqlens=cu, options=oracle.Options(state_v_first=True))
    close("o", out, want_o)
    close("pool", pool, want_pool)
    y, before = draw(B=2, T=1, seed=3), pool.copy()
    o = flash_qla.gated_delta_rule_decode(**y, state_pool=pool, initial_state_indices=slots)
    want_o, want_pool, _ = oracle.pooled(**y, pool=before, initial_indices=slots, options=oracle.Options(state_v_first=True))
    close("o", o, want_o)
    close("pool", pool, want_pool)


def test_strided_and_read_only_arrays():
    x = draw(B=1)
    wide = np.full((1, 70, 1, 32), np.nan, np.float32)
    wide[..., ::2] = x["q"]
    strided = x | dict(q=wide[..., ::2], v=np.asfortranarray(x["v"]))
    for array in strided.values():
        array.flags.writeable = False
    o, _ = flash_qla.chunk_gated_delta_rule(**strided)
    np.testing.assert_array_equal(o, flash_qla.chunk_gated_delta_rule(**x)[0])


def test_negative_strides():
    x = draw(B=1)
    reversed_in_time = {name: array[:, ::-1] for name, array in x.items()}
    o, final_state = flash_qla.chunk_gated_delta_rule(**reversed_in_time, output_final_state=True)
    copied = {name: array.copy() for name, array in reversed_in_time.items()}
    want_o, want_final = flash_qla.chunk_gated_delta_rule(**copied, output_final_state=True)
    np.testing.assert_array_equal(o, want_o)
    np.testing.assert_array_equal(final_state, want_final)


@pytest.mark.parametrize("name", ["state_pool", "out", "checkpoints"])
def test_read_only_outputs_are_refused(name):
    x = draw(B=1, T=130)
    written = dict(state_pool=np.ones((2, 2, 8, 16), np.float32), out=np.ones((1, 130, 2, 8), np.float32),
                   checkpoints=np.ones((2, 2, 8, 16), np.float32))
    written[name].flags.writeable = False
    with pytest.raises(ValueError, match=rf"^gated_delta_rule_prefill: {name} \(a read-only array\)"):
        flash_qla.gated_delta_rule_prefill(**x, **written, initial_state_indices=np.array([1]), cu_seqlens=np.array([0, 130]),
                                           checkpoint_every=64, checkpoint_cu_starts=np.array([0, 2]))
    assert all((array == 1).all() for array in written.values())


class Immutable:
    """An array as JAX has them: DLPack hands out its memory, and nothing says that it must not be written."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class ReadOnly(Immutable):
    """An array of another package that says so itself."""

    def __dlpack__(self, **options):
        raise BufferError("read-only")


Immutable.__module__ = "jaxlib._jax"


@pytest.mark.parametrize("kind,words", [(Immutable, "an immutable Immutable"), (ReadOnly, "a read-only array")])
@pytest.mark.parametrize("name", ["state_pool", "out", "checkpoints"])
def test_immutable_outputs_are_refused(name, kind, words):
    x = draw(B=1, T=130)
    arrays = dict(state_pool=np.ones((2, 2, 8, 16), np.float32), out=np.ones((1, 130, 2, 8), np.float32),
                  checkpoints=np.ones((2, 2, 8, 16), np.float32))
    written = arrays | {name: kind(arrays[name])}
    arguments = dict(initial_state_indices=np.array([1]), cu_seqlens=np.array([0, 130]), checkpoint_every=64,
                     checkpoint_cu_starts=np.array([0, 2]))
    with pytest.raises(ValueError, match=rf"^gated_delta_rule_prefill: {name} \({words}\) must be writeable"):
        flash_qla.gated_delta_rule_prefill(**x, **written, **arguments)
    assert all((array == 1).all() for array in arrays.values())
    flash_qla.gated_delta_rule_prefill(**x, **arrays, **arguments)
    assert not any((array == 1).all() for array in arrays.values())


def test_jax_arrays_are_read_and_not_written():
    jnp = pytest.importorskip("jax.numpy")
    x = draw()
    plain, state = flash_qla.chunk_gated_delta_rule(**x, output_final_state=True)
    inputs = {name: jnp.asarray(array) for name, array in x.items()}
    o, final_state = flash_qla.chunk_gated_delta_rule(**inputs, output_final_state=True)
    assert type(o) is type(inputs["q"])
    np.testing.assert_array_equal(np.asarray(o), plain)
    np.testing.assert_array_equal(np.asarray(final_state), state)
    pool = jnp.zeros((4, 2, 8, 16))
    with pytest.raises(ValueError, match=r"^gated_delta_rule_prefill: state_pool \(an immutable ArrayImpl\)"):
        flash_qla.gated_delta_rule_prefill(**inputs, state_pool=pool, initial_state_indices=jnp.array([1, 2]), cu_seqlens=None)
    assert not pool.any()


def test_errors_have_the_same_form():
    x = draw()
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule_fwd: k.shape\[3\] \(15\) must be q.shape\[3\] \(16\)"):
        flash_qla.chunk_gated_delta_rule_fwd(**x | dict(k=x["k"][..., :15]))
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule_fwd: q.dtype \(int64\)"):
        flash_qla.chunk_gated_delta_rule_fwd(**x | dict(q=x["q"].astype(np.int64)))
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule_fwd: k \(list\)"):
        flash_qla.chunk_gated_delta_rule_fwd(**x | dict(k=[1.0]))
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule_fwd: "):
        flash_qla.chunk_gated_delta_rule_fwd(**x | dict(q=x["q"].astype(np.complex64)))
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule_fwd: cu_seqlens.dtype \(int16\) must be int32 or int64"):
        flash_qla.chunk_gated_delta_rule_fwd(**x, cu_seqlens=np.array([0, 70], np.int16))
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule_fwd: scale must not be NaN \(nan\)"):
        flash_qla.chunk_gated_delta_rule_fwd(**x, scale=np.nan)


@pytest.mark.parametrize("name", ["q", "v", "state_pool"])
def test_an_out_that_overlaps_is_refused(name):
    x = draw(B=2, T=1, K=16, V=16)
    pool = np.ones((4, 2, 16, 16), np.float32)
    buffer = np.concatenate([(x | dict(state_pool=pool))[name].ravel(), np.ones(2 * 2 * 16, np.float32)])
    shape = (x | dict(state_pool=pool))[name].shape
    arguments = x | dict(state_pool=pool) | {name: buffer[:-64].reshape(shape)}
    before = buffer.copy()
    with pytest.raises(ValueError, match=rf"^gated_delta_rule_decode: o must not share memory with {name} \(they overlap\)"):
        flash_qla.gated_delta_rule_decode(**arguments, initial_state_indices=np.array([1, 2]), out=buffer[-65:-1].reshape(2, 1, 2, 16))
    np.testing.assert_array_equal(buffer, before)
    flash_qla.gated_delta_rule_decode(**arguments, initial_state_indices=np.array([1, 2]), out=buffer[-64:].reshape(2, 1, 2, 16))


def test_mixing_torch_and_numpy_is_refused():
    import torch

    x = draw()
    with pytest.raises(TypeError, match=r"^chunk_gated_delta_rule: k \(ndarray\) must be a torch.Tensor"):
        flash_qla.chunk_gated_delta_rule(**x | dict(q=torch.from_numpy(x["q"])))


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # import torch now raises ImportError
import numpy as np
import oracle
import flash_qla
rng = np.random.default_rng(0)
q, k = (rng.standard_normal((1, 70, 2, 16)).astype(np.float32) for _ in range(2))
k /= np.linalg.norm(k, axis=-1, keepdims=True)
v, g, beta = rng.standard_normal((1, 70, 4, 8)).astype(np.float32), -rng.random((1, 70, 4)), rng.random((1, 70, 4))
g, beta = g.astype(np.float32), beta.astype(np.float32)
c, A, o, h, S = flash_qla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_h=True)
dq, dk, dv, db, dg, dh0 = flash_qla.chunk_gated_delta_rule_bwd(q, k, v, c, beta, A, np.ones_like(o))
want_o, want_S, _ = oracle.forward(q, k, v, g, beta)
want = oracle.backward(q, k, v, g, beta, do=np.ones_like(o))
for got, exact in ((o, want_o), (S, want_S), (dq, want["dq"]), (dk, want["dk"]), (dv, want["dv"]), (db, want["dbeta"]), (dg, want["dg"])):
    assert np.linalg.norm(got - exact) <= 5e-5 * np.linalg.norm(exact)
assert dh0 is None
pool = np.zeros((3, 4, 8, 16), np.float32)
flash_qla.gated_delta_rule_decode(q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1], pool, np.array([1]))
assert pool[1].any() and not pool[0].any()
assert flash_qla.workspace_size("gated_delta_rule_prefill", 64, 1, 2, 4, 16, 8, device="cpu") >= 0
assert "path: " in flash_qla.explain(q, k, v, g, beta)
assert flash_qla.build_info()["version"]
try:
    flash_qla.chunk_gated_delta_rule([1.0], k, v, g, beta)
except TypeError as error:
    assert "q (list)" in str(error), error
else:
    raise AssertionError("a list was taken for an array")
print("done without torch")
"""


def test_without_torch():
    done = helpers.in_subprocess(WITHOUT_TORCH)
    assert done.returncode == 0 and "done without torch" in done.stdout, done.stderr[-3000:]
