#!/usr/bin/env python3
"""The functions of engines that our adapters replace, call or are called as: recorded from released wheels, and compared.

    tools/engine_contracts.py fetch FOLDER [ENGINE ...]   downloads the wheels named here and unpacks their Python
    tools/engine_contracts.py write FOLDER                records their signatures in tests/data/engines.json
    tools/engine_contracts.py check                       compares the adapters in python/flash_qla with that file

For a new release: change its version in RELEASES, fetch, write, and look at the difference; then tests/engines with
FLASH_QLA_ENGINES=FOLDER, and the adapter's KNOWN_VERSIONS. Nothing of the engines is imported or kept in the repository.
"""

import argparse
import ast
import itertools
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "data" / "engines.json"
OURS = ROOT / "python" / "flash_qla"

# Folder: the release.
RELEASES = {
    "vllm": "vllm==0.33.0",
    "sglang": "sglang==0.5.23",
    "megatron": "megatron-core==0.19.2",
    "kernels": "kernels==0.17.2",
    "fla-core": "fla-core==0.6.0",
    "transformers": "transformers==5.23.0",
}

_GDN = "vllm/model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py"
_LINEAR = "sglang/srt/layers/attention/linear"
_FLA = "fla/ops/gated_delta_rule"
_QWEN = "transformers/models/qwen3_5/modeling_qwen3_5.py"

