"""The Triton operations that vLLM and SGLang carry, on the rows of the serving modes. They run from the engines' Python
files alone, installed or in a folder: what those files import of the rest of an engine is replaced by the little that
they use. This file needs torch and triton alone: bench_peers.py uses it in another process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.metadata
import sys
import types
from typing import Any, Callable, Dict, Iterator, NamedTuple, Tuple

import torch

Inputs = Dict[str, Any]

_DIM = 128
_CHUNK = 64


class Way(NamedTuple):
    """A way of calling an engine's operation: run(pool) returns what results(pool, of it) names as ours are named."""

    name: str
    pool: Callable[[], torch.Tensor]  # a new one, in the state before the call
    run: Callable[[torch.Tensor], Any]
    results: Callable[[torch.Tensor, Any], Dict[str, Any]]


def _folder(package: str) -> str:
    """Where a package lies; it is not imported."""
    spec = importlib.machinery.PathFinder.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    return next(iter(spec.submodule_search_locations))


def _hollow(name: str, path: str) -> None:
    """A package whose modules are found at `path`, and whose own file is not run."""
    module = types.ModuleType(name)
    module.__path__ = [path]
    sys.modules[name] = module


def _stand_in(name: str, **members: Any) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)


def _hollow_all(package: str, below: Tuple[str, ...]) -> None:
    root = _folder(package)
    _hollow(package, root)
    for name in below:
        _hollow(f"{package}.{name}", f"{root}/{name.replace('.', '/')}")


# --- vLLM ---


