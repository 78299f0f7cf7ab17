"""SGLang: a kernel for the linear attention of its GDN models, by the entry point `sglang.srt.plugins`.

SGLang calls register() in each of its processes. From then on `flash_qla` is a choice of `--linear-attn-backend`,
`--linear-attn-prefill-backend` and `--linear-attn-decode-backend`: states are read and written in SGLang's pool in the
dtype that they have, prefill leaves the states that the radix cache asks for, and the gates, sigmoid and norms of a
decode step are computed in the kernel. SGLang's defaults stay as they are: the flag asks for this library.

Verification of draft tokens (chains and trees) has a kernel too, but `--linear-attn-verify-backend` cannot name it: its
list of choices is a copy, made before a plugin can add to it. Where arguments do not come from a command line
(`sglang.Engine(linear_attn_verify_backend="flash_qla")`) the name works, and FLASH_QLA_SGLANG=verify asks for it in
either case.

FLASH_QLA_SGLANG=0 turns it off, FLASH_QLA_SGLANG=1 also tries versions of SGLang that are not known here.
FLASH_QLA_AUTO_CP is auto_cp (1, 0 or invariant); --enable-deterministic-inference makes it 0."""

from __future__ import annotations

import importlib
import logging
import os
from typing import Any, Callable, Dict, Optional, Tuple

from . import _engines

__all__ = ["register", "status"]

NAME = "flash_qla"  # of the backend
SWITCH = "FLASH_QLA_SGLANG"
KNOWN_VERSIONS = ("0.5.23",)

_CHOICES = "sglang.srt.arg_groups.choices"
_HOOKS = "sglang.srt.plugins.hook_registry"
_CONTEXT = "sglang.srt.runtime_context"
_KERNELS = "sglang.srt.layers.attention.linear.kernels.kernel_backend"
_BACKENDS = "sglang.srt.layers.attention.linear.utils"
DISPATCHER = "sglang.srt.layers.attention.linear.gdn_backend.GDNKernelDispatcher.__init__"

_NULL_SLOT = -1  # of a padding row

# The registry that has the hook: it is registered once with each.
_hooked: Any = None


def register() -> None:
    """The entry point. Never raises. Calling it again changes nothing."""
    _engines.attempt("SGLang", _register)


def _register() -> None:
    setting = _engines.setting_of_known(
        "SGLang",
        SWITCH,
        "verify",
        lambda: _engines.version_of("sglang") or str(importlib.import_module("sglang").__version__),
        KNOWN_VERSIONS,
    )
    if setting is None:
        return
    _hook_dispatcher()
    choices = importlib.import_module(_CHOICES)
    if NAME not in choices.LINEAR_ATTN_KERNEL_BACKEND_CHOICES:
        choices.add_linear_attn_kernel_backend_choices([NAME])


def _hook_dispatcher() -> None:
    """Puts _around_init around the constructor of SGLang's table of kernels. A registry of kernels, where a version has
    one, would take the place of this."""
    global _hooked
    hooks = importlib.import_module(_HOOKS)
    if _hooked is not hooks.HookRegistry:
        hooks.HookRegistry.register(DISPATCHER, _around_init, hooks.HookType.AROUND)
        _hooked = hooks.HookRegistry


def _asked() -> Tuple[bool, bool, bool]:
    """Whether this library was named for prefill, for decode and for verification. SGLang turns every name that it does
    not know into one and the same value, whoever's it is, so that the arguments are looked at."""
    mamba = importlib.import_module(_CONTEXT).get_exec().mamba
    base = mamba.linear_attn_backend
    verify = mamba.linear_attn_verify_backend
    return (
        (mamba.linear_attn_prefill_backend or base) == NAME,
        (mamba.linear_attn_decode_backend or base) == NAME,
        verify == NAME or (verify is None and _engines.setting_of(SWITCH) == "verify"),
    )


