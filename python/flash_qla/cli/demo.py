"""`demo`: one prompt through a layer of real size, then a few decoded tokens, on states in a pool as an engine keeps
them."""

from __future__ import annotations

import statistics
import time
from typing import Any, Dict, List, Optional

import torch
from rich.console import Console

import flash_qla

# A Qwen3.5 layer's linear attention: 16 key heads, 32 value heads of 128.
KEY_HEADS, VALUE_HEADS, HEAD_DIM = 16, 32, 128
DECODED_TOKENS = 32
RUNS = 3


def _inputs(tokens: int, device: str) -> Dict[str, Any]:
    """Raw projections, as a model makes them: norm, gate and sigmoid are left to the library."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=generator).to(device, torch.bfloat16)

    return {
        "q": normal(KEY_HEADS, HEAD_DIM),
        "k": normal(KEY_HEADS, HEAD_DIM),
        "v": normal(VALUE_HEADS, HEAD_DIM),
        "g": normal(VALUE_HEADS),
        "beta": normal(VALUE_HEADS),
    }


def run(tokens: int, device: Optional[str]) -> int:
    """Runs it and prints; returns the exit code."""
    console = Console(highlight=False)
    if device is None:
        built = any("cuda" in value or "sm90" in value for value in flash_qla.build_info().values())
        device = "cuda" if built and torch.cuda.is_available() else "cpu"
    x = _inputs(tokens + DECODED_TOKENS, device)
    options: Dict[str, Any] = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(0.01, 16.0, VALUE_HEADS, device=device).log(),
        "dt_bias": torch.ones(VALUE_HEADS, device=device),
        "use_beta_sigmoid_in_kernel": True,
    }
    pool = torch.zeros(4, VALUE_HEADS, HEAD_DIM, HEAD_DIM, device=device)
    slot = torch.tensor([2], device=device)
    cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    fresh = torch.tensor([False], device=device)

    def wait() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    prefill: List[float] = []
    prompt = {name: t[:, :tokens] for name, t in x.items()}
    with torch.inference_mode():
        for _ in range(RUNS + 1):  # the first one warms up
            start = wait()
            o = flash_qla.gated_delta_rule_prefill(
                **prompt,
                state_pool=pool,
                initial_state_indices=slot,
                cu_seqlens=cu_seqlens,
                has_initial_state=fresh,
                **options,
            )
            prefill.append(wait() - start)
        start = wait()
        steps = []
        for t in range(tokens, tokens + DECODED_TOKENS):
            token = {name: u[:, t : t + 1] for name, u in x.items()}
            steps.append(
                flash_qla.gated_delta_rule_decode(**token, state_pool=pool, initial_state_indices=slot, **options)
            )
        decode = wait() - start
        whole, _ = flash_qla.chunk_gated_delta_rule(**x, **options)
    found = torch.cat([o, *steps], dim=1).double()
    error = ((found - whole.double()).norm() / whole.double().norm()).item()
    path = flash_qla.explain(**prompt, **options).splitlines()[0]
    console.print(
        f"{device}, {path}; {KEY_HEADS} key and {VALUE_HEADS} value heads of {HEAD_DIM}, bfloat16, raw inputs"
    )
    console.print(f"prefill of {tokens} tokens: {tokens / statistics.median(prefill[1:]):,.0f} tokens/s")
    console.print(f"decode of {DECODED_TOKENS} tokens: {DECODED_TOKENS / decode:,.0f} tokens/s")
    # Two bfloat16 results, each rounded once: they may differ by as much as the bound of one against fp64.
    good = error <= 5e-3
    console.print(f"prefill then decode against one prefill: relative L2 {error:.1e} {'ok' if good else 'FAIL'}")
    return 0 if good else 1