def _vllm_operations() -> Any:
    """The modules of vllm.third_party.flash_linear_attention.ops that are used here, by their names."""
    ops = "vllm.third_party.flash_linear_attention.ops"
    if ops not in sys.modules:
        import triton
        import triton.language as tl

        _hollow_all("vllm", ("utils", "third_party", "third_party.flash_linear_attention", ops.partition(".")[2]))
        platform = types.SimpleNamespace(
            is_cuda=lambda: True,
            is_cuda_alike=lambda: True,
            is_rocm=lambda: False,
            is_xpu=lambda: False,
            is_device_capability_family=lambda family, device_id=0: _capability()[0] == family // 10,
            is_arch_support_pdl=lambda: _capability()[0] >= 9,
        )
        _stand_in("vllm.platforms", current_platform=platform)
        _stand_in("vllm.triton_utils", triton=triton, tl=tl, tldevice=None)
        _stand_in("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
        _stand_in(
            "vllm.utils.torch_utils",
            async_tensor_h2d=lambda data, device, dtype=None: torch.as_tensor(data).to(device=device, dtype=dtype),
        )
    names = ("chunk", "fused_gdn_prefill_post_conv", "fused_recurrent", "fused_sigmoid_gating", "index")
    return types.SimpleNamespace(**{name: importlib.import_module(f"{ops}.{name}") for name in names})


def _capability() -> Tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def _vllm(row: Dict[str, Any], x: Inputs) -> Iterator[Way]:
    ops = _vllm_operations()
    version, mode = f"vllm {importlib.metadata.version('vllm')}", row["mode"]
    if mode == "prefill":
        yield _vllm_prefill(version, row, x, ops)
    elif mode == "steps":
        yield _packed_step(version, row, x, ops.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode)
    elif not row["option"]:
        yield _vllm_verify(version, row, x, ops)


def _vllm_prefill(name: str, row: Dict[str, Any], x: Inputs, ops: Any) -> Way:
    """The steps of its layer behind the convolution; where the batch begins is found before, as its metadata does."""
    offsets, slots = x["cu_seqlens"], x["slots"].long()
    chunks = ops.index.prepare_chunk_indices(offsets, _CHUNK), ops.index.prepare_chunk_offsets(offsets, _CHUNK)
    starts_anew = torch.zeros(len(slots), 1, 1, 1, dtype=torch.bool, device=slots.device)

    def run(pool: torch.Tensor) -> Any:
        prepared = ops.fused_gdn_prefill_post_conv.fused_post_conv_prep(
            conv_output=x["mixed"],
            a=x["a"][0],
            b=x["b"][0],
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            num_k_heads=row["hq"],
            head_k_dim=_DIM,
            head_v_dim=_DIM,
            apply_l2norm=True,
            output_g_exp=False,
        )
        q, k, v, g, beta = (t[None] for t in prepared)
        o, final = ops.chunk.chunk_gated_delta_rule(
            q=q,
            k=k,
            v=v,
            g=g,
            beta=beta,
            initial_state=pool[slots].masked_fill_(starts_anew, 0),
            output_final_state=True,
            cu_seqlens=offsets,
            chunk_indices=chunks[0],
            chunk_offsets=chunks[1],
            use_qk_l2norm_in_kernel=False,
        )
        pool[slots] = final.to(pool.dtype)
        return o

    return Way(name, x["h0"].clone, run, lambda pool, o: {"o": o, "final_state": pool})


def _vllm_verify(name: str, row: Dict[str, Any], x: Inputs, ops: Any) -> Way:
    """Every token has a slot of the pool, into which the state after it goes; the sequence's is its first token's."""
    count, tokens = x["q"].shape[:2]
    slots = torch.arange(count * tokens, device=x["q"].device, dtype=torch.int32).view(count, tokens) + 1
    accepted = torch.ones(count, dtype=torch.int32, device=slots.device)

    def pool() -> torch.Tensor:
        made = x["h0"].new_zeros(count * tokens + 1, *x["h0"].shape[1:])
        made[slots[:, 0].long()] = x["h0"][x["slots"].long()]
        return made

    def run(pool: torch.Tensor) -> Any:
        o, _ = ops.fused_sigmoid_gating.fused_sigmoid_gating_delta_rule_update(
            A_log=x["A_log"],
            a=x["a"].flatten(0, 1),
            b=x["b"].flatten(0, 1),
            dt_bias=x["dt_bias"],
            q=x["q"].flatten(0, 1)[None],
            k=x["k"].flatten(0, 1)[None],
            v=x["v"].flatten(0, 1)[None],
            initial_state=pool,
            inplace_final_state=True,
            cu_seqlens=x["cu_seqlens"],
            ssm_state_indices=slots,
            num_accepted_tokens=accepted,
            use_qk_l2norm_in_kernel=True,
        )
        return o

    return Way(name, pool, run, lambda pool, o: {"o": o.view(count, tokens, *o.shape[2:]), "h": pool[1:]})


# --- SGLang ---


def _sglang_operations() -> Any:
    attention = "sglang.kernels.ops.attention"
    if attention not in sys.modules:
        parts = ("kernels.ops.attention.fla", "kernels.ops.attention.linear")
        _hollow_all("sglang", ("kernels", "kernels.ops", "kernels.ops.attention", *parts))
        no = dict.fromkeys(("is_cpu", "is_hip", "is_npu", "is_xpu", "is_musa", "is_gfx95_supported"), lambda *_: False)
        release = tuple(int(part) for part in torch.__version__.partition("+")[0].split(".")[:2])
        supports_pdl = lambda: _capability()[0] >= 9  # noqa: E731
        _stand_in("sglang.srt")
        capability = lambda: 10 * _capability()[0] + _capability()[1]  # noqa: E731
        yes = {"is_cuda": lambda: True, "is_sm90_supported": supports_pdl, "get_device_sm": capability}
        _stand_in("sglang.srt.utils", **no, **yes)
        _stand_in("sglang.srt.utils.common", torch_release=release)
        _stand_in("sglang.kernels.jit")
        _stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=supports_pdl)
    named = {
        "chunk": "fla.chunk",
        "fused_recurrent": "fla.fused_recurrent",
        "gating": "linear.fused_gdn_gating",
        "fused_sigmoid": "linear.fused_sigmoid_gating_recurrent",
    }
    return types.SimpleNamespace(**{n: importlib.import_module(f"{attention}.{m}") for n, m in named.items()})


def _sglang(row: Dict[str, Any], x: Inputs) -> Iterator[Way]:
    ops = _sglang_operations()
    version, mode = f"sglang {importlib.metadata.version('sglang')}", row["mode"]
    if mode == "prefill":
        yield Way(version, x["h0"].clone, _sglang_prefill(x, ops), lambda pool, o: {"o": o, "final_state": pool})
    elif mode == "steps":
        yield _packed_step(version, row, x, ops.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode)
    else:
        yield _sglang_verify(version, x, ops)


