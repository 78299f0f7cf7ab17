"""Trains a small Qwen3.5 model on a real text, with Transformers' own functions and with flash_qla in their place.

    python examples/python/train_tiny.py
    python examples/python/train_tiny.py --device cuda

Weights, batches and optimiser are the same for both (seeded); the tokens are the bytes of a text in the public domain.
In float32 the two are the same computation in another order, so their losses must agree: to 1e-3 at each of the first
fifty steps, and to 1 % at the end, where several hundred steps have amplified what differs. Both curves are drawn into
a PNG. Exits with 1 when they do not agree, or when the model has not learned.

With --bf16 (on a GPU) the layers run under autocast in bfloat16, which is what takes the fast kernels. Two roundings of
bfloat16 part sooner than two of float32: then the losses are held to 2 % of one another, averaged over the last steps.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path
from typing import Iterator, List

import torch
import transformers
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from flash_qla.integrations import transformers as integration

TEXT = Path(__file__).resolve().parents[1] / "data" / "declaration_of_independence.txt"

EARLY_STEPS, EARLY_BOUND = 50, 1e-3  # loss, absolute: a loss is between 0 and 6 here
FINAL_BOUND = 0.01  # relative, of the mean loss of the last steps
FINAL_BOUND_BF16 = 0.02
FINAL_STEPS = 10  # one step's loss is that of its batch
SEED = 0


def build_model() -> Qwen3_5ForCausalLM:
    """Three linear attention layers and a full one, as in Qwen3.5's pattern, with its linear head dimensions of 128."""
    torch.manual_seed(SEED)
    config = Qwen3_5TextConfig(
        vocab_size=256,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=48,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        attention_dropout=0.0,
    )
    return Qwen3_5ForCausalLM(config).float().train()


def batches(steps: int, size: int, tokens: int) -> Iterator[torch.Tensor]:
    """Crops of the text at seeded places."""
    text = torch.tensor(list(TEXT.read_bytes()))
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - tokens, (size,), generator=generator)
        yield torch.stack([text[start : start + tokens] for start in starts.tolist()])


def train(arguments: argparse.Namespace) -> List[float]:
    """The loss of every step."""
    model = build_model().to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    losses = []
    for ids in batches(arguments.steps, arguments.batch, arguments.tokens):
        ids = ids.to(arguments.device)
        with torch.autocast(arguments.device, torch.bfloat16) if arguments.bf16 else contextlib.nullcontext():
            loss = model(ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def plot(theirs: List[float], ours: List[float], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (curve, difference) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 6), height_ratios=[3, 1], layout="constrained"
    )
    curve.plot(theirs, label="Transformers' own functions", linewidth=3, alpha=0.4)
    curve.plot(ours, label="flash_qla", linewidth=1)
    curve.set_ylabel("loss (nats per byte)")
    curve.legend()
    difference.semilogy([max(abs(a - b), 1e-9) for a, b in zip(ours, theirs)], linewidth=1)
    difference.axhline(EARLY_BOUND, linestyle=":", color="grey")
    difference.set_ylabel("|difference|")
    difference.set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--steps", type=int, default=300, help="default 300")
    parser.add_argument("--batch", type=int, default=4, help="sequences a step (default 4)")
    parser.add_argument("--tokens", type=int, default=192, help="of a sequence (default 192)")
    parser.add_argument("--lr", type=float, default=5e-4, help="learning rate at the start (default 5e-4)")
    parser.add_argument("--plot", type=Path, default=Path("train_tiny.png"), help="where the curves are drawn")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    print(f"Qwen3.5, 4 layers, {arguments.steps} steps of {arguments.batch} x {arguments.tokens} bytes of {TEXT.name}, "
          f"{'bfloat16 autocast' if arguments.bf16 else 'float32'} on {arguments.device}; torch {torch.__version__}, "
          f"transformers {transformers.__version__}")  # fmt: skip

    losses, seconds = {}, {}
    for ours in (False, True):
        integration.patch() if ours else integration.unpatch()
        start = time.perf_counter()
        losses[ours] = train(arguments)
        seconds[ours] = time.perf_counter() - start
    integration.unpatch()
    theirs, our = losses[False], losses[True]
    for step in sorted({0, *range(9, arguments.steps, max(1, arguments.steps // 10)), arguments.steps - 1}):
        print(f"step {step + 1:4d}  Transformers {theirs[step]:.6f}  flash_qla {our[step]:.6f}")
    plot(theirs, our, arguments.plot)

    early = max(abs(a - b) for a, b in zip(our[:EARLY_STEPS], theirs[:EARLY_STEPS]))
    final_steps = min(FINAL_STEPS, arguments.steps)
    mean = {ours: sum(losses[ours][-final_steps:]) / final_steps for ours in (False, True)}
    final = abs(mean[True] - mean[False]) / mean[False]
    checks = [
        (f"loss at the end, mean of {final_steps} steps: {mean[False]:.5f} and {mean[True]:.5f}, relative difference",
         final, FINAL_BOUND_BF16 if arguments.bf16 else FINAL_BOUND),
        ("loss at the end, of that at the start", mean[True] / our[0], 0.9),
    ]  # fmt: skip
    if not arguments.bf16:
        checks.insert(0, (f"largest difference in the first {EARLY_STEPS} steps", early, EARLY_BOUND))
    failed = False
    for what, value, bound in checks:
        good = value <= bound  # a NaN is not
        failed |= not good
        print(f"{'ok  ' if good else 'FAIL'}  {what} {value:.1e} (bound {bound:.0e})")
    print(f"seconds: Transformers {seconds[False]:.1f}, flash_qla {seconds[True]:.1f}; curves in {arguments.plot}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
