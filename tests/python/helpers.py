"""Inputs, the metric and its bounds, and one call that compares everything with the oracle.

The metric: positions of NaN and infinity first, then the relative L2 error of each tensor as a whole and of each head.
The bounds are those of docs/numerics.md and nobody's to widen: a test that cannot keep them is wrong or has found a bug.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import oracle
import torch

import flash_qla

settings = SimpleNamespace(device="cpu", path="auto")

# Relative L2 against fp64, by input dtype; what a name is compared with is in TENSORS.
LOW_PRECISION = {"state": 5e-3, "grad": 8e-3, "gate_grad": 1.5e-2}
BOUNDS = {
    torch.bfloat16: LOW_PRECISION,
    torch.float16: LOW_PRECISION,
    torch.float32: dict.fromkeys(LOW_PRECISION, 1e-5),
    # Both sides compute in fp64, in another order.
    torch.float64: dict.fromkeys(LOW_PRECISION, 1e-11),
}
# The low-level pair's interface carries a float32 cumsum, which alone costs this much.
LOW_LEVEL_FLOAT32 = 5e-5
# name: (kind of bound, axis of the heads)
TENSORS = {
    "o": ("state", 2), "final_state": ("state", 1), "h": ("state", 1), "checkpoints": ("state", 1), "pool": ("state", 1),
    "dq": ("grad", 2), "dk": ("grad", 2), "dv": ("grad", 2), "dh0": ("grad", 1),
    "dg": ("gate_grad", 2), "dbeta": ("gate_grad", 2), "dA_log": ("gate_grad", None), "ddt_bias": ("gate_grad", None),
}
# A reference smaller than this a value (root mean square) is compared absolutely, at this.
ABSOLUTE = 1e-6

LOW = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
DEVICE_DTYPES = {"cpu": [*FLOATS, torch.float64], "cuda": FLOATS}


def with_cuda(cases, more):
    """The cases of a parametrisation: `more` are there to reach paths that a GPU alone has."""
    return [*cases, *more] if settings.device == "cuda" else list(cases)


def dtypes():
    """The dtypes of the tests' cases: on a GPU fp16 has kernels of its own."""
    return with_cuda([torch.float32, torch.bfloat16], [torch.float16])


