"""The library's own oracles (paths "reference" and "cuda_reference", C++) and the numpy oracle were written apart: they agree
to 1e-12 in fp64, and on a GPU, where tensors are float32 at most, to that dtype's rounding."""

import helpers
import pytest
import torch
from helpers import make_inputs

import flash_qla

AGREEMENT = 1e-12
# Results are stored in float32, half an ulp off; inputs are exact.
AGREEMENT_ON_CUDA = 2.0**-24

CASES = {
    "plain": dict(B=2, T=130, Hq=2, Hv=4, K=16, V=24),
    "varlen": dict(seqlens=[0, 65, 1, 0, 130], padding=3, Hq=1, Hv=3, K=33, V=17),
    "v_first": dict(T=70, Hq=2, K=24, V=16, state_v_first=True),
    "raw": dict(T=100, Hq=2, Hv=4, K=32, V=32, raw=True),
    "negative": dict(T=100, Hq=1, Hv=2, K=32, V=16, raw=True, allow_neg_eigval=True),
    "head": dict(T=100, Hq=1, Hv=1, K=128, V=128),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", CASES)
def test_the_two_oracles_agree(name):
    x = make_inputs(dtype=torch.float64, **CASES[name])
    want = helpers.reference(x)
    with flash_qla.use_path("reference"):
        got = helpers.run(x)
    helpers.compare(got, want, x.dtype, bounds={tensor: AGREEMENT for tensor in want})


@pytest.mark.parametrize("case", [
    dict(T=300, Hq=2, Hv=4), dict(seqlens=[65, 0, 300], padding=3, Hq=2, Hv=4), dict(B=2, T=130, Hq=1, Hv=2, state=False),
    dict(T=200, Hq=1, Hv=2, state_v_first=True)], ids=str)
@pytest.mark.parametrize("dtype", helpers.with_cuda([torch.bfloat16], [torch.float16]), ids=helpers.dtype_name)
def test_what_long_cases_are_compared_with_is_numpys_oracle(case, dtype, device):
    x = make_inputs(**case, dtype=dtype)
    bound = AGREEMENT if device == "cpu" else AGREEMENT_ON_CUDA
    want = helpers.reference(x)
    helpers.compare(helpers.library_reference(x), want, torch.float64, bounds=dict.fromkeys(want, bound))
