"""The library's own oracle (path "reference", C++) and the numpy oracle were written apart: they agree to 1e-12 in fp64."""

import flash_qla
import helpers
import pytest
import torch
from helpers import make_inputs

pytestmark = pytest.mark.cpu_only

AGREEMENT = 1e-12

CASES = {
    "plain": dict(B=2, T=130, Hq=2, Hv=4, K=16, V=24),
    "varlen": dict(seqlens=[0, 65, 1, 0, 130], padding=3, Hq=1, Hv=3, K=33, V=17),
    "v_first": dict(T=70, Hq=2, K=24, V=16, state_v_first=True),
    "raw": dict(T=100, Hq=2, Hv=4, K=32, V=32, raw=True),
    "negative": dict(T=100, Hq=1, Hv=2, K=32, V=16, raw=True, allow_neg_eigval=True),
    "head": dict(T=100, Hq=1, Hv=1, K=128, V=128),
}


@pytest.mark.parametrize("name", CASES)
def test_the_two_oracles_agree(name):
    x = make_inputs(dtype=torch.float64, **CASES[name])
    want = helpers.reference(x)
    with flash_qla.use_path("reference"):
        got = helpers.run(x)
    helpers.compare(got, want, x.dtype, bounds={tensor: AGREEMENT for tensor in want})