def _around_init(
    original: Callable[..., None],
    dispatcher: Any,
    decode_backend: Any,
    prefill_backend: Any,
    verify_backend: Any = None,
    **unknown: Any,
) -> None:
    """The constructor of GDNKernelDispatcher: as it is, with Triton in the place of ours, and then ours."""
    prefill, decode, verify = _asked()
    if not (prefill or decode or verify):
        return original(dispatcher, decode_backend, prefill_backend, verify_backend, **unknown)
    _engines.refuse_unknown("GDNKernelDispatcher", unknown, f"{SWITCH}=0")
    reason = _engines.slow_on_this_machine()
    if reason is not None:
        raise ValueError(f"--linear-attn-backend {NAME}: would be slower than SGLang's own kernels here: {reason}")
    triton = importlib.import_module(_BACKENDS).LinearAttnKernelBackend.TRITON
    original(
        dispatcher,
        triton if decode else decode_backend,
        triton if prefill else prefill_backend,
        triton if verify else verify_backend,
    )
    kernel = _kernel_class()(dispatcher.tree_verify_kernel)
    if prefill:
        dispatcher.extend_kernel = kernel
    if decode:
        dispatcher.decode_kernel = kernel
        dispatcher.supports_packed_decode = kernel.supports_packed_decode
    if verify:
        dispatcher.verify_kernel = dispatcher.tree_verify_kernel = kernel
        dispatcher.verify_kernel_is_flashinfer = False
    _say_taken(prefill, decode, verify)


def _say_taken(prefill: bool, decode: bool, verify: bool) -> None:
    from .._paths import FAST_PATHS
    from .._tools import build_info

    modes = [name for name, taken in (("prefill", prefill), ("decode", decode), ("verify", verify)) if taken]
    _engines.say_once(
        logging.INFO,
        f"flash_qla {build_info()['version']}: SGLang's GDN {', '.join(modes)}, "
        f"prefill on path {', '.join(FAST_PATHS)}; {SWITCH}=0: off",
    )


def _is_deterministic() -> bool:
    return bool(importlib.import_module(_CONTEXT).get_exec().deterministic.enable_deterministic_inference)


