"""FlashInfer's gated delta rule with kernels that were compiled ahead (fi.so): its own Python chooses and launches them.

The CuTe DSL is not here; importing the files that hold the kernels' source meets it all the same."""

import ctypes
import sys
import types
from importlib.machinery import ModuleSpec

import tvm_ffi  # before the modules below are there, for it asks those of that name


class Anything(types.ModuleType):
    """Every name, call, base class and operator of the DSL that is met on import; none is used after it."""

    __path__ = []

    def __init__(self, name: str):
        super().__init__(name)
        self.__dict__["names"] = {}

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return self.names.setdefault(name, Anything(f"{self.__name__}.{name}"))

    def __call__(self, *args, **options):
        if len(args) == 1 and isinstance(args[0], types.FunctionType):
            return args[0]  # a decorator
        return Anything(f"{self.__name__}()")

    def __getitem__(self, key):
        return Anything(f"{self.__name__}[]")

    def __mro_entries__(self, bases):
        return ()

    def __or__(self, other):
        return self

    __ror__ = __or__

    def __hash__(self):
        return id(self)


class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return ModuleSpec(name, Finder, is_package=True) if name.split(".")[0] == "cutlass" else None

    @staticmethod
    def create_module(spec):
        parent, _, name = spec.name.rpartition(".")
        return getattr(sys.modules[parent], name) if parent else Anything(spec.name)

    @staticmethod
    def exec_module(module):
        pass


sys.meta_path.insert(0, Finder)

# Of CUDA's Python bindings only the type of a stream is met.
for _name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
    sys.modules[_name] = types.ModuleType(_name)
    sys.modules[_name].__path__ = []
sys.modules["cuda.bindings.driver"].CUstream = ctypes.c_void_p
sys.modules["cuda.bindings"].driver = sys.modules["cuda.bindings.driver"]
sys.modules["cuda"].bindings = sys.modules["cuda.bindings"]