# Folder: file -> names in it. Of a function its parameters are recorded, of a class its fields or members, of anything else
# its value.
NAMES: Dict[str, Dict[str, List[str]]] = {
    "vllm": {
        "vllm/model_executor/custom_op.py": ["op_registry_oot", "CustomOp.register_oot", "PluggableLayer.register_oot"],
        _GDN: [
            "ChunkGatedDeltaRule.__init__",
            "ChunkGatedDeltaRule.forward_native",
            "QwenGatedDeltaNetAttention.__init__",
            "QwenGatedDeltaNetAttention._forward_core",
            "QwenGatedDeltaNetAttention._warmup_prefill_kernels",
        ],
        "vllm/model_executor/layers/mamba/checkpoint.py": [
            "MambaPrefillCheckpointExporter",
            "MambaPrefillCheckpointExporter.export",
            "MambaPrefillCheckpointMetadata",
        ],
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py": ["causal_conv1d_fn"],
        "vllm/v1/attention/backends/gdn_attn.py": ["FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", "GDNAttentionMetadata"],
        "vllm/v1/attention/backends/utils.py": ["NULL_BLOCK_ID"],
    },
    "sglang": {
        "sglang/srt/plugins/hook_registry.py": ["HookType", "HookRegistry.register"],
        "sglang/srt/arg_groups/choices.py": ["add_linear_attn_kernel_backend_choices"],
        f"{_LINEAR}/utils.py": ["LinearAttnKernelBackend"],
        f"{_LINEAR}/gdn_backend.py": ["GDNKernelDispatcher.__init__"],
        f"{_LINEAR}/kernels/kernel_backend.py": ["LinearAttnKernelBase.decode", "LinearAttnKernelBase.extend"],
        f"{_LINEAR}/kernels/gdn_triton.py": [
            "TritonGDNKernel.decode",
            "TritonGDNKernel.extend",
            "TritonGDNKernel.packed_decode",
            "TritonGDNKernel.target_verify",
        ],
    },
    "megatron": {"megatron/core/ssm/gated_delta_net/common.py": ["torch_chunk_gated_delta_rule"]},
    "kernels": {"kernels/layer/layer.py": ["LayerRepository.__init__", "LocalLayerRepository.__init__"]},
    "fla-core": {
        "fla/backends.py": ["BackendRegistry.register"],
        f"{_FLA}/chunk.py": ["chunk_gated_delta_rule"],
        f"{_FLA}/fused_recurrent.py": ["fused_recurrent_gated_delta_rule"],
        f"{_FLA}/backends/flash_qla.py": [
            "FlashQLABackend.chunk_gated_delta_rule",
            "FlashQLABackend.chunk_gated_delta_rule_verifier",
        ],
    },
    "transformers": {_QWEN: ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"]},
}

# What no wheel has that could be had here: written down by hand from files of the repositories, at these commits.
BY_HAND: Dict[str, Dict[str, Any]] = {
    "tensorrt-llm": {
        "version": "files of the repository, August and September 2026",
        "names": {
            "tensorrt_llm/_torch/modules/fla/flashinfer_chunk.py:chunk_gated_delta_rule": [
                "q", "k", "v", "g", "beta", "scale=None", "initial_state=None", "initial_state_indices=None",
                "inplace_indexed_state_update=False", "output_final_state=False", "cu_seqlens=None", "head_first=False",
                "use_qk_l2norm_in_kernel=False", "output=None",
            ],
            "tensorrt_llm/_torch/modules/mamba/gdn_mixer.py:_resolve_chunk_gated_delta_rule": [],
            "tensorrt_llm/_torch/modules/mamba/gdn_mixer.py:_gdn_prefill_uses_flashinfer": [],
        },
    },
    "megatron-main": {
        "version": "files of the main branch, August and September 2026",
        "names": {
            "megatron/core/models/backends.py:BackendSpecProvider.gated_delta_rule": ["self", "variant", "deterministic=False"],
            "megatron/core/ops/ssm/gated_delta/__init__.py:GatedDeltaRuleInterface.__call__": [
                "self", "q", "k", "v", "g", "*", "scale=None", "initial_state=None", "output_final_state=False",
                "use_qk_l2norm_in_kernel=False", "cu_seqlens=None", "**kwargs",
            ],
        },
    },
}  # fmt: skip

_VLLM, _SGLANG, _FLA_ADAPTER = "integrations/vllm.py", "integrations/sglang.py", "integrations/fla.py"
_KERNEL = f"{_SGLANG}:_kernel_class.FlashQLAGDNKernel"
_BACKEND = f"{_FLA_ADAPTER}:_backend_class.FlashQLANativeBackend"
_LAYERS, _TRANSFORMERS = "integrations/layers.py", "integrations/transformers.py"

# (folder, theirs, ours): ours is called as theirs is, so that it has to take what theirs takes.
REPLACED: List[Tuple[str, str, str]] = [
    ("vllm", f"{_GDN}:ChunkGatedDeltaRule.forward_native", f"{_VLLM}:_operation_class.FlashQLAChunkGatedDeltaRule.forward_flash_qla"),
    ("vllm", f"{_GDN}:ChunkGatedDeltaRule.__init__", f"{_VLLM}:_operation_class.FlashQLAChunkGatedDeltaRule.__init__"),
    *(
        ("vllm", f"{_GDN}:QwenGatedDeltaNetAttention.{name}", f"{_VLLM}:_layer_class.FlashQLAQwenGatedDeltaNetAttention.{name}")
        for name in ("__init__", "_forward_core", "_warmup_prefill_kernels")
    ),
    *(
        ("sglang", f"{_LINEAR}/kernels/gdn_triton.py:TritonGDNKernel.{name}", f"{_KERNEL}.{name}")
        for name in ("decode", "extend", "packed_decode", "target_verify")
    ),
    *(
        ("sglang", f"{_LINEAR}/kernels/kernel_backend.py:LinearAttnKernelBase.{name}", f"{_KERNEL}.{name}")
        for name in ("decode", "extend")
    ),
    *(
        ("fla-core", f"{_FLA}/chunk.py:chunk_gated_delta_rule", f"{_BACKEND}.{name}")
        for name in ("chunk_gated_delta_rule", "chunk_gated_delta_rule_verifier")
    ),
    ("transformers", f"{_QWEN}:torch_chunk_gated_delta_rule", f"{_TRANSFORMERS}:chunk"),
    ("transformers", f"{_QWEN}:torch_recurrent_gated_delta_rule", f"{_TRANSFORMERS}:recurrent"),
    ("transformers", f"{_QWEN}:torch_chunk_gated_delta_rule", f"{_LAYERS}:chunk_gated_delta_rule.forward"),
    ("transformers", f"{_QWEN}:torch_recurrent_gated_delta_rule", f"{_LAYERS}:recurrent_gated_delta_rule.forward"),
    (
        "tensorrt-llm",
        "tensorrt_llm/_torch/modules/fla/flashinfer_chunk.py:chunk_gated_delta_rule",
        "integrations/tensorrt_llm.py:_adapter.chunk_gated_delta_rule",
    ),
    (
        "megatron-main",
        "megatron/core/ops/ssm/gated_delta/__init__.py:GatedDeltaRuleInterface.__call__",
        "integrations/megatron_provider.py:_rule.chunk_gated_delta_rule",
    ),
    (
        "megatron-main",
        "megatron/core/models/backends.py:BackendSpecProvider.gated_delta_rule",
        "integrations/megatron_provider.py:GatedDeltaProvider.gated_delta_rule",
    ),
]

# (folder, theirs, positional arguments, keywords): calls that ours make.
CALLED: List[Tuple[str, str, int, Tuple[str, ...]]] = [
    ("vllm", "vllm/model_executor/custom_op.py:CustomOp.register_oot", 0, ("name",)),
    ("vllm", "vllm/model_executor/custom_op.py:PluggableLayer.register_oot", 0, ("name",)),
    (
        "vllm",
        "vllm/model_executor/layers/mamba/ops/causal_conv1d.py:causal_conv1d_fn",
        3,
        ("activation", "conv_states", "has_initial_state", "cache_indices", "query_start_loc", "metadata"),
    ),
    (
        "vllm",
        "vllm/model_executor/layers/mamba/checkpoint.py:MambaPrefillCheckpointExporter.export",
        1,
        ("raw_qkv", "conv_state", "cu_seqlens"),
    ),
    ("sglang", "sglang/srt/plugins/hook_registry.py:HookRegistry.register", 3, ()),
    ("sglang", "sglang/srt/arg_groups/choices.py:add_linear_attn_kernel_backend_choices", 1, ()),
    ("sglang", f"{_LINEAR}/gdn_backend.py:GDNKernelDispatcher.__init__", 3, ()),
    ("fla-core", "fla/backends.py:BackendRegistry.register", 1, ()),
    ("kernels", "kernels/layer/layer.py:LayerRepository.__init__", 1, ("layer_name", "revision")),
]

# (folder, theirs, fields, members or parts of a value that ours use).
USED: List[Tuple[str, str, Tuple[str, ...]]] = [
    (
        "vllm",
        "vllm/v1/attention/backends/gdn_attn.py:GDNAttentionMetadata",
        (
            "checkpoint", "has_initial_state", "non_spec_query_start_loc", "non_spec_state_indices_tensor",
            "num_actual_tokens", "num_decode_tokens", "num_decodes", "num_prefills", "prefill_has_initial_state",
            "prefill_query_start_loc", "prefill_state_indices", "spec_sequence_masks",
        ),
    ),
    ("vllm", "vllm/model_executor/layers/mamba/checkpoint.py:MambaPrefillCheckpointExporter", ("state_len",)),
    ("vllm", "vllm/model_executor/layers/mamba/checkpoint.py:MambaPrefillCheckpointMetadata", ("checkpoint_offsets", "state_indices")),
    ("vllm", "vllm/v1/attention/backends/utils.py:NULL_BLOCK_ID", ("0",)),
    ("vllm", "vllm/v1/attention/backends/gdn_attn.py:FLASHINFER_GDN_CHECKPOINT_ALIGNMENT", ("64",)),
    ("sglang", "sglang/srt/plugins/hook_registry.py:HookType", ("AROUND",)),
    ("sglang", f"{_LINEAR}/utils.py:LinearAttnKernelBackend", ("TRITON",)),
]  # fmt: skip


# --- reading ---


def find(tree: ast.AST, path: List[str]) -> Optional[ast.AST]:
    """The class, function or assignment that a dotted name means, in modules, classes and functions."""
    for node in getattr(tree, "body", []):
        if isinstance(node, (ast.If, ast.Try)):
            found = find(node, path)
            if found is not None:
                return found
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == path[0]:
            return node if len(path) == 1 else find(node, path[1:])
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if len(path) == 1 and any(isinstance(target, ast.Name) and target.id == path[0] for target in targets):
            return node
    return None


def parameters(function: Any) -> List[str]:
    """As they are written, without annotations."""
    a = function.args
    positional = a.posonlyargs + a.args
    defaults = [None] * (len(positional) - len(a.defaults)) + list(a.defaults)
    out = [_with_default(x.arg, default) for x, default in zip(positional, defaults)]
    if a.posonlyargs:
        out.insert(len(a.posonlyargs), "/")
    if a.vararg is not None:
        out.append("*" + a.vararg.arg)
    elif a.kwonlyargs:
        out.append("*")
    out += [_with_default(x.arg, default) for x, default in zip(a.kwonlyargs, a.kw_defaults)]
    return out + (["**" + a.kwarg.arg] if a.kwarg is not None else [])


def _with_default(name: str, default: Optional[ast.expr]) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def described(node: Any) -> List[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return parameters(node)
    if isinstance(node, ast.ClassDef):
        fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)]
        members = [t.id for x in node.body if isinstance(x, ast.Assign) for t in x.targets if isinstance(t, ast.Name)]
        return fields + members
    return [ast.unparse(node.value)]