def dtype_name(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


@contextlib.contextmanager
def use_path(name):
    """All library calls inside take the named path ("auto": the library's choice)."""
    with flash_qla.use_path(None if name == "auto" else name):
        yield


def to_numpy(x):
    """float64 numpy of a tensor, exactly."""
    return None if x is None else x.detach().to("cpu", torch.float64).numpy()


def relative_error(got, want):
    """||got - want|| / ||want||, and an absolute comparison in its place where the reference is next to nothing."""
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    norm = torch.linalg.vector_norm(want).item()
    floor = ABSOLUTE * want.numel() ** 0.5
    error = torch.linalg.vector_norm(got - want).item()
    return (error / floor, True) if norm < floor else (error / norm, False)


# Of the error that storing alone makes. Where that is more than a bound, nothing can keep the bound: fp16 numbers below
# 6e-5 have fewer and fewer bits. The factor is the room for computing (docs/numerics.md).
STORED = 1.2


def assert_close(name, got, want, bound, head_axis=None, where=""):
    """Compares a tensor with its fp64 reference: NaN and infinity positions, then the whole, then head by head.

    Where the reference is a tensor it is compared on its own device.
    """
    dtype = got.dtype if isinstance(got, torch.Tensor) else torch.float64
    want = torch.as_tensor(want).detach().double()
    got = torch.as_tensor(got).detach().to(want.device, torch.float64)
    assert got.shape == want.shape, f"{where}{name}: shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    if want.numel() == 0:
        return 0.0
    for kind, test in (("NaN", torch.isnan), ("+inf", torch.isposinf), ("-inf", torch.isneginf)):
        differing = (test(got) != test(want)).nonzero().tolist()
        if differing:
            first = tuple(differing[0])
            raise AssertionError(
                f"{where}{name}: {kind} at other places than the reference in {len(differing)} of {want.numel()} values, "
                f"first at {first}: {got[first].item()} for {want[first].item()}")
    finite = want.isfinite()
    got, want = got.where(finite, 0.0), want.where(finite, 0.0)
    parts = [("", got, want)]
    if head_axis is not None and want.shape[head_axis] > 1:
        parts += [(f" head {i}", a, b) for i, (a, b) in enumerate(zip(got.unbind(head_axis), want.unbind(head_axis)))]
    worst = 0.0
    for part, a, b in parts:
        error, absolute = relative_error(a, b)
        limit = 1.0 if absolute else bound
        if error > limit and not absolute:
            limit = max(limit, STORED * relative_error(b.to(dtype).double(), b)[0])
        worst = max(worst, error / limit * bound)
        assert error <= limit, (
            f"{where}{name}{part}: error {error * ABSOLUTE if absolute else error:.3e} ({'absolute' if absolute else 'relative L2'}) "
            f"exceeds {ABSOLUTE if absolute else limit:.1e}")
    return worst


def bound_for(name, dtype):
    return BOUNDS[dtype][TENSORS[name][0]]


def assert_sums_close(name, got, want, terms, bound, where=""):
    """Compares sums over all tokens, one number a head: relative to the norm of their terms.

    The relative error of one number measures how much its terms happen to cancel, which no arithmetic can help.
    """
    got = to_numpy(got)
    assert got.shape == want.shape and np.isfinite(got).all(), f"{where}{name}: {got}"
    limits = bound * np.maximum(np.abs(want), terms) + ABSOLUTE
    worst = int(np.argmax(np.abs(got - want) / limits))
    assert abs(got[worst] - want[worst]) <= limits[worst], (
        f"{where}{name} head {worst}: error {abs(got[worst] - want[worst]):.3e} exceeds {bound:.1e} of {limits[worst] / bound:.3e}")
    return float(np.max(np.abs(got - want) / limits) * bound)


def compare(got, want, dtype, only=None, bounds=None, where=""):
    """Compares dictionaries of tensors by name. `want` decides what is compared. Returns the errors."""
    errors = {}
    for name, reference in want.items():
        if only is not None and name not in only or reference is None or name.endswith("_terms"):
            continue
        assert got.get(name) is not None, f"{where}{name} is missing"
        bound = bound_for(name, dtype) if bounds is None else bounds[name]
        if f"{name}_terms" in want:
            errors[name] = assert_sums_close(name, got[name], reference, want[f"{name}_terms"], bound, where)
            continue
        errors[name] = assert_close(name, got[name], reference, bound, TENSORS[name][1], where)
    return errors


def assert_bitwise(name, a, b):
    """Same bits: NaN payloads and the sign of zero count."""
    assert a.dtype == b.dtype and a.shape == b.shape, f"{name}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    differing = (a.contiguous().view(integer) != b.contiguous().view(integer)).sum().item()
    assert not differing, f"{name}: {differing} of {a.numel()} values differ in their bits"


class Guarded:
    """A tensor between two stretches of canaries."""

    WIDTH = 256
    CANARY = -12345.0

    def __init__(self, value):
        n = value.numel()
        self.buffer = torch.full((n + 2 * self.WIDTH,), self.CANARY, dtype=value.dtype, device=value.device)
        self.tensor = self.buffer[self.WIDTH:self.WIDTH + n].view(value.shape)
        self.tensor.copy_(value)

    def intact(self):
        canary = torch.tensor(self.CANARY, dtype=self.buffer.dtype).item()
        return bool((self.buffer[:self.WIDTH] == canary).all() and (self.buffer[-self.WIDTH:] == canary).all())


@dataclasses.dataclass
class Inputs:
    """The tensors of one call, its options by keyword, and the gradients that come in."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor | None
    beta: torch.Tensor | None
    initial_state: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    do: torch.Tensor | None = None
    dht: torch.Tensor | None = None
    options: dict = dataclasses.field(default_factory=dict)

    DIFFERENTIABLE = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")

    @property
    def dtype(self):
        return self.q.dtype

    @property
    def num_sequences(self):
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.numel() - 1

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def with_options(self, **changes):
        return dataclasses.replace(self, options={**self.options, **changes})


def offsets(lengths, dtype=torch.int64, device=None):
    """cu_seqlens of sequences of these lengths."""
    return torch.tensor(np.concatenate([[0], np.cumsum(lengths)]), dtype=dtype, device=device or settings.device)


def make_inputs(B=1, T=64, Hq=2, Hv=None, K=128, V=None, dtype=torch.float32, *, seqlens=None, padding=0, state=True,
                grads=True, gate_dtype=None, beta_dtype=None, state_dtype=torch.float32, index_dtype=torch.int64,
                raw=False, normalise=True, seed=0, device=None, drawn_on="cpu", **options):
    """What a model feeds: unit keys and queries, log decays of which a quarter of the heads has none, beta in (0, 1).

    seqlens packs sequences into B = 1 with `padding` tokens after the last. raw: inputs of the in-kernel activations
    (unnormalised q and k, raw gate with A_log and dt_bias, beta before its sigmoid), with their options set.
    drawn_on: the device that draws them; the values depend on it. Hundreds of millions take the host most of a minute.
    """
    generator = torch.Generator(drawn_on).manual_seed(seed)
    Hv, V = Hv or Hq, V or K
    if seqlens is not None:
        B, T = 1, int(sum(seqlens)) + padding
    N = B if seqlens is None else len(seqlens)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    device = device or settings.device

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=drawn_on)

    q, k, v = randn(B, T, Hq, K), randn(B, T, Hq, K), randn(B, T, Hv, V)
    if normalise and not raw:
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    if raw:
        g, beta = randn(B, T, Hv), randn(B, T, Hv)
        A_log, dt_bias = torch.rand(Hv, generator=generator, dtype=torch.float64, device=drawn_on) * 2 - 2, randn(Hv)
        options = dict(use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True) | options
    else:
        g = torch.nn.functional.logsigmoid(randn(B, T, Hv)) / 16
        g[..., : max(1, Hv // 4)] = 0  # nothing decays there: errors cannot hide
        beta, A_log, dt_bias = randn(B, T, Hv).sigmoid(), None, None
    h_shape = (N, Hv, V, K) if options.get("state_v_first") else (N, Hv, K, V)
    h0 = randn(*h_shape) if state or grads else None
    dht, do = (randn(*h_shape), randn(B, T, Hv, V)) if grads else (None, None)

    def cast(x, to):
        return None if x is None else x.to(device=device, dtype=to)

    return Inputs(
        q=cast(q, dtype), k=cast(k, dtype), v=cast(v, dtype), g=cast(g, gate_dtype or wide),
        beta=cast(beta, beta_dtype or wide),
        initial_state=cast(h0, torch.float64 if dtype == torch.float64 else state_dtype) if state else None,
        cu_seqlens=None if seqlens is None else offsets(seqlens, index_dtype, device),
        A_log=cast(A_log, wide), dt_bias=cast(dt_bias, wide), do=cast(do, dtype), dht=cast(dht, wide), options=options)


ORACLE_OPTIONS = [f.name for f in dataclasses.fields(oracle.Options) if f.name != "round_normalised"]


def oracle_options(dtype, options):
    """The oracle's options for a call: the contract rounds in-kernel normalised q and k to the input dtype."""
    chosen = oracle.Options(**{name: options[name] for name in ORACLE_OPTIONS if name in options})
    if dtype in LOW:
        chosen.round_normalised = lambda x: torch.from_numpy(x).to(dtype).double().numpy()
    return chosen


def reference(x: Inputs, grads=True):
    """o, final_state and, with grads, every gradient, from the oracle."""
    tensors = {name: to_numpy(getattr(x, name)) for name in (*Inputs.DIFFERENTIABLE, "do", "dht")}
    do, dht = tensors.pop("do"), tensors.pop("dht")
    common = dict(tensors, cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.cpu().numpy(),
                  options=oracle_options(x.dtype, x.options))
    with np.errstate(invalid="ignore", over="ignore"):
        o, final_state, _ = oracle.forward(**common)
        result = {"o": o, "final_state": final_state}
        if grads:
            result.update(oracle.backward(**common, do=do, dht=dht))
    if x.g is None:
        result.pop("dg", None)
    if x.beta is None:
        result.pop("dbeta", None)
    if x.initial_state is None:
        result.pop("dh0", None)
    if x.dt_bias is None:
        result.pop("ddt_bias", None)
        result.pop("ddt_bias_terms", None)
    return result


def fp64_path(x: Inputs):
    """The path that computes the token recurrence in fp64 on the device of x."""
    return "cuda_reference" if x.q.is_cuda else "reference"


def library_reference(x: Inputs, grads=True):
    """As reference(), by the library's own token recurrence in fp64 on the device of x, as float64 tensors there.

    For sizes that take numpy a minute; test_two_oracles.py holds it to numpy. In-kernel l2norm and gate are left out: their
    roundings and sums are for reference() to know.
    """
    assert not any(x.options.get(name) for name in ("use_qk_l2norm_in_kernel", "use_gate_in_kernel"))
    # A GPU takes and gives float32 at most, which holds all 16-bit values, and a reference to 6e-8.
    wide = torch.float32 if x.q.is_cuda else torch.float64
    names = [name for name in (*Inputs.DIFFERENTIABLE, "do", "dht") if getattr(x, name) is not None]
    with use_path(fp64_path(x)):
        found = run(x.replace(**{name: getattr(x, name).detach().to(wide) for name in names}), grads)
    return {name: value.double() for name, value in found.items()}


GRADIENT_NAMES = dict(q="dq", k="dk", v="dv", g="dg", beta="dbeta", initial_state="dh0", A_log="dA_log", dt_bias="ddt_bias")


def call(x: Inputs, **overrides):
    """flash_qla.chunk_gated_delta_rule on the inputs: (o, final_state)."""
    arguments = dict(initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens, A_log=x.A_log,
                     dt_bias=x.dt_bias) | x.options | overrides
    return flash_qla.chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, **arguments)


