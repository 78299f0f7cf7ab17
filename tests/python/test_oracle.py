"""The oracle itself: its gradients against central differences, its states and pools against plain definitions.

Nothing here touches the library, so a failure is the oracle's own.
"""

import numpy as np
import oracle
import pytest

NAMES = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")
GRADIENTS = dict(q="dq", k="dk", v="dv", g="dg", beta="dbeta", initial_state="dh0", A_log="dA_log", dt_bias="ddt_bias")

CASES = {
    "plain": dict(options=oracle.Options()),
    "scale": dict(options=oracle.Options(scale=0.3)),
    "v_first": dict(options=oracle.Options(state_v_first=True)),
    "l2norm": dict(options=oracle.Options(use_qk_l2norm_in_kernel=True)),
    "sigmoid": dict(options=oracle.Options(use_beta_sigmoid_in_kernel=True)),
    "negative": dict(options=oracle.Options(use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True)),
    "gate": dict(options=oracle.Options(use_gate_in_kernel=True)),
    "varlen": dict(options=oracle.Options(), cu_seqlens=[0, 0, 3, 3, 10, 11]),
    "all": dict(cu_seqlens=[0, 4, 4, 11], options=oracle.Options(
        state_v_first=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True,
        use_gate_in_kernel=True)),
}


def draw(case, T=12, B=2, Hq=2, Hv=4, K=3, V=5, seed=0):
    rng = np.random.default_rng(seed)
    cu_seqlens = case.get("cu_seqlens")
    B = B if cu_seqlens is None else 1
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    o = case["options"]
    x = dict(q=rng.standard_normal((B, T, Hq, K)), k=0.5 * rng.standard_normal((B, T, Hq, K)),
             v=rng.standard_normal((B, T, Hv, V)), g=-rng.random((B, T, Hv)), beta=rng.random((B, T, Hv)),
             initial_state=rng.standard_normal((N, Hv, V, K) if o.state_v_first else (N, Hv, K, V)))
    if o.use_gate_in_kernel:
        x |= dict(A_log=rng.standard_normal(Hv), dt_bias=rng.standard_normal(Hv))
    return x, dict(cu_seqlens=cu_seqlens, options=o), rng


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_central_differences(name):
    x, fixed, rng = draw(CASES[name])
    o, final_state, _ = oracle.forward(**x, **fixed)
    do, dht = rng.standard_normal(o.shape), rng.standard_normal(final_state.shape)
    gradients = oracle.backward(**x, **fixed, do=do, dht=dht)

    def loss(**changed):
        o, final_state, _ = oracle.forward(**{**x, **changed}, **fixed)
        return (o * do).sum() + (final_state * dht).sum()

    step = 1e-5  # the truncation error h^2 and the rounding error 1e-16 / h are then both near 1e-10
    for argument in x:
        for _ in range(2):
            direction = rng.standard_normal(x[argument].shape)
            numeric = (loss(**{argument: x[argument] + step * direction}) - loss(**{argument: x[argument] - step * direction})) / (2 * step)
            exact = (gradients[GRADIENTS[argument]] * direction).sum()
            assert abs(numeric - exact) <= 1e-7 * max(1.0, abs(numeric)), (argument, numeric, exact)


def test_segments_do_not_change_gradients(monkeypatch):
    x, fixed, rng = draw(CASES["varlen"] | dict(cu_seqlens=[0, 150, 151, 300]), T=300)
    do = rng.standard_normal((1, 300, 4, 5))
    a = oracle.backward(**x, **fixed, do=do)
    monkeypatch.setattr(oracle, "SEGMENT", 7)
    b = oracle.backward(**x, **fixed, do=do)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-13)


def test_one_token_in_closed_form():
    x, fixed, _ = draw(CASES["plain"], T=1, B=1, Hq=1, Hv=1)
    q, k, v, S = x["q"][0, 0, 0], x["k"][0, 0, 0], x["v"][0, 0, 0], x["initial_state"][0, 0]
    decayed = np.exp(x["g"][0, 0, 0]) * S
    S1 = decayed + x["beta"][0, 0, 0] * np.outer(k, v - k @ decayed)
    o, final_state, _ = oracle.forward(**x, **fixed)
    np.testing.assert_allclose(final_state[0, 0], S1, rtol=1e-14)
    np.testing.assert_allclose(o[0, 0, 0], 3**-0.5 * (q @ S1), rtol=1e-13)


