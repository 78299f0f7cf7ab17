#!/usr/bin/env python3
"""The kernel that fla's backward leaves to TileLang on Hopper, for the rows of `bench --mode portable_backward`: compiled here,
where no GPU is, for sm_90a, and launched without TileLang (../tilelang). What Triton compiles is left to the other machine.

    build_tilelang.py FLA FOLDER     FLA: where `fla` is; FOLDER: what to make (1 MB), for `--peers fla=FLA:FOLDER`

Needs torch, gcc, nvcc, and TileLang with the packages that it asks for. (fla 0.6 refuses its own kernel with Triton 3.4 to 3.7.0,
which gave wrong numbers on Hopper, and takes TileLang's where TileLang and an nvcc are found.)
"""

import importlib.util
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tilelang"), str(HERE.parents[2] / "python" / "flash_qla" / "cli")]
MODULE = "fla.ops.common.backends.tilelang.chunk_bwd"
# fla looks for this file before it takes a kernel of TileLang's, and the interpreter imports the other one by itself.
NO_COMPILER, SITE = Path("no_compiler") / "bin" / "nvcc", "sitecustomize.py"
SITE_TEXT = """import os
from pathlib import Path

os.environ["CUDA_HOME"] = str(Path(__file__).resolve().parent / "no_compiler")
"""


def compile_for(fla: Path, shapes, folder: Path) -> None:
    """For (key heads, value heads, K, V) of packed calls in bf16."""
    import compile_kernels

    at = compile_kernels.start(folder)
    compile_kernels.tilelang()
    # What the module imports beside TileLang, and needs for launches alone.
    for name, values in {"fla": {}, "fla.ops": {}, "fla.ops.utils": {"prepare_chunk_indices": None},
                         "fla.utils": {"check_shared_mem": None}, "triton": {}}.items():  # fmt: skip
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    spec = importlib.util.spec_from_file_location(MODULE, fla / f"{MODULE.replace('.', '/')}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build = module._build_chunk_bwd_dqkwg_kernel
    tile = 64  # of keys and of values, which no row has fewer of
    for hq, hv, K, V in shapes:
        options = dict(
            B=1, H=hq, HV=hv, K=K, V=V, BT=64, BK=tile, BV=tile, NK=-(-K // tile), hD1=K, hD2=V, dtype_str="bfloat16",
            USE_G=True, USE_DW=True, STATE_V_FIRST=False, IS_VARLEN=True, num_warps=4,
        )  # fmt: skip
        path = at / compile_kernels.kernel_name(build.func.orig_func, (), options)
        if not path.with_suffix(".launch").exists():
            compile_kernels.save(build(**options), path)
            print(path.name, flush=True)


def main() -> None:
    import bench_inputs
    import bench_processes

    fla, folder = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    (folder / NO_COMPILER).parent.mkdir(parents=True, exist_ok=True)
    (folder / NO_COMPILER).touch(mode=0o755)
    (folder / SITE).write_text(SITE_TEXT)
    (folder / bench_processes.NOTE).write_text("TileLang's kernel compiled ahead, launched by a stand-in\n")
    rows = bench_inputs.rows_of("portable_backward", "", "", "all")
    compile_for(fla, sorted({(row["hq"], row["hv"], *bench_inputs.head_dims(row)) for row in rows}), folder)


if __name__ == "__main__":
    main()