def run(x: Inputs, grads=True, function=call, **overrides):
    """o, final_state and every gradient through autograd, by name."""
    if not grads:
        with torch.no_grad():
            o, final_state = function(x, **overrides)
        return {"o": o, "final_state": final_state}
    leaves = {name: getattr(x, name).detach().requires_grad_() for name in Inputs.DIFFERENTIABLE if getattr(x, name) is not None}
    o, final_state = function(x.replace(**leaves), **overrides)
    outputs, incoming = [], []
    for output, gradient in ((o, x.do), (final_state, x.dht)):
        if gradient is not None:
            outputs.append(output)
            incoming.append(gradient)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), incoming, allow_unused=True)
    result = {"o": o.detach(), "final_state": final_state.detach()}
    for name, gradient in zip(leaves, gradients):
        assert gradient is not None, f"no gradient of {name}"
        assert gradient.dtype == leaves[name].dtype, f"gradient of {name} is {gradient.dtype}, the input {leaves[name].dtype}"
        assert gradient.shape == leaves[name].shape
        result[GRADIENT_NAMES[name]] = gradient
    return result


def check(x: Inputs, grads=True, only=None, bounds=None, oracle=reference, **overrides):
    """Runs the library and the oracle on the same inputs and compares everything. Returns (results, errors)."""
    got = run(x, grads, **overrides)
    assert got["o"].dtype == x.dtype
    assert got["final_state"].dtype == (torch.float64 if x.dtype == torch.float64 else torch.float32)
    return got, compare(got, oracle(x, grads), x.dtype, only, bounds)


def captured(step):
    """A graph of step(), and what it returns: the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Without a stream, PyTorch captures on the one that the process's first capture made, which may be another device's.
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    return graph, results


def in_subprocess(code, timeout=300, **environment):
    """Runs Python code in a fresh interpreter; returns the completed process, output captured as text."""
    env = {**os.environ, **environment}
    env["PYTHONPATH"] = os.pathsep.join([p for p in sys.path if p] + [env.get("PYTHONPATH", "")])
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout)
