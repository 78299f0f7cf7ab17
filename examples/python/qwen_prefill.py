"""A small Qwen3.5 model reads a real text, with Transformers' own functions and with flash_qla in their place.

    python examples/python/qwen_prefill.py

The weights are random (seeded) and the tokens are the bytes of a text in the public domain; all layers, shapes and
calls are the model's own. It compares logits, prefill followed by decode, and the gradients of a language-modelling
loss, prints tokens per second of both, and exits with 1 when they disagree or flash_qla is not the faster.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from pathlib import Path
from typing import Callable, Dict, List, Tuple

import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from flash_qla.integrations import transformers as integration

TEXT = Path(__file__).resolve().parents[1] / "data" / "declaration_of_independence.txt"

# Relative L2 of float32 results: what two correct float32 implementations of these layers differ by, with room to
# spare.
LOGITS_BOUND = 1e-4
GRADIENT_BOUND = 1e-3

DECODED_TOKENS = 16
# Of the text, for the gradients: they are computed in float64 too.
GRADIENT_TOKENS = 1024
SEED = 0


def build_model() -> Qwen3_5ForCausalLM:
    """Three linear attention layers and a full one, as in Qwen3.5's pattern, with its linear head dimensions of 128."""
    torch.manual_seed(SEED)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    return Qwen3_5ForCausalLM(config).float().eval()


def relative_l2(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@torch.inference_mode()
def prefill(model: Qwen3_5ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=True).logits


@torch.inference_mode()
def prefill_then_decode(model: Qwen3_5ForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of all positions, the last ones one token at a time from the cache."""
    start = ids.shape[1] - DECODED_TOKENS
    out = model(ids[:, :start], use_cache=True)
    logits = [out.logits]
    for t in range(start, ids.shape[1]):
        out = model(ids[:, t : t + 1], past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def gradients(model: Qwen3_5ForCausalLM, ids: torch.Tensor) -> Dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(ids, labels=ids, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def worst_parameter(a: Dict[str, torch.Tensor], b: Dict[str, torch.Tensor]) -> Tuple[float, str]:
    return max((relative_l2(a[name], b[name]), name) for name in b)


def one_vector(grads: Dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.double().flatten() for g in grads.values()])


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def layer_seconds(model: Qwen3_5ForCausalLM, tokens: int) -> Tuple[float, float]:
    """Of one linear attention layer: a forward pass, and one with all gradients."""
    layer = model.model.layers[0].linear_attn
    x = torch.randn(1, tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(SEED)).requires_grad_()
    with torch.inference_mode():
        forward = seconds(lambda: layer(x))
    return forward, seconds(lambda: layer(x).sum().backward())


def patched(use: bool) -> None:
    integration.patch() if use else integration.unpatch()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="timed prefills of each (default 5)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()

    model = build_model()
    ids = torch.tensor([list(TEXT.read_bytes())])
    tokens = ids.shape[1]
    print(f"Qwen3.5, random weights, 4 layers; {TEXT.name}: {tokens} bytes; torch {torch.__version__}, "
          f"transformers {transformers.__version__}, {torch.get_num_threads()} threads")  # fmt: skip

    logits: Dict[bool, torch.Tensor] = {}
    grads: Dict[bool, Dict[str, torch.Tensor]] = {}
    for ours in (False, True):
        patched(ours)
        logits[ours] = prefill(model, ids)
        grads[ours] = gradients(model, ids[:, :GRADIENT_TOKENS])
    stepwise = prefill_then_decode(model, ids)
    # Transformers' functions compute in float32 whatever they are given; flash_qla computes float64 in float64, which
    # tells apart whose gradients differ: those of A_log and dt_bias are sums over all tokens that nearly cancel.
    exact = gradients(copy.deepcopy(model).double(), ids[:, :GRADIENT_TOKENS])
    theirs_off, _ = worst_parameter(grads[False], exact)
    ours_off, name = worst_parameter(grads[True], exact)
    of_theirs = f"Transformers: {theirs_off:.1e}"

    continued = f"prefill + {DECODED_TOKENS} decoded tokens, against one prefill"
    parameter = f"gradients, worst parameter against float64 ({name}; {of_theirs})"
    both = relative_l2(one_vector(grads[True]), one_vector(grads[False]))
    checks: List[Tuple[str, float, float]] = [
        ("logits, flash_qla against Transformers", relative_l2(logits[True], logits[False]), LOGITS_BOUND),
        (continued, relative_l2(stepwise, logits[True]), LOGITS_BOUND),
        ("gradients, flash_qla against Transformers", both, GRADIENT_BOUND),
        (parameter, ours_off, GRADIENT_BOUND),
    ]
    failed = False
    for what, error, bound in checks:
        good = error <= bound  # a NaN is not
        failed |= not good
        print(f"{'ok  ' if good else 'FAIL'}  {what}: relative L2 {error:.1e} (bound {bound:.0e})")

    times: Dict[bool, List[float]] = {False: [], True: []}
    for _ in range(arguments.runs):  # taken in turns, so that a busy machine disturbs both alike
        for ours in (False, True):
            patched(ours)
            times[ours].append(seconds(lambda: prefill(model, ids)))
    of_layer: Dict[bool, List[Tuple[float, float]]] = {False: [], True: []}
    for _ in range(arguments.runs):
        for ours in (False, True):
            patched(ours)
            of_layer[ours].append(layer_seconds(model, GRADIENT_TOKENS))
    integration.unpatch()
    for i, what in enumerate(("forward", "forward and backward")):
        theirs, our = (1e3 * statistics.median(taken[i] for taken in of_layer[ours]) for ours in (False, True))
        print(f"one linear attention layer, {GRADIENT_TOKENS} tokens, {what}: Transformers {theirs:.1f} ms, "
              f"flash_qla {our:.1f} ms ({theirs / our:.2f}x)")  # fmt: skip
    theirs, our = statistics.median(times[False]), statistics.median(times[True])
    print(f"prefill, tokens per second: Transformers {tokens / theirs:,.0f}, flash_qla {tokens / our:,.0f} "
          f"({theirs / our:.2f}x)")  # fmt: skip
    if our >= theirs:
        print("FAIL  flash_qla must be the faster")
        failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