def _sglang_prefill(x: Inputs, ops: Any) -> Callable[[torch.Tensor], Any]:
    def run(pool: torch.Tensor) -> Any:
        g, beta = ops.gating.fused_gdn_gating(x["A_log"], x["a"][0], x["b"][0], x["dt_bias"])
        found = ops.chunk.chunk_gated_delta_rule(
            q=x["q"],
            k=x["k"],
            v=x["v"],
            g=g,
            beta=beta,
            initial_state=pool,
            initial_state_indices=x["slots"],
            cu_seqlens=x["cu_seqlens"],
            head_first=False,
            use_qk_l2norm_in_kernel=True,
            inplace_update=True,
        )
        return found[0]

    return run


def _sglang_verify(name: str, x: Inputs, ops: Any) -> Way:
    count, tokens = x["q"].shape[:2]
    states = x["h0"].new_empty(count, tokens, *x["h0"].shape[1:])
    rows = torch.arange(count, device=states.device, dtype=torch.int32)

    def run(pool: torch.Tensor) -> Any:
        return ops.fused_sigmoid.fused_sigmoid_gating_delta_rule_update(
            A_log=x["A_log"],
            a=x["a"].flatten(0, 1),
            dt_bias=x["dt_bias"],
            softplus_beta=1.0,
            softplus_threshold=20.0,
            q=x["q"].flatten(0, 1)[None],
            k=x["k"].flatten(0, 1)[None],
            v=x["v"].flatten(0, 1)[None],
            b=x["b"].flatten(0, 1),
            initial_state_source=pool,
            initial_state_indices=x["slots"],
            cu_seqlens=x["cu_seqlens"],
            use_qk_l2norm_in_kernel=True,
            disable_state_update=True,
            intermediate_states_buffer=states,
            intermediate_state_indices=rows,
            cache_steps=tokens,
            retrieve_parent_token=x.get("parents"),
        )

    def results(_: torch.Tensor, o: Any) -> Dict[str, Any]:
        return {"o": o.view(count, tokens, *o.shape[-2:]), "h": states.flatten(0, 1)}

    return Way(name, lambda: x["h0"], run, results)


# --- both ---


def _packed_step(name: str, row: Dict[str, Any], x: Inputs, operation: Any) -> Way:
    count, hv = len(x["slots"]), row["hv"]

    def run(pool: torch.Tensor) -> Any:
        out = x["mixed"].new_empty(count, 1, hv, _DIM)
        operation(
            mixed_qkv=x["mixed"],
            a=x["a"][:, 0],
            b=x["b"][:, 0],
            A_log=x["A_log"],
            dt_bias=x["dt_bias"],
            scale=_DIM**-0.5,
            initial_state=pool,
            out=out,
            ssm_state_indices=x["slots"],
            use_qk_l2norm_in_kernel=True,
        )
        return out

    return Way(name, x["h0"].clone, run, lambda pool, o: {"o": o, "final_state": pool})


def _flashinfer(row: Dict[str, Any], x: Inputs) -> Iterator[Way]:
    """Its decode, with the gates and norms in the kernel."""
    if row["mode"] != "steps":
        return
    from flashinfer.gdn_decode import gated_delta_rule_decode_pretranspose

    def run(pool: torch.Tensor) -> Any:
        o, _ = gated_delta_rule_decode_pretranspose(
            x["q"],
            x["k"],
            x["v"],
            None,
            A_log=x["A_log"],
            a=x["a"],
            dt_bias=x["dt_bias"],
            b=x["b"],
            scale=_DIM**-0.5,
            output=torch.empty_like(x["v"]),
            use_qk_l2norm=True,
            initial_state=pool,
            initial_state_indices=x["slots"],
        )
        return o

    version = f"flashinfer {importlib.metadata.version('flashinfer-python')}"
    yield Way(version, x["h0"].clone, run, lambda pool, o: {"o": o, "final_state": pool})


ENGINES: Dict[str, Callable[[Dict[str, Any], Inputs], Iterator[Way]]] = {
    "flashinfer": _flashinfer,
    "sglang": _sglang,
    "vllm": _vllm,
}
