"""TileLang where it is not: kernels from what TileLang has made of them (../kernels), launched by launch.so (../../launch.c)."""

import ctypes
from pathlib import Path
from types import SimpleNamespace

import torch

from .names import device_code, kernel_name

HERE = Path(__file__).resolve().parent
_DLPACK_CODES = {torch.int32: (0, 32), torch.int64: (0, 64), torch.float16: (2, 16), torch.float32: (2, 32), torch.bfloat16: (4, 16), torch.bool: (6, 8)}
_DLPACK_CUDA, _ANY_INT, _ANY_FLOAT, _ANY_TENSOR = 2, 1, 3, 7
_library = None


class _Any(ctypes.Structure):
    """An argument as tvm-ffi passes it."""

    class Value(ctypes.Union):
        _fields_ = [("integer", ctypes.c_int64), ("number", ctypes.c_double), ("pointer", ctypes.c_void_p)]

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
        _library.load_kernel.restype = ctypes.c_void_p
        _library.set_stream.argtypes = [ctypes.c_void_p]
    return _library


def _load(name: str):
    """The kernel whose code, of the host and of the device, is kernels/<name>.so, as a function of its arguments."""
    library = _open()
    torch.cuda.current_stream().synchronize()  # there is a context now
    path = HERE / "kernels" / f"{name}.so"
    if not path.exists():
        raise RuntimeError(f"{name} was not compiled ahead")
    launch = bytes(int(place) for place in path.with_suffix(".launch").read_text().split())
    kernel = library.load_kernel(device_code(path.read_bytes()), launch, len(launch))
    if kernel is None:
        raise RuntimeError(f"{name}: {library.complaint().decode()}")
    host = ctypes.CDLL(str(path))
    ctypes.c_void_p.in_dll(host, "__tvm_ffi__library_ctx").value = kernel

    def call(*arguments):
        packed, alive = (_Any * len(arguments))(), []
        for place, value in zip(packed, arguments):
            if isinstance(value, torch.Tensor):
                shape, strides = ((ctypes.c_int64 * value.dim())(*numbers) for numbers in (value.shape, value.stride()))
                tensor = _Tensor(value.data_ptr(), _DLPACK_CUDA, value.device.index or 0, value.dim(), *_DLPACK_CODES[value.dtype], 1,
                                 ctypes.addressof(shape), ctypes.addressof(strides), 0)  # fmt: skip
                alive += [shape, strides, tensor]
                place.type_index, place.pointer = _ANY_TENSOR, ctypes.addressof(tensor)
            elif isinstance(value, int):
                place.type_index, place.integer = _ANY_INT, value
            else:
                place.type_index, place.number = _ANY_FLOAT, float(value)
        library.set_stream(torch.cuda.current_stream().cuda_stream)
        if host.__tvm_ffi_main(None, packed, len(arguments), ctypes.byref(_Any())) != 0:
            raise RuntimeError(f"{name}: {library.complaint().decode()}")

    return call


def jit(**_):
    def wrap(build):
        loaded = {}

        def built(*args, **options):
            name = kernel_name(build, args, options)
            if name not in loaded:
                loaded[name] = _load(name)
            return loaded[name]

        return built

    return wrap


def cdiv(a, b):
    return -(-a // b)


def _compute_version(*_) -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability())


contrib = SimpleNamespace(nvcc=SimpleNamespace(get_target_compute_version=_compute_version))


class _Names:
    """Every name of an enumeration, for decorators that are not applied."""

    def __getattr__(self, name: str) -> str:
        return name


PassConfigKey = _Names()