def read(root: Path, key: str) -> List[str]:
    """`key`: FILE:NAME, the file below `root`."""
    file, _, name = key.rpartition(":")
    node = find(ast.parse((root / file).read_text()), name.split("."))
    if node is None:
        raise SystemExit(f"engine_contracts.py: {root / file} has no {name}")
    return described(node)


# --- comparing ---


def _split(signature: List[str]) -> Tuple[List[Tuple[str, Optional[str]]], Dict[str, Optional[str]], bool, bool]:
    """(positional parameters, keywords, whether there is *args, whether there is **kwargs), each with its default. What a
    method is bound to is none of them."""
    signature = signature[signature[:1] in (["self"], ["cls"]) :]
    positional: List[Tuple[str, Optional[str]]] = []
    keywords: Dict[str, Optional[str]] = {}
    behind_star = has_args = has_kwargs = False
    for text in signature:
        if text == "/":
            continue
        if text.startswith("**"):
            has_kwargs = True
        elif text.startswith("*"):
            behind_star, has_args = True, text != "*"
        else:
            name, equals, default = text.partition("=")
            value = default if equals else None
            if behind_star:
                keywords[name] = value
            else:
                positional.append((name, value))
    return positional, keywords, has_args, has_kwargs


def not_taken(theirs: List[str], ours: List[str]) -> Iterator[str]:
    """Why a call of theirs would fail, or mean something else, as a call of ours."""
    their_positional, their_keywords, _, _ = _split(theirs)
    our_positional, our_keywords, takes_args, takes_kwargs = _split(ours)
    by_name = dict(our_positional) | our_keywords
    for i, (name, default) in enumerate(their_positional):
        if i < len(our_positional) and our_positional[i][0] == name:
            yield from _other_default(name, default, our_positional[i][1])
        elif not (i >= len(our_positional) and takes_args and (name in by_name or takes_kwargs)):
            yield f"parameter {i} is {name}, ours {our_positional[i][0] if i < len(our_positional) else 'none'}"
    for name, default in their_keywords.items():
        if name in by_name:
            yield from _other_default(name, default, by_name[name])
        elif not takes_kwargs:
            yield f"ours has no keyword {name}"
    their_names = {name for name, _ in their_positional} | set(their_keywords)
    for name, default in itertools.chain(our_positional, our_keywords.items()):
        if name not in their_names and default is None:
            yield f"ours needs {name}"


