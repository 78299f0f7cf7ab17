"""A package `fla` of the registry of backends alone, cut out of a released wheel of fla-core.

The registry and fla's own backend for packages called flash_qla are the wheel's files. What they import, and the function
that is dispatched, are stand-ins, so that no Triton is needed.
"""

import zipfile

# fla's hardware flags, as on a Hopper GPU.
UTILS = """
import importlib.util

IS_NVIDIA_HOPPER, IS_NVIDIA_SM100, IS_NVIDIA_SM120 = True, False, False


def find_spec_cached(name):
    return importlib.util.find_spec(name)


def has_usable_nvcc():
    return False
"""

# The dispatched function, with the parameters of fla's. What it returns says that fla's own kernels would have run.
OPERATION = """
from {registry} import dispatch


@dispatch("gated_delta_rule")
def chunk_gated_delta_rule(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                           use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False,
                           state_v_first=False, cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None,
                           **kwargs):
    return "fla", None
"""

# What 0.6 dispatches around the delta rule.
DISPATCHED = """
from fla.backends import dispatch
"""
FUNCTION = """

@dispatch
def {name}(*args, **kwargs):
    return "fla", None
"""
LAYER = {
    "fla/modules/causal_conv1d/__init__.py": ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"),
    "fla/modules/norm/fused_norm_gate.py": ("layer_norm_gated_fwd", "layer_norm_gated_bwd"),
}

BACKENDS = {
    "fla.backends": "from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend\n",
    "fla.ops.backends": """
from fla.ops.backends import BackendRegistry
from fla.ops.gated_delta_rule.backends.flash_qla import FlashQLABackend

BackendRegistry("gated_delta_rule").register(FlashQLABackend())
""",
}


def build(wheel, target):
    """Writes the package into the folder `target`."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        registry = "fla.backends" if "fla/backends.py" in names else "fla.ops.backends"
        file = "fla/backends.py" if registry == "fla.backends" else "fla/ops/backends/__init__.py"
        own = "fla/ops/gated_delta_rule/backends/flash_qla.py"
        files = {name: archive.read(name).decode() for name in (file, own)}
    version = wheel.name.split("-")[1]
    files["fla/__init__.py"] = f'__version__ = "{version}"\n'
    files["fla/utils.py"] = UTILS
    files["fla/ops/__init__.py"] = ""
    files["fla/ops/gated_delta_rule/__init__.py"] = OPERATION.format(registry=registry)
    files["fla/ops/gated_delta_rule/backends/__init__.py"] = BACKENDS[registry]
    if registry == "fla.backends":
        for name, functions in LAYER.items():
            files[name] = DISPATCHED + "".join(FUNCTION.format(name=function) for function in functions)
        files.update({"fla/modules/__init__.py": "", "fla/modules/norm/__init__.py": ""})
    for name, text in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
    return target
