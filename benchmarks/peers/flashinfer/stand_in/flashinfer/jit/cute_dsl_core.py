from pathlib import Path

import tvm_ffi
from flashinfer_names import decode_symbol

library = tvm_ffi.load_module(str(Path(__file__).resolve().parents[1] / "fi.so"))


def build_and_load_cute_dsl_kernel(module_name, kernel_name, compile_fn, extra_key_files=()):
    return library[decode_symbol(module_name, kernel_name)]