def _other_default(name: str, theirs: Optional[str], ours: Optional[str]) -> Iterator[str]:
    """Ours may have a default where theirs has none, and None where a default of theirs is found out by ours."""
    if theirs is not None and ours != theirs and ours != "None":
        yield f"{name} is {theirs} where it is left out, in ours {ours or 'needed'}"


def not_callable(theirs: List[str], count: int, keywords: Tuple[str, ...]) -> Iterator[str]:
    """Why a call with so many positional arguments and these keywords fails."""
    positional, by_keyword, takes_args, takes_kwargs = _split(theirs)
    if count > len(positional) and not takes_args:
        yield f"takes {len(positional)} positional arguments, and we pass {count}"
    names = {name for name, _ in positional[count:]} | set(by_keyword)
    if not takes_kwargs:
        yield from (f"has no keyword {name}" for name in keywords if name not in names)
    needed = [name for name, default in positional[count:] + list(by_keyword.items()) if default is None]
    yield from (f"needs {name}" for name in needed if name not in keywords)


def problems(record: Dict[str, Any], ours: Path = OURS) -> List[str]:
    """What in our adapters does not fit what the record says of the engines."""
    found = []

    def theirs(folder: str, key: str) -> List[str]:
        signature: List[str] = record[folder]["names"][key]
        return signature

    for folder, key, own in REPLACED:
        found += [f"{own} for {key}: {text}" for text in not_taken(theirs(folder, key), read(ours, own))]
    for folder, key, count, keywords in CALLED:
        found += [f"{key}: {text}" for text in not_callable(theirs(folder, key), count, keywords)]
    for folder, key, used in USED:
        found += [f"{key} has no {name}" for name in used if name not in theirs(folder, key)]
    return found


