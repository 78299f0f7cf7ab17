"""TileLang where it is not: fla's kernel from what TileLang has made of it, launched by launch.so (../../launch.c)."""

import ctypes
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
_DLPACK_CODES = {torch.int32: (0, 32), torch.float16: (2, 16), torch.float32: (2, 32), torch.bfloat16: (4, 16)}
_DLPACK_CUDA, _ANY_FLOAT, _ANY_TENSOR = 2, 3, 7
_kernels = {}
_library = None


class _Any(ctypes.Structure):
    """An argument as tvm-ffi passes it."""

    class Value(ctypes.Union):
        _fields_ = [("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]

    _anonymous_ = ["value"]
    _fields_ = [("type_index", ctypes.c_int32), ("padding", ctypes.c_uint32), ("value", Value)]


class _Tensor(ctypes.Structure):
    """DLTensor."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p), ("strides", ctypes.c_void_p), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


def _open():
    global _library
    if _library is None:
        _library = ctypes.CDLL(str(HERE / "launch.so"), ctypes.RTLD_GLOBAL)
        _library.complaint.restype = ctypes.c_char_p
        _library.set_stream.argtypes = [ctypes.c_void_p]
    return _library


def _load(name: str):
    """The kernel whose host code is <name>.so, and whose device code is <name>.cubin, as a function of its arguments."""
    library = _open()
    torch.cuda.current_stream().synchronize()  # there is a context now
    handles = (ctypes.c_void_p * 2)()
    if library.load_kernel(handles, str(HERE / f"{name}.cubin").encode(), b"kernel_kernel") != 0:
        raise RuntimeError(f"{name}: {library.complaint().decode()}")
    host = ctypes.CDLL(str(HERE / f"{name}.so"))
    ctypes.c_void_p.in_dll(host, "__tvm_ffi__library_ctx").value = ctypes.addressof(handles)

    def call(*arguments):
        packed, alive = (_Any * len(arguments))(), [handles]
        for place, value in zip(packed, arguments):
            if isinstance(value, torch.Tensor):
                shape, strides = ((ctypes.c_int64 * value.dim())(*numbers) for numbers in (value.shape, value.stride()))
                tensor = _Tensor(value.data_ptr(), _DLPACK_CUDA, value.device.index, value.dim(), *_DLPACK_CODES[value.dtype], 1,
                                 ctypes.addressof(shape), ctypes.addressof(strides), 0)  # fmt: skip
                alive += [shape, strides, tensor]
                place.type_index, place.pointer = _ANY_TENSOR, ctypes.addressof(tensor)
            else:
                place.type_index, place.number = _ANY_FLOAT, float(value)
        library.set_stream(torch.cuda.current_stream().cuda_stream)
        if host.__tvm_ffi_kernel(None, packed, len(arguments), ctypes.byref(_Any())) != 0:
            raise RuntimeError(f"{name}: {library.complaint().decode()}")

    return call


def jit(**_):
    def wrap(build):
        def built(**shape):
            name = f"{build.__name__}_{shape['H']}_{shape['HV']}"
            if name not in _kernels:
                _kernels[name] = _load(name)
            return _kernels[name]

        return built

    return wrap


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


class _Names:
    """Every name of an enumeration, for decorators that are not applied."""

    def __getattr__(self, name: str) -> str:
        return name


PassConfigKey = _Names()
