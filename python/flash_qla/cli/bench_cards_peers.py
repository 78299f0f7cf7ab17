"""Runs another package's context parallelism on the rows of the bench over several cards, in processes of its own: one
of them shares our import name.

    PYTHONPATH=<folder of the package> torchrun --nproc-per-node 2 bench_cards_peers.py <fla | flashqla> <modes> <heads>
        <lengths> <gates> <runs> <out>

Modes, heads, lengths and gates as `bench --mode cp_fwd,cp_train` takes them, "" for all. <out>: a folder, into which go
<package>_<cards>.json, [{"row": .., "peer": name and version, "ms": times, "peak_bytes": .., "tensors": a file}, ..] or
with "error" in place of times, and the files with what is checked of the results. `bench --peer-results` reads it.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List

import torch
import torch.distributed as distributed
from bench_cards_inputs import call, make_share, needed_bytes, picked, rows_of  # type: ignore[import-not-found]
from bench_cards_ranks import Ranks  # type: ignore[import-not-found]

Function = Callable[..., torch.Tensor]


def _fla(row: Dict[str, Any], offsets: torch.Tensor) -> Function:
    from fla.ops.cp import build_cp_context
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    context = build_cp_context(offsets, group=distributed.group.WORLD)
    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)[0]


def _flashqla(row: Dict[str, Any], offsets: torch.Tensor) -> Function:
    from flash_qla import build_cp_context, chunk_gated_delta_rule

    context = build_cp_context(
        offsets, enable_inter=True, enable_intra=True, group=distributed.group.WORLD, num_v_heads=row["hv"],
        chunk_size=64, is_train=row["mode"] == "cp_train",
    )  # fmt: skip
    return lambda q, k, v, g, beta: chunk_gated_delta_rule(q, k, v, g, beta, cp_context=context)[0]


PACKAGES: Dict[str, Any] = {"fla": (_fla, "fla-core"), "flashqla": (_flashqla, "flash-qla")}


def _measure(package: str, row: Dict[str, Any], runs: int, ranks: Ranks, folder: Path) -> Dict[str, Any]:
    make, distribution = PACKAGES[package]
    tokens = row["seqlens"][0]
    share = tokens // ranks.size
    x = make_share(row, ranks.rank * share, (ranks.rank + 1) * share, ranks.device)
    function = make(row, torch.tensor([0, tokens], dtype=torch.int32, device=ranks.device))
    found = ranks.together(picked(row, call(row, x, function)))
    ms = ranks.times(lambda: call(row, x, function), runs)
    peak = ranks.peak_bytes(lambda: call(row, x, function))
    file = folder / f"{package}_{ranks.size}_{row['mode']}_{row['hq']}x{row['hv']}_{row['name']}_{row['gates']}.pt"
    if ranks.rank == 0:
        torch.save(found, file)
    name = f"{package} {importlib.metadata.version(distribution)}"
    return {"row": row, "peer": name, "ms": ms, "peak_bytes": peak, "tensors": str(file)}


def main(package: str, modes: str, heads: str, lengths: str, gates: str, runs: str, out: str) -> None:
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = Ranks(cpu=False)
    answers: List[Dict[str, Any]] = []
    for row in rows_of(modes.split(","), heads, lengths, gates):
        if needed_bytes(row, row["seqlens"][0] // ranks.size) > ranks.free_bytes():
            answers.append({"row": row, "peer": package, "error": "does not fit"})
            continue
        try:  # the ranks fail alike: all of them refuse a call, or none
            answers.append(_measure(package, row, int(runs), ranks, folder))
        except (ImportError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
            answers.append({"row": row, "peer": package, "error": f"{type(error).__name__}: {error}"})
        if ranks.rank == 0:
            (folder / f"{package}_{ranks.size}.json").write_text(json.dumps(answers))
            print(json.dumps({name: value for name, value in answers[-1].items() if name != "row"}), flush=True)
    ranks.end(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