# --- commands ---


def fetch(folder: Path, engines: List[str]) -> None:
    for engine in engines or list(RELEASES):
        with tempfile.TemporaryDirectory() as temporary:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--ignore-requires-python"]
            subprocess.run([*command, "--only-binary=:all:", "-d", temporary, RELEASES[engine]], check=True)
            (wheel,) = Path(temporary).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                wanted = [n for n in archive.namelist() if n.endswith(".py") or ".dist-info/" in n]
                archive.extractall(folder / engine, wanted)


def recorded(folder: Path) -> Dict[str, Any]:
    """What tests/data/engines.json holds, of releases in `folder`."""
    record: Dict[str, Any] = {}
    for engine, release in RELEASES.items():
        version = release.partition("==")[2]
        if not list((folder / engine).glob(f"*-{version}.dist-info")):
            raise SystemExit(f"engine_contracts.py: {folder / engine} is not {release}: fetch it")
        keys = [f"{file}:{name}" for file, names in NAMES[engine].items() for name in names]
        record[engine] = {"version": version, "names": {key: read(folder / engine, key) for key in keys}}
    return {**record, **BY_HAND}


def main(arguments: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=["fetch", "write", "check"])
    parser.add_argument("folder", type=Path, nargs="?", help="with the engines' Python: fetch makes it, write reads it")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(RELEASES)} (fetch: all)")
    given = parser.parse_args(arguments)
    if given.command == "check":
        found = problems(json.loads(RECORD.read_text()))
        print("\n".join(found) or f"{len(REPLACED)} functions, {len(CALLED)} calls and {len(USED)} classes fit")
        raise SystemExit(1 if found else 0)
    if given.folder is None:
        parser.error(f"{given.command} needs a folder")
    if given.command == "fetch":
        fetch(given.folder, given.engines)
    else:
        RECORD.write_text(json.dumps(recorded(given.folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