def _kernel_class() -> type:
    base: Any = importlib.import_module(_KERNELS).LinearAttnKernelBase

    class FlashQLAGDNKernel(base):
        """SGLang's GDN calls on this library. `triton`: SGLang's own kernel, for what this one does not know."""

        uses_state_checkpoints = True
        supports_packed_decode = True
        supports_fused_chain_verify = False
        supports_strided_target_verify_qkv = True
        supports_track_state_snapshot = False

        def __init__(self, triton: Any) -> None:
            self._triton = triton
            self._auto_cp: _engines.AutoCp = False if _is_deterministic() else _engines.auto_cp()

        def extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            *,
            ssm_states: Any,
            cache_indices: Any,
            query_start_loc: Any,
            inplace_update: bool = True,
            state_checkpoint_cu_starts: Any = None,
            num_state_checkpoints: int = 0,
            state_checkpoint_every_n_tokens: int = 0,
            output: Any = None,
            layer_id: Any = None,
            extend_prefix_lens: Any = None,
            track_state: Any = None,
            track_chunk_idx: Any = None,
            **unknown: Any,
        ) -> Tuple[Any, None, Any]:
            """q, k [1, T, Hq, K], v [1, T, Hv, V], g (log decay) and beta [1, T, Hv], ssm_states [slots, Hv, V, K].
            Returns o, nothing, and the states that the cache asked for, [1, num_state_checkpoints, Hv, V, K]. A slot is
            read as it is: SGLang clears those of new requests."""
            _engines.refuse_unknown("extend", {"track_state": track_state, **unknown}, f"{SWITCH}=0")
            return _extend(
                self._auto_cp,
                {"q": q, "k": k, "v": v, "g": g, "beta": beta},
                ssm_states,
                cache_indices,
                query_start_loc,
                inplace_update,
                (state_checkpoint_cu_starts, num_state_checkpoints, state_checkpoint_every_n_tokens),
                output,
            )

        def decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            a: Any,
            b: Any,
            *,
            A_log: Any,
            dt_bias: Any,
            ssm_states: Any,
            cache_indices: Any,
            query_start_loc: Any,
            **unknown: Any,
        ) -> Any:
            """q, k [1, B, Hq, K], v [1, B, Hv, V], a and b [B, Hv] as projections leave them. Returns [1, B, Hv, V]."""
            _engines.refuse_unknown("decode", unknown, f"{SWITCH}=0")
            rows = {"q": q.transpose(0, 1), "k": k.transpose(0, 1), "v": v.transpose(0, 1)}
            return _decode(rows, a, b, A_log, dt_bias, ssm_states, cache_indices, None)

        def packed_decode(
            self,
            mixed_qkv: Any,
            a: Any,
            b: Any,
            *,
            A_log: Any,
            dt_bias: Any,
            scale: float,
            ssm_states: Any,
            cache_indices: Any,
            num_v_heads: int,
            head_v_dim: int,
            **more: Any,
        ) -> Any:
            """mixed_qkv [B, 2 Hq K + Hv V]. Returns [1, B, Hv, V]. Steps that are buffered (ReplaySSM) are SGLang's."""
            if any(name.startswith("replayssm_") and value is not None for name, value in more.items()):
                return self._triton.packed_decode(
                    mixed_qkv,
                    a,
                    b,
                    A_log=A_log,
                    dt_bias=dt_bias,
                    scale=scale,
                    ssm_states=ssm_states,
                    cache_indices=cache_indices,
                    num_v_heads=num_v_heads,
                    head_v_dim=head_v_dim,
                    **more,
                )
            _engines.refuse_unknown("packed_decode", more, f"{SWITCH}=0")
            K = ssm_states.shape[-1]
            keys = (mixed_qkv.shape[1] - num_v_heads * head_v_dim) // 2
            rows = {
                "q": mixed_qkv[:, :keys].unflatten(1, (1, -1, K)),
                "k": mixed_qkv[:, keys : 2 * keys].unflatten(1, (1, -1, K)),
                "v": mixed_qkv[:, 2 * keys :].unflatten(1, (1, num_v_heads, head_v_dim)),
            }
            return _decode(rows, a, b, A_log, dt_bias, ssm_states, cache_indices, scale)

        def target_verify(
            self,
            A_log: Any,
            dt_bias: Any,
            q: Any,
            k: Any,
            v: Any,
            a: Any,
            b: Any,
            *,
            ssm_states: Any,
            cache_indices: Any,
            query_start_loc: Any,
            intermediate_states_buffer: Any,
            intermediate_state_indices: Any,
            cache_steps: int,
            retrieve_parent_token: Any,
            stable_rows: bool = False,
            **unknown: Any,
        ) -> Any:
            """q, k [1, N T, Hq, K], v [1, N T, Hv, V], a and b [N T, Hv], retrieve_parent_token [N, T] or None.
            Returns [1, N T, Hv, V]; the state after each token goes to intermediate_states_buffer [rows, steps, Hv, V,
            K]."""
            _engines.refuse_unknown("target_verify", unknown, f"{SWITCH}=0")
            from ..ops.gated_delta_rule import gated_delta_rule_verify

            sequences = query_start_loc.shape[0] - 1
            tokens = q.shape[1] // sequences
            rows: Dict[str, Any] = {"q": q, "k": k, "v": v}
            rows = {name: x.unflatten(1, (sequences, tokens)).squeeze(0) for name, x in rows.items()}
            o = gated_delta_rule_verify(
                g=a.reshape(sequences, tokens, -1),
                beta=b.reshape(sequences, tokens, -1),
                state_pool=ssm_states,
                initial_state_indices=cache_indices[:sequences],
                parents=_parents(retrieve_parent_token, sequences, tokens),
                states_out=intermediate_states_buffer[:, :tokens],
                states_out_indices=intermediate_state_indices[:sequences],
                null_index=_NULL_SLOT,
                **rows,
                **_in_kernel(A_log, dt_bias),
            )
            return o.flatten(0, 1).unsqueeze(0)

    return FlashQLAGDNKernel


