"""What fla and Triton need to find the kernels that build.py has compiled, there and where it compiles them."""

import json
import os
from pathlib import Path

import triton.compiler.compiler as compiler
from triton.runtime.autotuner import Autotuner
from triton.runtime.cache import FileCacheManager
from triton.runtime.errors import OutOfResources

HERE = Path(__file__).resolve().parent


def _key(source, backend, options, env_vars) -> str:
    """What a kernel is made for. Triton's own key has a hash of its files and of its compiler too: of another machine."""
    parts = [source.fn.__name__, options.num_warps, options.num_stages, options.num_ctas, options.maxnreg]
    for given in (source.signature, source.constants, source.attrs):
        parts.append(sorted((str(name), str(value)) for name, value in given.items()))
    return str(parts)


def _group(cache: FileCacheManager, filename: str):
    """The files of a kernel, where the cache is now: Triton keeps whole paths."""
    path = Path(cache._make_path(f"__grp__{filename}"))
    if not path.exists():
        return None
    found = {name: cache._make_path(name) for name in json.loads(path.read_text())["child_paths"]}
    return {name: file for name, file in found.items() if os.path.exists(file)}


def _first_configuration(run):
    """fla's kernels in the first configuration that fits: its errors and its memory are those of others, not its times."""

    def wrapped(tuner, *args, **options):
        while True:
            tuner.configs, rest = tuner.configs[:1], tuner.configs[1:]
            try:
                return run(tuner, *args, **options)
            except OutOfResources:
                if not rest:
                    raise
                tuner.configs = rest

    return wrapped


def use() -> None:
    os.environ["TRITON_CACHE_DIR"] = str(HERE / "triton_cache")
    os.environ["CUDA_HOME"] = str(HERE / "no_compiler")  # fla asks for an nvcc before it takes a TileLang kernel
    compiler.get_cache_key = _key
    FileCacheManager.get_group = _group
    Autotuner.run = _first_configuration(Autotuner.run)
