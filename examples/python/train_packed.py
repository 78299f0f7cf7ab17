"""Trains a small Qwen3.5 model on documents of different lengths, packed into one row without padding.

    python examples/python/train_packed.py
    python examples/python/train_packed.py --device cuda

Each paragraph of a text in the public domain is a document. A step packs several into one row and tells the model
where each begins: `cu_seq_lens_q` bounds convolution and delta rule, positions that begin again bound the attention.
The same model is trained by Transformers' own functions with every document in a call of its own, which is the same
computation without packing: in float32 the losses must agree to 1e-4 at each of the first fifty steps, and to 1 % at
the end. What the bounds are for is shown by the model that is trained: without them documents see their neighbours, and
its loss is another one. Exits with 1 when one of these does not hold, or when the model has not learned.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
import torch.nn.functional as F
import transformers
from train_tiny import EARLY_STEPS, FINAL_BOUND, FINAL_STEPS, SEED, TEXT, build_model

from flash_qla.integrations import transformers as integration

# Losses are between 0 and 6 here. Rounding makes them differ by 1e-6, a model without bounds by several 1e-3.
EARLY_BOUND = 1e-4
MIXED_BOUND = 1e-3  # what the loss without bounds must differ by at least

Documents = List[torch.Tensor]
Loss = Callable[[Any, Documents], torch.Tensor]


def rows(steps: int, tokens: int, device: str) -> Iterator[Documents]:
    """For each step paragraphs of the text in a seeded order, so many that they fill a row; the last is cut."""
    paragraphs = [part.strip() for part in TEXT.read_bytes().split(b"\n\n")]
    documents = [torch.tensor(list(part), device=device) for part in paragraphs if len(part) > 1]
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(steps):
        row, room = [], tokens
        while room > 1:
            chosen = documents[int(torch.randint(len(documents), (), generator=generator))][:room]
            row.append(chosen)
            room -= len(chosen)
        yield row


def targets(documents: Documents) -> torch.Tensor:
    """Every byte but the first of its document, which no byte of another one predicts."""
    return torch.cat([F.pad(document[1:], (0, 1), value=-100) for document in documents])


def packed_loss(model: Any, documents: Documents, bounded: bool = True) -> torch.Tensor:
    """The mean loss of all bytes, from one call."""
    ids = torch.cat(documents)[None]
    lengths = torch.tensor([len(document) for document in documents], device=ids.device)
    options: Dict[str, Any] = {}
    if bounded:
        offsets = F.pad(lengths.cumsum(0), (1, 0)).int()
        positions = torch.cat([torch.arange(len(document), device=ids.device) for document in documents])
        longest = max(len(document) for document in documents)
        options = {"position_ids": positions[None], "cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets,
                   "max_length_q": longest, "max_length_k": longest}  # fmt: skip
    logits = model(ids, use_cache=False, **options).logits
    return F.cross_entropy(logits[0], targets(documents))


def single_loss(model: Any, documents: Documents) -> torch.Tensor:
    """The same, from a call for each document."""
    logits = torch.cat([model(document[None], use_cache=False).logits[0] for document in documents])
    return F.cross_entropy(logits, targets(documents))


def train(loss_of: Loss, arguments: argparse.Namespace) -> Tuple[Any, List[float]]:
    """The trained model, and the loss of every step."""
    model = build_model().to(arguments.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, arguments.steps)
    losses = []
    for documents in rows(arguments.steps, arguments.tokens, arguments.device):
        loss = loss_of(model, documents)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return model, [loss.item() for loss in losses]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--steps", type=int, default=40, help="default 40")
    parser.add_argument("--tokens", type=int, default=640, help="of a row (default 640)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate at the start (default 1e-3)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.backends.cudnn.allow_tf32 = False  # a GPU's convolutions are in float32 too
    (first,) = rows(1, arguments.tokens, arguments.device)
    print(f"Qwen3.5, 4 layers, {arguments.steps} steps of {arguments.tokens} bytes of {TEXT.name}, float32 on "
          f"{arguments.device}; the first step packs documents of {', '.join(str(len(part)) for part in first)} bytes; "
          f"torch {torch.__version__}, transformers {transformers.__version__}")  # fmt: skip

    losses, seconds, model = {}, {}, None
    for name, loss_of in (("single", single_loss), ("packed", packed_loss)):
        integration.patch() if name == "packed" else integration.unpatch()
        start = time.perf_counter()
        model, losses[name] = train(loss_of, arguments)
        seconds[name] = time.perf_counter() - start
    with torch.no_grad():
        bounded, mixed = (packed_loss(model, first, bounded).item() for bounded in (True, False))
    integration.unpatch()
    single, packed = losses["single"], losses["packed"]
    for step in sorted({0, *range(9, arguments.steps, max(1, arguments.steps // 6)), arguments.steps - 1}):
        print(f"step {step + 1:4d}  single {single[step]:.6f}  packed {packed[step]:.6f}")

    last = min(FINAL_STEPS, arguments.steps)
    mean = {name: sum(of[-last:]) / last for name, of in losses.items()}
    early = max(abs(a - b) for a, b in zip(packed[:EARLY_STEPS], single[:EARLY_STEPS]))
    failed = False
    for what, value, bound, most in (
        (f"largest difference in the first {EARLY_STEPS} steps", early, EARLY_BOUND, True),
        (f"loss at the end, mean of {last} steps, relative difference", abs(mean["packed"] / mean["single"] - 1),
         FINAL_BOUND, True),
        ("loss at the end, of that at the start", mean["packed"] / packed[0], 0.9, True),
        ("difference of the trained model's loss without bounds", abs(mixed - bounded), MIXED_BOUND, False),
    ):  # fmt: skip
        good = value <= bound if most else value >= bound  # a NaN is neither
        failed |= not good
        print(f"{'ok  ' if good else 'FAIL'}  {what} {value:.1e} ({'at most' if most else 'at least'} {bound:.0e})")
    print(f"seconds: single documents {seconds['single']:.1f}, packed {seconds['packed']:.1f}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