def _parents(given: Any, sequences: int, tokens: int) -> Any:
    """SGLang's parents of the tokens. What stands for a row's first token, which has none, is whatever the memory held:
    that counts as none, and is put right where device data is checked."""
    if given is None:
        return None
    parents = given[:sequences, :tokens]
    if os.environ.get("FLASH_QLA_CHECK") == "1":
        parents = parents.clone()
        parents[:, :1] = -1
    return parents


def _in_kernel(A_log: Any, dt_bias: Any) -> Dict[str, Any]:
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": A_log,
        "dt_bias": dt_bias,
        "use_beta_sigmoid_in_kernel": True,
    }


def _extend(
    auto_cp: _engines.AutoCp,
    tokens: Dict[str, Any],
    pool: Any,
    slots: Any,
    offsets: Any,
    in_place: bool,
    checkpoints: Tuple[Any, int, int],
    output: Any,
) -> Tuple[Any, None, Any]:
    from ..ops.gated_delta_rule import gated_delta_rule_prefill

    _refuse_slow(tokens["q"], tokens["v"])
    starts, count, every = checkpoints
    wanted: Dict[str, Any] = {}
    h = None
    if count > 0:
        if every <= 0 or every % 64 != 0:
            raise ValueError(f"extend: state_checkpoint_every_n_tokens ({every}) must be a multiple of 64")
        h = pool.new_empty(count, *pool.shape[1:])
        wanted = {"checkpoint_every": every, "checkpoints": h, "checkpoint_cu_starts": starts}
    o = gated_delta_rule_prefill(
        state_pool=pool,
        initial_state_indices=slots,
        final_state_indices=None if in_place else _nowhere(slots),
        cu_seqlens=offsets,
        null_index=_NULL_SLOT,
        out=output,
        use_qk_l2norm_in_kernel=True,
        auto_cp=auto_cp,
        **tokens,
        **wanted,
    )
    return o, None, None if h is None else h.unsqueeze(0)


def _nowhere(slots: Any) -> Any:
    """As many indices, each of which means that the final state is not kept."""
    return slots.new_full(slots.shape, _NULL_SLOT)


def _refuse_slow(q: Any, v: Any) -> None:
    """ValueError where the user has named this library for heads that its fast kernels do not take."""
    from .. import _paths

    if not q.is_cuda:
        return
    reason = _paths.slow_reason(q.device.index, q.dtype, q.shape[-1], v.shape[-1], False)
    if reason is not None:
        raise ValueError(f"--linear-attn-prefill-backend {NAME}: would be slower than SGLang's own kernels: {reason}")


def _decode(
    rows: Dict[str, Any], a: Any, b: Any, A_log: Any, dt_bias: Any, pool: Any, slots: Any, scale: Optional[float]
) -> Any:
    """`rows`: q, k, v [B, 1, heads, dim]."""
    from ..ops.gated_delta_rule import gated_delta_rule_decode

    o = gated_delta_rule_decode(
        g=a.reshape(a.shape[-2], 1, a.shape[-1]),
        beta=b.reshape(b.shape[-2], 1, b.shape[-1]),
        state_pool=pool,
        initial_state_indices=slots,
        null_index=_NULL_SLOT,
        scale=scale,
        **rows,
        **_in_kernel(A_log, dt_bias),
    )
    return o.transpose(0, 1)


def status() -> Tuple[bool, str]:
    """Whether SGLang could be asked for this library on this machine, and why not. Imports nothing of SGLang."""
    version = _engines.version_of("sglang")
    if version is None:
        return False, "not installed"
    if _engines.setting_of(SWITCH) == "0":
        return False, f"{SWITCH}=0"
    if _engines.setting_of(SWITCH) != "1":
        reason = _engines.unknown_version("SGLang", version, KNOWN_VERSIONS, SWITCH)
        if reason is not None:
            return False, reason
    reason = _engines.slow_on_this_machine()
    return reason is None, reason or f"by --linear-attn-prefill-backend {NAME}, --linear-attn-decode-backend {NAME}"
