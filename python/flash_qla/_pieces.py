"""Calls on some of a rank's tokens, into tensors of all of them: what needs no neighbour is computed while links are
gathered, and a part at a time where states are handed from rank to rank."""

from __future__ import annotations

from typing import List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor

from . import _torch, _torch_links
from ._options import Options

# Inputs of a call that have a row for each token: q, k, v, g, beta. A_log, dt_bias, cu_seqlens, initial_state follow.
_PER_TOKEN = 5


class Piece(NamedTuple):
    """Tokens and rows (sequences) of a call."""

    tokens: Tuple[int, int]
    rows: Tuple[int, int]


class Halves(NamedTuple):
    """A call whose first half waits for no other rank; the second may be None."""

    local: Piece
    waiting: Optional[Piece]


# A second call is worth its launches where it has at least this share of the tokens.
_LEAST_SHARE = 0.25


def forward_halves(offsets: List[int], tokens: int, entering_row: int) -> Optional[Halves]:
    """What can be computed before states enter: all but the sequence that does; None if that is little. `offsets`: the
    rank's, on the host."""
    rows = len(offsets) - 1
    everything = Piece((0, tokens), (0, rows))
    if entering_row < 0:
        return Halves(everything, None)
    end = offsets[entering_row + 1]
    if tokens - end < _LEAST_SHARE * tokens or tokens == end:
        return None
    return Halves(Piece((end, tokens), (entering_row + 1, rows)), Piece((0, end), (0, entering_row + 1)))


def backward_halves(offsets: List[int], tokens: int, leaving_row: int) -> Optional[Halves]:
    """What can be computed before gradients of states come back: all but the sequence that goes on; None if that is
    little."""
    rows = len(offsets) - 1
    everything = Piece((0, tokens), (0, rows))
    if leaving_row < 0:
        return Halves(everything, None)
    begin = offsets[leaving_row]
    if begin < _LEAST_SHARE * tokens or begin == 0:
        return None
    return Halves(Piece((0, begin), (0, leaving_row)), Piece((begin, tokens), (leaving_row, rows)))


def inputs_of(inputs: Sequence[Optional[Tensor]], piece: Piece) -> Tuple[Optional[Tensor], ...]:
    """The inputs of a piece, as views."""
    (t0, t1), (r0, r1) = piece
    A_log, dt_bias, cu_seqlens, initial_state = inputs[_PER_TOKEN:]
    if cu_seqlens is not None:
        cu_seqlens = cu_seqlens[r0 : r1 + 1]
        if r0 > 0:
            cu_seqlens = cu_seqlens - cu_seqlens[0]
    per_token = (_tokens(x, piece) for x in inputs[:_PER_TOKEN])
    return (*per_token, A_log, dt_bias, cu_seqlens, _rows(initial_state, piece))


def _tokens(x: Optional[Tensor], piece: Piece) -> Optional[Tensor]:
    return None if x is None else x[:, piece.tokens[0] : piece.tokens[1]]


def _rows(x: Optional[Tensor], piece: Piece) -> Optional[Tensor]:
    return None if x is None else x[piece.rows[0] : piece.rows[1]]


def rows_in(rows: Tensor, piece: Piece) -> Tensor:
    """entering_rows or leaving_rows, counted from a piece's first row."""
    return rows if piece.rows[0] == 0 else torch.where(rows >= 0, rows - piece.rows[0], -1)


def forward(
    options: Options,
    inputs: Sequence[Optional[Tensor]],
    piece: Piece,
    entering: Tuple[Optional[Tensor], Optional[Tensor]],
    outputs: Tuple[Optional[Tensor], ...],
) -> None:
    """Computes a piece. `entering`: rows counted from the piece's first, and states; `outputs`: o, final_state, A of
    the whole call."""
    o, final_state, A = outputs
    of_piece = (_tokens(o, piece), _rows(final_state, piece), _tokens(A, piece))
    _torch_links.forward_into(options, inputs_of(inputs, piece), entering, of_piece)


class Gradients:
    """Gradients of a whole call, from backward passes of its pieces."""

    def __init__(self, inputs: Sequence[Optional[Tensor]], dh0: Optional[Tensor], wanted: Sequence[bool]) -> None:
        """`wanted`: of q, k, v, g, beta, A_log, dt_bias. `dh0`: that of the initial states, or None."""
        self._inputs = inputs
        self._per_token = [
            torch.empty_like(x, memory_format=torch.contiguous_format) if want and x is not None else None
            for x, want in zip(inputs[:_PER_TOKEN], wanted)
        ]
        self._dh0 = dh0
        self._wanted = wanted[_PER_TOKEN : _PER_TOKEN + 2]
        self._sums: List[List[Optional[Tensor]]] = []

    def add(self, options: Options, piece: Piece, states: tuple, kept: tuple) -> None:
        """Computes those of a piece. `states`: entering rows and states, leaving rows and gradients, rows counted from
        the piece's first; `kept`: A, do, dht of the whole call."""
        q = self._inputs[0]
        assert q is not None
        gate_parameters = self._inputs[_PER_TOKEN : _PER_TOKEN + 2]
        sums = [
            q.new_empty(x.shape, dtype=_torch._accumulator(q)) if want and x is not None else None
            for x, want in zip(gate_parameters, self._wanted)
        ]
        A, do, dht = kept
        of_piece = (_tokens(A, piece), _tokens(do, piece), _rows(dht, piece))
        found = (*(_tokens(x, piece) for x in self._per_token), _rows(self._dh0, piece), *sums)
        _torch_links.backward_into(options, inputs_of(self._inputs, piece), states, of_piece, found)
        self._sums.append(sums)

    def all(self) -> List[Optional[Tensor]]:
        """dq, dk, dv, dg, dbeta, dA_log, ddt_bias; None where not wanted. Parameters have sums over the pieces."""
        totals: List[Optional[Tensor]] = []
        for x, *found in zip(self._inputs[_PER_TOKEN : _PER_TOKEN + 2], *self._sums):
            if x is None or any(part is None for part in found):
                totals.append(None)
                continue
            total = found[0]
            for part in found[1:]:
                total = total + part
            totals.append(total.to(x.dtype))
        return [*self._per_token, *totals]
