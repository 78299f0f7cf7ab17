#!/usr/bin/env python3
"""Makes the directory of a kernel repository, as Hugging Face's `kernels` loads it, of a wheel of this package.

    tools/hub_kernel.py WHEEL OUT [--version N] [--cuda 13.0]

writes OUT/build/VARIANT, where VARIANT names tvm-ffi's version, the backend, the machine and the system: tvm-ffi01-cu130-
x86_64-linux, or tvm-ffi01-cpu-.. from a wheel of the CPU backend. Wheels for several machines may go into one OUT. Loaded,
it provides the layers chunk_gated_delta_rule and recurrent_gated_delta_rule (flash_qla/integrations/layers.py) and the
package's functions, under a name that no other copy of the package has. docs/engines.md shows how Transformers is told.
"""

import argparse
import base64
import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Dict, List, Tuple

PACKAGE = "flash_qla"
NAME = "flash-qla"  # of the kernel; the folder with the package is called after it

# What a kernel does without: the command line, and what frameworks of their own ask for.
LEFT_OUT = ("__main__.py", "cli/", "integrations/sglang.py", "integrations/vllm.py", "integrations/megatron", "integrations/tensorrt_llm.py")

# GPUs that `kernels` accepts the directory for: those where this package's kernels are the fast ones. It would compute
# correctly on others, more slowly than the kernels that a user has without it.
ARCHITECTURES = ["9.0a"]

IDENTITY = '''"""This copy's name, written by tools/hub_kernel.py."""

NAMESPACE = "{id}"
OFFERS_ITSELF = False
'''
# Appended to the package's own __init__.py, so that the folder exports what the kernel does.
LAYERS = "\nfrom .integrations import layers  # noqa: E402,F401\n"
INIT = f'''"""Gated Delta Network attention on CPUs and NVIDIA GPUs: the kernel {NAME}."""

from .{PACKAGE} import *  # noqa: F403
from .{PACKAGE} import __all__, layers  # noqa: F401
'''


def wheel_files(wheel: Path) -> Tuple[Dict[str, bytes], str]:
    """The package's files by their path in it, and the text of METADATA."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
        inside = [n for n in names if n.startswith(PACKAGE + "/") and not n.endswith("/")]
        files = {n[len(PACKAGE) + 1 :]: archive.read(n) for n in inside}
    return {n: content for n, content in files.items() if not n.startswith(LEFT_OUT)}, metadata


def field(metadata: str, pattern: str) -> str:
    match = re.search(pattern, metadata, re.M)
    if match is None:
        raise SystemExit(f"hub_kernel.py: METADATA has no line {pattern}")
    return match[1]


def backend_of(files: Dict[str, bytes]) -> str:
    """cuda where the native module holds machine code for GPUs."""
    return "cuda" if b".nv_fatbin" in files[f"_lib/{PACKAGE}_ffi.so"] else "cpu"


def variant_name(wheel: Path, metadata: str, backend: str, cuda: str) -> str:
    machine = re.search(r"_(x86_64|aarch64)\.whl$", wheel.name)
    if machine is None:
        raise SystemExit(f"hub_kernel.py: {wheel.name} does not end in the name of a machine")
    major, minor = field(metadata, r"^Requires-Dist: apache-tvm-ffi.*>=(\d+\.\d+)").split(".")
    device = "cpu" if backend == "cpu" else "cu" + cuda.replace(".", "")
    return f"tvm-ffi{major}{minor}-{device}-{machine[1]}-linux"


def digests(files: Dict[str, bytes]) -> Dict[str, str]:
    return {name: base64.b64encode(hashlib.sha256(files[name]).digest()).decode() for name in sorted(files)}


def kernel_files(files: Dict[str, bytes], metadata: str, version: int, backend: str) -> Dict[str, bytes]:
    """The files of the variant's folder. The kernel's id is of the content: another build has another one."""
    content = hashlib.sha256(json.dumps(digests(files), sort_keys=True).encode()).hexdigest()
    identifier = f"_{PACKAGE}_{backend}_{content[:12]}"
    out = {f"{PACKAGE}/{name}": text for name, text in files.items()}
    out[f"{PACKAGE}/_identity.py"] = IDENTITY.format(id=identifier).encode()
    out[f"{PACKAGE}/__init__.py"] += LAYERS.encode()
    out["__init__.py"] = INIT.encode()
    described: Dict[str, object] = {
        "id": identifier,
        "name": NAME,
        "version": version,
        "license": field(metadata, r"^License-Expression: (.+)$"),
        "python-depends": ["tvm-ffi"],
        "backend": {"type": backend, **({"archs": ARCHITECTURES} if backend == "cuda" else {})},
        "digest": {"algorithm": "sha256", "files": digests(out)},
    }
    out["metadata.json"] = (json.dumps(described, indent=2) + "\n").encode()
    return out


def build(wheel: Path, out: Path, version: int, cuda: str) -> Path:
    """Writes OUT/build/VARIANT anew and returns it."""
    files, metadata = wheel_files(wheel)
    backend = backend_of(files)
    folder = out / "build" / variant_name(wheel, metadata, backend, cuda)
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in kernel_files(files, metadata, version, backend).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def main(arguments: "List[str] | None" = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", type=int, default=1, help="of the kernel repository: what users name (1)")
    parser.add_argument("--cuda", default="13.0", help="the toolkit that built the wheel (13.0)")
    given = parser.parse_args(arguments)
    print(build(given.wheel, given.out, given.version, given.cuda))


if __name__ == "__main__":
    main()
