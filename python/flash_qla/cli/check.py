"""`check`: forward and backward of many cases against the library's own fp64 oracle."""

from __future__ import annotations

import dataclasses
import itertools
import time
from typing import Any, Dict, List, Optional, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console

import flash_qla

from .errors import first_failure

HEAD_DIM = 128

# Tokens of one case that the CPU's serial oracle may take (32 heads of 128 x 128 cost it about 5 ms a token, both
# passes).
_CPU_TOKENS = 1024

ORACLES = {"cpu": "reference", "cuda": "cuda_reference"}

# Calls of so few tokens may miss the bound of dq with auto_cp=False (docs/numerics.md): by default they are computed in
# float32, but without a cut a sequence's bits must not depend on how many tokens its call has.
_FEW_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison. `lengths`: of the sequences; packed with cu_seqlens if `packed`, else one batch row each
    (equal)."""

    lengths: Sequence[int]
    packed: bool = False
    padding: int = 0  # tokens after the last sequence
    dtype: torch.dtype = torch.bfloat16
    state: bool = True  # initial state, and a gradient of the final one
    state_v_first: bool = False
    l2norm: bool = False
    activations: bool = False  # gate and sigmoid in the kernel
    group: int = 2  # value heads per key head

    def describe(self) -> str:
        lengths = [str(n) for n in self.lengths]
        shape = "+".join(lengths) if len(lengths) <= 6 else f"{len(lengths)} sequences, {sum(self.lengths)} tokens"
        words = [("packed " if self.packed else "dense ") + shape, str(self.dtype).rpartition(".")[2]]
        words += [f"padding {self.padding}"] if self.padding else []
        words += [f"group {self.group}"] if self.group != 1 else []
        flags = ("state", "state_v_first", "l2norm", "activations")
        return ", ".join(words + [flag for flag in flags if getattr(self, flag)])


def _develop(limit: int) -> List[Case]:
    """The lengths around a chunk's edges, with and without states, in every dtype."""
    cases = [Case([n]) for n in (1, 2, 15, 63, 64, 65, 127, 129, 500, limit)]
    cases += [
        Case([96, 96, 96], state=state, state_v_first=first) for state in (False, True) for first in (False, True)
    ]
    cases += [Case([200], dtype=dtype, group=group) for dtype in (torch.float16, torch.float32) for group in (1, 4)]
    cases += [Case([200], l2norm=True), Case([200], activations=True), Case([200], l2norm=True, activations=True)]
    return cases


