"""TileLang's kernels for machines without it: which ones a package asks for, and these compiled, where no GPU is, for sm_90a.

FOLDER/tilelang then stands in for TileLang (stand_in/tilelang/__init__.py). Imported before TileLang and before the package.
"""

import concurrent.futures
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("names", HERE / "stand_in" / "tilelang" / "names.py")
_names = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_names)
kernel_name = _names.kernel_name
# Of an H200.
MULTIPROCESSORS, CAPABILITY = 132, (9, 0)


def tilelang():
    """TileLang, as it is on a machine with an H200."""
    os.environ |= {"TILELANG_DEFAULT_TARGET": '{"kind":"cuda","arch":"sm_90a"}', "TILELANG_DISABLE_CACHE": "1"}
    torch.cuda.get_device_capability = lambda *_, **__: CAPABILITY
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.is_available = lambda: True
    torch.cuda.is_current_stream_capturing = lambda: False
    module = importlib.import_module("tilelang")
    module.contrib.nvcc.get_target_compute_version = lambda *_, **__: "{}.{}".format(*CAPABILITY)
    return module


def record(wanted: dict) -> None:
    """From now on what tilelang.jit decorates compiles nothing, and what that gives does nothing: `wanted` is filled, by the
    kernel's name, with (module, function, args, options) of each call."""

    def jit(**_):
        def wrap(build):
            def built(*args, **options):
                wanted[kernel_name(build, args, options)] = (build.__module__, build.__name__, args, options)
                return lambda *_: None

            return built

        return wrap

    tilelang().jit = jit


def save(kernel, path: Path) -> None:
    """A compiled kernel as `path`.so, with what its launch is given as `path`.launch."""
    module = kernel.artifact.device_mod
    (function,) = (module[name] for name in module.get_global_vars())
    places = [_names.LAUNCH_ARGUMENTS.index(str(name)) for name in function.attrs["tirx.kernel_launch_params"]]
    kernel.export_library(f"{path}.so")
    path.with_suffix(".launch").write_text(" ".join(map(str, places)))


def _compile(site: Path, path: Path, module: str, function: str, args, options) -> str:
    tilelang()
    if str(site) not in sys.path:
        sys.path.insert(0, str(site))
    save(getattr(importlib.import_module(module), function)(*args, **options), path)
    return path.name


def compile_all(wanted: dict, site: Path, folder: Path, processes: int) -> None:
    """What record() has found, of the package in `site`, into FOLDER; what is there already stays."""
    at = start(folder)
    missing = {name: call for name, call in wanted.items() if not (at / f"{name}.launch").exists()}
    # Processes of their own: in this one tilelang.jit is another.
    with concurrent.futures.ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for made in concurrent.futures.as_completed([pool.submit(_compile, site, at / name, *call) for name, call in missing.items()]):
            print(made.result(), flush=True)


def start(folder: Path) -> Path:
    """Where FOLDER's kernels go, with all that they need there."""
    shutil.copytree(HERE / "stand_in", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", folder / "tilelang" / "launch.so", HERE / "launch.c", "-ldl"], check=True)
    (folder / "tilelang" / "kernels").mkdir(exist_ok=True)
    return folder / "tilelang" / "kernels"