def test_orthonormal_keys_store_values_exactly():
    # With g = 0, beta = 1 and orthonormal keys the state is a dictionary: reading with key i gives value i.
    K, V = 8, 5
    rng = np.random.default_rng(0)
    keys = np.linalg.qr(rng.standard_normal((K, K)))[0][None, :, None, :]
    values = rng.standard_normal((1, K, 1, V))
    _, S, _ = oracle.forward(keys, keys, values, None, None)
    np.testing.assert_allclose(keys[0, :, 0] @ S[0, 0], values[0, :, 0], atol=1e-13)


def test_packed_equals_alone():
    x, fixed, _ = draw(CASES["varlen"])
    cu = fixed["cu_seqlens"]
    o, final_state, _ = oracle.forward(**x, **fixed)
    for n, (a, b) in enumerate(zip(cu[:-1], cu[1:])):
        alone = {name: x[name][:, a:b] for name in NAMES[:5]}
        o_n, final_n, _ = oracle.forward(**alone, initial_state=x["initial_state"][n:n + 1], options=fixed["options"])
        np.testing.assert_array_equal(o[:, a:b], o_n)
        np.testing.assert_array_equal(final_state[n], final_n[0])
    assert not o[:, cu[-1]:].any()


def test_snapshots_are_the_states_of_shorter_calls():
    x, fixed, _ = draw(CASES["plain"], B=1)
    _, _, taken = oracle.forward(**x, **fixed, snapshots=[(0, 0), (0, 5), (0, 12)])
    np.testing.assert_array_equal(taken[0], x["initial_state"][0])
    short = {name: x[name][:, :5] for name in NAMES[:5]}
    np.testing.assert_array_equal(taken[1], oracle.forward(**short, initial_state=x["initial_state"], **fixed)[1][0])
    np.testing.assert_array_equal(taken[2], oracle.forward(**x, **fixed)[1][0])


def test_pool_skips_and_drafts():
    x, fixed, _ = draw(CASES["plain"], B=3, T=2)
    pool = np.random.default_rng(1).standard_normal((6, 4, 3, 5))
    rest = {name: x[name] for name in NAMES[:5]}
    o, after, _ = oracle.pooled(**rest, pool=pool, initial_indices=[4, -1, 0], options=fixed["options"])
    assert not o[1].any()
    np.testing.assert_array_equal(np.flatnonzero((after != pool).any((1, 2, 3))), [0, 4])
    o2, after2, _ = oracle.pooled(**rest, pool=pool, initial_indices=[[1, 4], [2, 2], [0, 1]], num_accepted_tokens=[2, 1, 1],
                                  final_indices=[[2, 3], [-1, -1], [5, 9]], options=fixed["options"])
    np.testing.assert_array_equal(o2[0], o[0])
    np.testing.assert_array_equal(after2[3], after[4])
    np.testing.assert_array_equal(np.flatnonzero((after2 != pool).any((1, 2, 3))), [2, 3, 5])


def test_chunk_inverse_and_cumsum():
    x, fixed, _ = draw(CASES["plain"], B=1, T=70, Hv=4)
    A = oracle.chunk_inverse(x["k"], x["beta"])
    K = x["k"][0, :64, 0]
    M = np.eye(64) + np.tril(x["beta"][0, :64, 1][:, None] * (K @ K.T), -1)
    np.testing.assert_allclose(A[0, :64, 1] @ M, np.eye(64), atol=1e-11)
    assert not A[0, 64:, :, 6:].any()
    c = oracle.chunk_cumsum(x["g"])
    np.testing.assert_allclose(c[0, 63], x["g"][0, :64].sum(0), rtol=1e-13)
    np.testing.assert_allclose(c[0, 64], x["g"][0, 64], rtol=1e-13)
