#!/usr/bin/env python3
"""FlashQLA for `bench --peers flashqla=FOLDER` on a machine that lacks TileLang, or has no minutes for it: compiled here,
where no GPU is, for sm_90a.

    build.py FLASHQLA FOLDER [PROCESSES]     FLASHQLA: where its `flash_qla` and dist-info are; FOLDER: what to make

Its own Python goes through the rows that the bench compares with other packages, with host tensors; each kernel that it then
asks TileLang for is compiled by TileLang and launched in FOLDER without it (../tilelang). Needs torch, gcc, a CUDA
toolkit and TileLang with the packages that it asks for. FOLDER needs torch there.
"""

import shutil
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python" / "flash_qla" / "cli"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tilelang"))
import bench_processes
import compile_kernels


def call_everything() -> None:
    """Each row once, as bench_peers.py calls it, with tensors that nothing writes but for the lengths."""
    import bench_inputs
    import bench_peers

    for row in (row for mode in ("fwd", "bwd", "train") for row in bench_inputs.rows_of(mode, "", "", "peers")):
        tokens, count, hq, hv = sum(row["seqlens"]), len(row["seqlens"]), row["hq"], row["hv"]
        x = {name: torch.empty(1, tokens, heads, 128, dtype=torch.bfloat16) for name, heads in zip(("q", "k", "v", "do"), (hq, hq, hv, hv))}
        x |= {name: torch.zeros(1, tokens, hv) for name in ("g", "beta")}
        x |= {name: torch.empty(count, hv, 128, 128) for name in ("h0", "dht")}
        x["cu_seqlens"] = torch.tensor([0, *torch.tensor(row["seqlens"]).cumsum(0)], dtype=torch.int32)
        for peer in bench_peers.PEERS["flashqla"](row, x):
            peer.run()


def main() -> None:
    site, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    processes = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copytree(site, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / bench_processes.NOTE).write_text("kernels compiled ahead, launched by a stand-in for TileLang\n")
    wanted = {}
    sys.path.insert(0, str(site))
    compile_kernels.record(wanted)
    call_everything()
    print(f"{len(wanted)} kernels", flush=True)
    compile_kernels.compile_all(wanted, site, folder, processes)


if __name__ == "__main__":
    main()
