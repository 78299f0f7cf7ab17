"""What a cut over two cards costs dg in a head without decay, emulated with the roundings of a tensor-core kernel.

    python tools/measure_dg_of_cards.py

Every token of a chunk has the number <dS, S> of the chunk's end in its dg. The states and their gradients are made by
passes whose operands are rounded to bfloat16, all else in double: by one card in one pass, and by two cards, each of
which starts from what the other's links say, made in several segments (docs/kernels/links.md). Prints the error of
these numbers over two cards in that of one card: of all heads together, and of the best and the worst head. The direct
sums of dg, and the segments that a card cuts its own passes into, are left out.
"""

from __future__ import annotations

from typing import Callable, Dict, List, NamedTuple, Tuple

import torch
import torch.nn.functional as F

HEADS, TOKENS, DIM, CHUNK = 16, 4096, 128, 64
CHUNKS, CUT = TOKENS // CHUNK, TOKENS // CHUNK // 2
SEGMENTS = (1, 4, 8, 16)

Rounding = Callable[[torch.Tensor], torch.Tensor]


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


class Chunk(NamedTuple):
    """Of all heads; names of docs/math.md."""

    Q: torch.Tensor
    K: torch.Tensor
    V: torch.Tensor
    dO: torch.Tensor
    A: torch.Tensor
    P: torch.Tensor


def draw() -> Dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    q, k = (F.normalize(normal(HEADS, TOKENS, DIM), dim=-1) for _ in range(2))
    v, do = normal(HEADS, TOKENS, DIM), normal(HEADS, TOKENS, DIM)
    beta = normal(HEADS, TOKENS).sigmoid()
    tokens = {name: rounded(t) for name, t in {"q": q, "k": k, "v": v, "do": do}.items()}
    return {**tokens, "beta": beta, "h0": normal(HEADS, DIM, DIM), "dht": normal(HEADS, DIM, DIM)}


def chunks_of(x: Dict[str, torch.Tensor], r: Rounding) -> List[Chunk]:
    found = []
    for begin in range(0, TOKENS, CHUNK):
        Q, K, V, dO = (x[name][:, begin : begin + CHUNK] for name in ("q", "k", "v", "do"))
        beta = x["beta"][:, begin : begin + CHUNK, None]
        A = torch.linalg.inv(torch.eye(CHUNK, dtype=K.dtype) + (beta * (K @ K.mT)).tril(-1))
        found.append(Chunk(Q, K, V, dO, r(r(A) * beta.mT), r(DIM**-0.5 * (Q @ K.mT).tril())))
    return found


def forward(c: Chunk, S: torch.Tensor, r: Rounding, values: bool = True) -> torch.Tensor:
    return S + c.K.mT @ r(c.A @ r((c.V if values else 0) - c.K @ r(S)))


def backward(c: Chunk, dS: torch.Tensor, r: Rounding) -> torch.Tensor:
    Z = r(c.A.mT @ r(c.K @ r(dS) + c.P.mT @ c.dO))
    return dS - c.K.mT @ Z + c.Q.mT @ (DIM**-0.5 * c.dO)


def link(chunks: List[Chunk], state: torch.Tensor, segments: int, reverse: bool) -> torch.Tensor:
    """What leaves the chunks, from what is given: the first segment's pass, then along the others' transitions."""
    edges = [len(chunks) * i // segments for i in range(segments + 1)]
    spans = list(zip(edges, edges[1:]))
    for number, (begin, end) in enumerate(reversed(spans) if reverse else spans):
        own = state if number == 0 else torch.zeros_like(state)
        M = torch.eye(DIM, dtype=state.dtype).expand_as(state)
        for c in reversed(chunks[begin:end]) if reverse else chunks[begin:end]:
            own = backward(c, own, rounded) if reverse else forward(c, own, rounded)
        for c in chunks[begin:end] if number > 0 else []:
            M = forward(c, M, rounded, values=False)
        state = own if number == 0 else (M.mT if reverse else M) @ state + own
    return state


def numbers(chunks: List[Chunk], states: Dict[int, torch.Tensor], gradients: Dict[int, torch.Tensor], r: Rounding):
    """<dS, S> of each chunk. states, gradients: by the chunk before which the passes start from them."""
    S: List[torch.Tensor] = []
    for i, c in enumerate(chunks):
        S.append(states[i] if i in states else forward(chunks[i - 1], S[-1], r))
    found: List[torch.Tensor] = []
    dS = torch.empty(0)
    for i in reversed(range(len(chunks))):
        dS = gradients[i + 1] if i + 1 in gradients else backward(chunks[i + 1], dS, r)
        found.append((r(dS) * r(S[i])).sum((-1, -2)))
    return torch.stack(found[::-1], 1)


def main() -> None:
    x = draw()
    right = numbers(chunks_of(x, exact), {0: x["h0"]}, {CHUNKS: x["dht"]}, exact)
    chunks = chunks_of(x, rounded)

    def errors(states: Tuple[torch.Tensor, ...], gradients: Tuple[torch.Tensor, ...]) -> torch.Tensor:
        starts, ends = dict(zip((0, CUT), states)), dict(zip((CHUNKS, CUT), gradients))
        return (numbers(chunks, starts, ends, rounded) - right).norm(dim=1)

    one = errors((x["h0"],), (x["dht"],))
    for segments in SEGMENTS:
        S = link(chunks[:CUT], x["h0"], segments, reverse=False)
        dS = link(chunks[CUT:], x["dht"], segments, reverse=True)
        two = errors((x["h0"], S), (x["dht"], dS))
        heads = two / one
        print(f"links of {segments} segments: {two.norm() / one.norm():.2f} ({heads.min():.2f} to {heads.max():.2f})")


if __name__ == "__main__":
    main()
