"""The wheel's build backend: scikit-build-core, plus CUDA's compiler from PyPI where the machine has none.

FLASH_QLA_CUDA in the environment decides, as in CMake: OFF asks for no compiler, ON and AUTO (the default) ask for the
packages unless nvcc is on PATH.
"""

import os
import platform
import shutil

import scikit_build_core.build as _backend
from scikit_build_core.build import *  # noqa: F403  (the hooks of PEP 517 and PEP 660)

# The same packages stand in cmake/FlashQlaCuda.cmake. 13.0 is the newest release whose binaries run on the R580 driver.
NVCC_PACKAGES = [
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
]


def require_linux() -> None:
    """CMake says it too, but asks for a compiler first."""
    if platform.system() != "Linux":
        raise SystemExit(f"flash-qla-native can be built on Linux alone, and this is {platform.system()}.")


def compiler_packages() -> list:
    """What must be installed so that CMake finds a CUDA compiler; empty where none is wanted or one is there."""
    if os.environ.get("FLASH_QLA_CUDA", "AUTO").upper() in ("OFF", "0", "NO", "FALSE"):
        return []
    if shutil.which("nvcc"):
        return []
    return NVCC_PACKAGES


def get_requires_for_build_wheel(config_settings=None):
    require_linux()
    return _backend.get_requires_for_build_wheel(config_settings) + compiler_packages()


def get_requires_for_build_editable(config_settings=None):
    require_linux()
    return _backend.get_requires_for_build_editable(config_settings) + compiler_packages()


if __name__ == "__main__":
    # For tools/setup.sh, which builds without isolation: the packages above, and CMake and Ninja where they are missing.
    for requirement in get_requires_for_build_wheel():
        print(requirement)
