#!/usr/bin/env python3
"""FlashInfer's gated delta rule for `bench --peers flashinfer=FOLDER` on a machine that lacks its packages: compiled here,
where no GPU is, for sm_90a.

    build.py FLASHINFER FOLDER     FLASHINFER: where `flashinfer` and its dist-info are; FOLDER: what to make (2 MB)

Its kernels are written in CuTe DSL, which compiles them for another machine's GPU: every call that the bench makes is gone
through with host tensors that say they are the device's, and each kernel that its own Python then asks for is compiled,
exported as an object and linked into FOLDER/flashinfer/fi.so. Beside it stand the Python files that choose and launch kernels, as
they are, and stand_in/ for what these import. Needs nvidia-cutlass-dsl of the version that FlashInfer asks for, apache-tvm-ffi
and torch importable, g++, and a CUDA toolkit (CUDA_HOME, /usr/local/cuda). FOLDER needs apache-tvm-ffi and torch there.
"""

import ctypes
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

os.environ["CUTE_DSL_ARCH"] = "sm_90a"

import cutlass
import cutlass.cute as cute
import torch
import tvm_ffi
from cutlass.base_dsl.runtime import cuda as cuda_helpers

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "python" / "flash_qla" / "cli"))
import bench_inputs
import bench_processes

HERE = Path(__file__).resolve().parent

# What is copied of FlashInfer: the files that choose and launch kernels, and those that they import.
SOURCES = [
    "gdn_decode.py", "gdn_prefill.py",
    *(f"gdn_kernels/{name}.py" for name in ("cute_dsl_cache_naming", "device_target", "dtype_compat", "gdn_decode_bf16_state",
                                             "gdn_decode_nontranspose", "gdn_decode_pretranspose")),
    *(f"gdn_kernels/delta_rule_dsl/{name}.py" for name in ("alpha", "collective_inverse_hmma", "collective_store_tma", "delta_rule_cp_sm90",
                                                            "delta_rule_sm90", "helpers", "schedule", "varlen_helper")),
]  # fmt: skip
# Of an H200: the multiprocessors, by which FlashInfer chooses, and the shared memory of one, of which the DSL makes a carveout.
MULTIPROCESSORS, SHARED_BYTES = 132, 233472
MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81  # of CUdevice_attribute
ALIGNMENT = 256  # of what cudaMalloc gives


def put(name: str, **values) -> types.ModuleType:
    """A module of these values under this name; with __path__, a package."""
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules[name] = module
    return module


class OnDevice:
    """A host tensor that says it is the device's; nothing is read from it while kernels are compiled."""

    CUDA = 2  # kDLCUDA
    DEVICE_AT = 8  # of DLTensor: behind the pointer to the data

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor

    def __dlpack_device__(self):
        return self.CUDA, 0

    def __dlpack__(self, **_):
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int32.from_address(pointer(capsule, b"dltensor") + self.DEVICE_AT).value = self.CUDA
        return capsule


def scratch(name, num_bytes, device, zero_init=False):
    tensor = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    begin = -tensor.data_ptr() % ALIGNMENT
    return tensor[begin : begin + num_bytes]


