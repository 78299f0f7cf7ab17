#!/usr/bin/env python3
"""fla for `bench --peers fla=FOLDER` where Triton would compile for too long, or TileLang is missing: compiled here, where
no GPU is, for sm_90a.

    build.py FLA FOLDER     FLA: where `fla`, `einops` and their dist-info are; FOLDER: what to make (9 MB)

fla's own Python goes through the rows that the bench compares with other packages, with host tensors and a driver that
launches nothing; what Triton compiles for them, one configuration of each kernel, lies in FOLDER/triton_cache. (Decode has
one alone: its times are fla's.) The kernel that fla leaves to TileLang on Hopper is compiled by TileLang and launched without it
(../tilelang). Needs torch, gcc, Triton of the other machine's version, and TileLang with the packages that it asks for.
FOLDER needs torch and Triton there, and a C compiler, by which Triton makes its launchers.
"""

import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tilelang"), str(HERE.parents[2] / "python" / "flash_qla" / "cli")]
# Of an H200.
MULTIPROCESSORS, SHARED_BYTES, CAPABILITY = 132, 232448, (9, 0)


class Driver:
    """Triton's, of a device that runs nothing."""

    class Launcher:
        def __init__(self, source, metadata):
            print(source.fn.__name__, flush=True)

        def __call__(self, *_):
            pass

    class Utils:
        @staticmethod
        def get_device_properties(_):
            return {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": MULTIPROCESSORS, "warpSize": 32}

        @staticmethod
        def load_binary(*_):
            return 1, 1, 0, 0, 1024  # module, function, registers, spills, threads that a block may have

    utils, launcher_cls = Utils, Launcher

    @staticmethod
    def get_current_target():
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    @staticmethod
    def get_current_device():
        return 0

    @staticmethod
    def get_current_stream(_):
        return 0

    @staticmethod
    def get_device_interface():
        return torch.cuda

    @staticmethod
    def is_active():
        return True


def stand_in_for_the_device() -> None:
    """Lets fla and Triton run here up to a launch, which then is none."""
    import triton

    torch.cuda.get_device_name = lambda *_: "NVIDIA H200"
    torch.cuda.get_device_capability = lambda *_, **__: CAPABILITY
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    triton.runtime.driver.set_active(Driver())


def answer_for_the_device() -> None:
    """fla asks how much shared memory the tensors' device has: these have none."""
    hardware = importlib.import_module("fla.utils.hardware")
    ask = hardware.check_shared_mem
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and vars(module).get("check_shared_mem") is ask:
            module.check_shared_mem = lambda arch="none", tensor_idx=0: ask(arch, 0)


def without_result(q, k, v, do, h, dh, w=None, g=None, **_):
    """In place of the kernel that TileLang makes."""
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(w), torch.empty_like(g)


def compile_with_triton(rows) -> None:
    import bench_peers

    stand_in_for_the_device()
    chunk = importlib.import_module("fla.ops.gated_delta_rule.chunk")
    answer_for_the_device()
    chunk.chunk_bwd_dqkwg = without_result
    for row in rows:
        tokens, count, hq, hv = sum(row["seqlens"]), len(row["seqlens"]), row["hq"], row["hv"]
        outer = (count, 1) if row["mode"] == "decode" else (1, tokens)
        x = {name: torch.empty(*outer, heads, 128, dtype=torch.bfloat16) for name, heads in zip(("q", "k", "v", "do"), (hq, hq, hv, hv))}
        x |= {name: torch.zeros(*outer, hv) for name in ("g", "beta")}
        x |= {name: torch.empty(count, hv, 128, 128, dtype=getattr(torch, row["state_dtype"])) for name in ("h0", "dht")}
        x["cu_seqlens"] = torch.tensor([0, *torch.tensor(row["seqlens"]).cumsum(0)], dtype=torch.int32)
        for peer in bench_peers.PEERS["fla"](row, x):
            peer.run()


def main() -> None:
    fla, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    import bench_inputs
    import bench_processes

    rows = [row for mode in ("fwd", "bwd", "train", "decode") for row in bench_inputs.rows_of(mode, "", "", "peers")]
    if sys.argv[3:] == ["tilelang"]:
        import build_tilelang  # in a process of its own: it imports the TileLang that FOLDER has a stand-in for

        shapes = {(row["hq"], row["hv"], 128, 128) for row in rows if row["mode"] in ("bwd", "train")}
        return build_tilelang.compile_for(fla, sorted(shapes), folder)
    folder.mkdir(parents=True, exist_ok=True)
    for source in (HERE / "stand_in", fla):
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    # fla imports all its layers and models otherwise, half a minute on a machine that has not read them yet.
    (folder / "fla" / "ops" / "__init__.py").write_text("")
    version = importlib.metadata.distribution("fla-core").version
    (folder / "fla" / "__init__.py").write_text(f"__version__ = {version!r}\n")
    (folder / bench_processes.NOTE).write_text(
        "compiled ahead, one configuration of each kernel, so that its times are not its own but for decode's; TileLang's kernel "
        "launched by a stand-in; two of its files, which only import the others, emptied\n")
    (folder / "no_compiler" / "bin").mkdir(parents=True, exist_ok=True)
    (folder / "no_compiler" / "bin" / "nvcc").touch(mode=0o755)
    subprocess.run([sys.executable, __file__, fla, folder, "tilelang"], check=True)
    os.environ |= {"TRITON_STORE_BINARY_ONLY": "1", "FLA_FLASH_QLA": "0"}
    sys.path.insert(0, str(folder))
    import fla_ahead

    fla_ahead.use()
    compile_with_triton(rows)


if __name__ == "__main__":
    main()