def _varlen(limit: int) -> List[Case]:
    """Packed sequences: empty ones anywhere, padding after the last, every tail."""
    lengths = [
        [limit],
        [limit // 2, limit - limit // 2],
        [1, 63, 64, 65],
        [0, 100, 0, 0, 156, 0],
        [0, 0, 0],
        [15, 85, 200, 300, 300],
        [limit - 64, 64],
        [64] * 8,
        [6] * 50,
        list(range(1, 32)),
        [512] + [6] * 40,
    ]
    cases = [Case(x, packed=True) for x in lengths]
    cases += [Case([100, 77], packed=True, padding=p, state_v_first=True) for p in (1, 63, 300)]
    cases += [Case([130, 0, 70], packed=True, dtype=d) for d in (torch.float16, torch.float32)]
    cases += [Case([130, 0, 70], packed=True, l2norm=True, activations=True, state=s) for s in (False, True)]
    return cases


def _profile(limit: int) -> List[Case]:
    """Few, large: one long sequence, several equal ones, a long one among short ones."""
    return [
        Case([limit]),
        Case([limit // 4] * 4, packed=True),
        Case([limit - 3 * (limit // 16)] + [limit // 16] * 3, packed=True, state_v_first=True),
        Case([limit], l2norm=True, activations=True),
    ]


def _product(limit: int) -> List[Case]:
    """Every combination of options on a small shape."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    flags = (False, True)
    return [
        Case(lengths, packed, 0, dtype, state, state_v_first, l2norm, activations, group)
        for dtype in dtypes
        for lengths, packed in (([70, 70], False), ([67, 0, 30], True))
        for state, state_v_first, l2norm, activations in itertools.product(flags, flags, flags, flags)
        for group in (1, 2)
    ]


SETS = {"develop": _develop, "varlen": _varlen, "profile": _profile, "product": _product}


def make_inputs(case: Case, num_heads: int, device: str, seed: int) -> Dict[str, Optional[torch.Tensor]]:
    """Inputs on the CPU's generator, so that a seed means the same on every device. The decay is that of a trained
    model: A spread over 0..16, with 0 (no decay) on the first head and 16 on the last."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = (1, sum(case.lengths) + case.padding) if case.packed else (len(case.lengths), case.lengths[0])
    key_heads = num_heads // case.group if num_heads % case.group == 0 else num_heads

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    A = torch.linspace(0.0, 16.0, num_heads) if num_heads > 1 else torch.tensor([1.0])
    raw_g, raw_beta = normal(rows, tokens, num_heads), normal(rows, tokens, num_heads)
    q, k = normal(rows, tokens, key_heads, HEAD_DIM), normal(rows, tokens, key_heads, HEAD_DIM)
    if not case.l2norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    state_shape = (len(case.lengths), num_heads, HEAD_DIM, HEAD_DIM)
    x: Dict[str, Optional[torch.Tensor]] = {
        "q": q.to(case.dtype),
        "k": k.to(case.dtype),
        "v": normal(rows, tokens, num_heads, HEAD_DIM).to(case.dtype),
        "g": raw_g if case.activations else -A * F.softplus(raw_g + 1.0),
        "beta": raw_beta if case.activations else raw_beta.sigmoid(),
        # log(0) is -inf, a decay of exactly 1; its gradient is 0.
        "A_log": A.log() if case.activations else None,
        "dt_bias": torch.ones(num_heads) if case.activations else None,
        "initial_state": normal(*state_shape) if case.state else None,
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=torch.int32)
        if case.packed
        else None,
        "do": normal(rows, tokens, num_heads, HEAD_DIM).to(case.dtype),
        "dht": normal(*state_shape) / 8 if case.state else None,
    }
    return {name: None if t is None else t.to(device) for name, t in x.items()}


def _rounded_l2norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The norm as it is defined for inputs of `dtype`: its result is rounded to that dtype. The gradient passes through
    the rounding unchanged."""
    normalised = x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return normalised + (normalised.to(dtype).to(x.dtype) - normalised).detach()


def compute(
    case: Case, x: Dict[str, Optional[torch.Tensor]], dtype: Optional[torch.dtype], auto_cp: bool = True
) -> Dict[str, torch.Tensor]:
    """Results and gradients. `dtype` is the oracle's: all floating-point inputs are cast to it first, and the norm of q
    and k, which rounds to their own dtype, is taken outside."""
    norm_outside = dtype is not None and case.l2norm
    if dtype is not None:
        x = {n: t.to(dtype) if t is not None and t.is_floating_point() else t for n, t in x.items()}
    named = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
    leaves = {n: x[n].detach().requires_grad_() for n in named if x[n] is not None}  # type: ignore[union-attr]
    options: Dict[str, Any] = {n: leaves.get(n) for n in ("A_log", "dt_bias", "initial_state")}
    q, k = leaves["q"], leaves["k"]
    if norm_outside:
        q, k = _rounded_l2norm(q, case.dtype), _rounded_l2norm(k, case.dtype)
    o, final_state = flash_qla.chunk_gated_delta_rule(
        q,
        k,
        leaves["v"],
        leaves["g"],
        leaves["beta"],
        **options,
        output_final_state=case.state,
        use_qk_l2norm_in_kernel=case.l2norm and not norm_outside,
        use_gate_in_kernel=case.activations,
        use_beta_sigmoid_in_kernel=case.activations,
        state_v_first=case.state_v_first,
        cu_seqlens=x["cu_seqlens"],
        auto_cp=auto_cp,
    )
    outputs = [o] if final_state is None else [o, final_state]
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [x["do"], x["dht"]][: len(outputs)])
    names = {"initial_state": "dh0"}
    results = {"o": o.detach()}
    if final_state is not None:
        results["final_state"] = final_state.detach()
    results.update({names.get(n, f"d{n}"): gradient for n, gradient in zip(leaves, gradients)})
    return results


def run_set(name: str, num_heads: int, ref_dtype: str, device: str, seed: int, only: Optional[int]) -> int:
    """Runs a set of cases, each with and without a sequence split; returns the exit code."""
    console = Console(highlight=False, soft_wrap=True)
    oracle_dtypes = {"float64": torch.float64, "float32": torch.float32}
    for what, value, known in (
        ("--set", name, SETS),
        ("--ref-dtype", ref_dtype, oracle_dtypes),
        ("--device", device, ORACLES),
    ):
        if value not in known:
            console.print(f"check: {what} must be one of {', '.join(known)} ({value})")
            return 2
    if device == "cuda" and not torch.cuda.is_available():
        console.print("check: --device cuda needs a GPU and a PyTorch with CUDA (torch.cuda.is_available() is False)")
        return 2
    cases = SETS[name](_CPU_TOKENS if device == "cpu" else 8 * _CPU_TOKENS)
    if only is not None and not 0 <= only < len(cases):
        console.print(f"check: --only must be from 0 to {len(cases) - 1}, the cases of {name} ({only})")
        return 2
    console.print(f"commit: {flash_qla.build_info()['commit']}")
    failed = known_misses = 0
    start = time.perf_counter()
    for i, case in enumerate(cases):
        if only is not None and i != only:
            continue
        x = make_inputs(case, num_heads, device, seed + i)
        with flash_qla.use_path(ORACLES[device]):
            reference = compute(case, x, oracle_dtypes[ref_dtype])
        errors, failure = first_failure(compute(case, x, None), reference, case.dtype)
        # Nothing is cut here, by kernels that may be others.
        _, unsplit = first_failure(compute(case, x, None, auto_cp=False), reference, case.dtype)
        miss = failure is None and unsplit is not None and sum(case.lengths) <= _FEW_TOKENS and unsplit[:2] == "dq"
        if failure is None and unsplit is not None:
            failure = f"with auto_cp=False {unsplit}"
        failed += failure is not None
        known_misses += miss
        figures = " ".join(
            f"{tensor} {'zero' if error is None else f'{error:.1e}'}" for tensor, error in errors.items()
        )
        verdict = "[green]ok  [/]" if failure is None else "[yellow]MISS[/]" if miss else "[red]FAIL[/]"
        console.print(f"{verdict} {i:3d} seed {seed + i}: {case.describe()}: {figures}")
        if failure is not None:
            options = f"--num-heads {num_heads} --ref-dtype {ref_dtype} --device {device} --seed {seed} --only {i}"
            console.print(f"     {failure}\n     repeat: python -m flash_qla check --set {name} {options}")
    count, seconds = len(cases) if only is None else 1, time.perf_counter() - start
    settings = f"{num_heads} heads, {device}, oracle {ref_dtype}"
    missed = f", {known_misses} known misses (docs/numerics.md)" if known_misses else ""
    console.print(f"check {name}, {settings}: {count - failed} of {count} cases passed, {seconds:.0f} s{missed}")
    return 1 if failed > known_misses else 0