def stand_in_for_the_device(source: Path, objects: Path) -> None:
    """Lets FlashInfer's Python run here up to a launch, which then is none, and keeps what it compiles in `objects`."""
    from_dlpack = cute.runtime.from_dlpack
    cute.runtime.from_dlpack = lambda tensor, *args, **options: from_dlpack(OnDevice(tensor), *args, **options)

    def attribute(number, device_id=0):
        assert int(number) == MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, number
        return SHARED_BYTES

    cuda_helpers.get_device_attribute = attribute
    torch.cuda.current_stream = lambda *args, **options: types.SimpleNamespace(cuda_stream=0)

    sys.path.insert(0, str(HERE / "stand_in"))
    from flashinfer_names import decode_symbol, prefill_symbol

    made = {}

    def export(symbol, compiled):
        compiled.export_to_c(str(objects / f"{symbol}.o"), function_name=symbol)
        print(symbol, flush=True)
        made[symbol] = lambda *args: None
        return made[symbol]

    put("flashinfer", __path__=[str(source)])
    put("flashinfer.cute_dsl", __path__=[])
    put("flashinfer.cute_dsl.availability", is_cute_dsl_arch_supported=lambda *args: True)
    put("flashinfer.trace", __path__=[])
    put("flashinfer.trace.templates", __path__=[])
    put("flashinfer.trace.templates.gdn", gdn_prefill_trace=None)
    put("flashinfer.api_logging", flashinfer_api=lambda function=None, *, trace=None: function or (lambda f: f))
    put("flashinfer.jit", __path__=[])
    put("flashinfer.jit.core", logger=None)
    put("flashinfer.jit.cute_dsl_core", build_and_load_cute_dsl_kernel=lambda module, kernel, compiled, extra_key_files=():
        made.get(decode_symbol(module, kernel)) or export(decode_symbol(module, kernel), compiled()))  # fmt: skip
    put("flashinfer.utils", get_compute_capability=lambda device: (9, 0), get_device_sm_count=lambda device: MULTIPROCESSORS,
        get_device_name=lambda device: "NVIDIA H200", _get_cache_buf=scratch)  # fmt: skip
    kernels = put("flashinfer.gdn_kernels", __path__=[str(source / "gdn_kernels")])

    target = importlib.import_module("flashinfer.gdn_kernels.device_target")
    h200 = target.GdnDeviceTarget(0, "sm_90a", 9, 0, MULTIPROCESSORS, False)
    target.gdn_device_target = lambda device: h200
    for name in ("gdn_decode_pretranspose", "gdn_decode_nontranspose", "gdn_decode_bf16_state"):
        module = importlib.import_module(f"flashinfer.gdn_kernels.{name}")
        module.from_dlpack = cute.runtime.from_dlpack

    dsl = importlib.import_module("flashinfer.gdn_kernels.delta_rule_dsl")
    for name in ("delta_rule_sm90", "delta_rule_cp_sm90"):
        module = importlib.import_module(f"flashinfer.gdn_kernels.delta_rule_dsl.{name}")
        module.get_cached_compile = lambda kernel, options=None: made.get(prefill_symbol(kernel, kernel._get_compile_key()[1:]))
        module.cached_compile = lambda kernel, *args, compile_options=None: export(
            prefill_symbol(kernel, kernel._get_compile_key()[1:]), cute.compile[compile_options](kernel, *args))
    for name in ("chunk_gated_delta_rule_sm90", "chunk_gated_delta_rule_sm120", "cp_delta_rule_dsl_sm90", "cp_delta_rule_dsl_sm120"):
        setattr(kernels, name, getattr(dsl, name))
    for name in ("_chunk_gated_delta_rule_gdn_cp_sm100", "chunk_gated_delta_rule_sm100", "cp_delta_rule_dsl_sm100"):
        setattr(kernels, name, None)


def call_everything() -> None:
    """Each row of the bench once, as bench_peers.py calls it, with tensors that nothing writes."""
    import bench_peers

    for mode in ("fwd", "decode"):
        for row in bench_inputs.rows_of(mode, "", ""):
            tokens, count, hq, hv = sum(row["seqlens"]), len(row["seqlens"]), row["hq"], row["hv"]
            outer = (count, 1) if mode == "decode" else (1, tokens)
            inputs = {name: torch.empty(*outer, heads, 128, dtype=torch.bfloat16) for name, heads in (("q", hq), ("k", hq), ("v", hv))}
            inputs |= {name: torch.zeros(*outer, hv) for name in ("g", "beta")}
            inputs["h0"] = torch.empty(count, hv, 128, 128, dtype=getattr(torch, row["state_dtype"]))
            inputs["cu_seqlens"] = torch.zeros(count + 1, dtype=torch.int32)
            for peer in bench_peers.PEERS["flashinfer"](row, inputs):
                peer.run()


def link(objects: Path, library: Path) -> None:
    toolkit = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    runtime = next(Path(cutlass.__path__[0]).parents[1].glob("cu13/lib/libcuda_dialect_runtime_static.a"))
    subprocess.run(["g++", "-shared", "-fPIC", "-s", "-o", library, *objects.glob("*.o"), HERE / "raise_cuda_error.cpp", runtime,
                    f"-L{Path(tvm_ffi.__file__).parent / 'lib'}", "-ltvm_ffi", f"-L{toolkit / 'lib64'}", "-lcudart_static", "-ldl", "-lrt", "-lpthread",
                    "-Wl,-z,defs"], check=True)  # fmt: skip


def main() -> None:
    site, folder = Path(sys.argv[1]), Path(sys.argv[2])
    source, package = site / "flashinfer", folder / "flashinfer"
    shutil.copytree(HERE / "stand_in", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(source / name, package / name)
    (folder / bench_processes.NOTE).write_text("kernels compiled ahead, launched by its own Python with stand-ins for what that imports\n")
    for info in site.glob("flashinfer_python-*.dist-info"):
        (folder / info.name).mkdir(exist_ok=True)
        shutil.copy(info / "METADATA", folder / info.name)
    sys.path.append(str(site))  # for its version
    with tempfile.TemporaryDirectory() as objects:
        stand_in_for_the_device(source, Path(objects))
        importlib.import_module("flashinfer.gdn_prefill")
        importlib.import_module("flashinfer.gdn_decode")
        call_everything()
        link(Path(objects), package / "fi.so")


if __name__ == "__main__":
    main()
