"""The provider for Megatron-LM, asked for its slots as Megatron asks."""

import copy
import dataclasses
import enum
import pickle

import helpers
import pytest
import releases
import torch
from helpers import assert_bitwise

from flash_qla import chunk_gated_delta_rule
from flash_qla.integrations import _engines
from flash_qla.integrations import megatron_provider as adapter


class Protocol:
    """Slots that say nothing: a provider that inherits one does not have it."""

    def layer_norm(self):
        ...

    def gated_delta_rule(self, variant, deterministic=False):
        ...


class Selecting:
    """Megatron's mix-in of newer versions: its own providers are configured when a layer binds its kernels."""

    def with_kernel_selection(self, selection):
        raise AssertionError("a wrapper must not be configured in the place of what it wraps")


def own_rule(*arguments, **named):
    return "Megatron's", arguments, named


class Configured(Protocol, Selecting):
    def layer_norm(self):
        return "norm"

    def gated_delta_rule(self, variant):
        return own_rule if variant == "gdn" else f"Megatron's {variant}"


class Told(Protocol):
    def __init__(self):
        self.told = []

    def gated_delta_rule(self, variant, deterministic=False):
        self.told.append((variant, deterministic))
        return own_rule if variant == "gdn" else f"Megatron's {variant}"


def backend_slot(backend, name, default, **arguments):
    """As Megatron documents it: slots that a provider lacks, or inherits from the protocol, are the default's."""
    slot = getattr(backend, name, None)
    if slot is None or getattr(slot, "__func__", None) is getattr(Protocol, name, None):
        return default()
    return slot(**arguments)


def resolve_kernel_backend(backend):
    return backend.with_kernel_selection("selection") if isinstance(backend, Selecting) else backend


def not_asked():
    raise AssertionError("the provider has this slot")


def layers_call(x):
    """The arguments that a layer of Megatron passes."""
    return dict(q=x.q, k=x.k, v=x.v, g=x.g, beta=x.beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=x.cu_seqlens)


@pytest.mark.parametrize("asked", [{}, {"deterministic": True}, {"deterministic": False}], ids=str)
def test_a_layer_is_given_ours(asked, log):
    base = Configured() if not asked else Told()
    provider = resolve_kernel_backend(adapter.GatedDeltaProvider(base))
    rule = backend_slot(provider, "gated_delta_rule", not_asked, variant="gdn", **asked)
    x = helpers.make_inputs(B=1, T=100, Hq=2, Hv=4, K=16, V=32, dtype=torch.bfloat16, seqlens=[30, 70], state=False)
    o, final = rule(**layers_call(x))
    assert final is None
    assert_bitwise("o", o, chunk_gated_delta_rule(x.q, x.k, x.v, x.g, x.beta, cu_seqlens=x.cu_seqlens)[0])
    assert [level for level, _ in log()] == ["INFO"] and "training of gdn layers" in log()[0][1]


def test_gradients(log):
    x = helpers.make_inputs(B=2, T=64, Hq=2, K=16, dtype=torch.float32, state=False)
    rule = adapter.GatedDeltaProvider(Configured()).gated_delta_rule("gdn")
    names = ("q", "k", "v", "g", "beta")
    found = [getattr(x, name).detach().clone().requires_grad_() for name in names]
    expected = [t.detach().clone().requires_grad_() for t in found]
    rule(*found, scale=0.5)[0].square().sum().backward()
    chunk_gated_delta_rule(*expected, scale=0.5)[0].square().sum().backward()
    for name, a, b in zip(names, found, expected, strict=True):
        assert_bitwise(name, a.grad, b.grad)


def test_other_slots_and_recurrences_are_the_bases():
    told = Told()
    provider = adapter.GatedDeltaProvider(Configured())
    assert backend_slot(provider, "layer_norm", not_asked) == "norm"
    assert backend_slot(provider, "gated_delta_rule", not_asked, variant="gdn2") == "Megatron's gdn2"
    assert backend_slot(adapter.GatedDeltaProvider(told), "gated_delta_rule", not_asked, variant="gdn2", deterministic=True) == "Megatron's gdn2"
    assert told.told == [("gdn2", True)]
    assert backend_slot(provider, "no_such_slot", lambda: "default") == "default"
    assert backend_slot(adapter.GatedDeltaProvider(told), "layer_norm", lambda: "default") == "default", "inherited, and says nothing"


def test_a_base_without_the_slot(log):
    provider = adapter.GatedDeltaProvider(Protocol())
    assert callable(provider.gated_delta_rule("gdn")), "ours needs nothing of the base"
    with pytest.raises(NotImplementedError, match="Protocol must provide the recurrence gdn2"):
        provider.gated_delta_rule("gdn2")
    with pytest.raises(NotImplementedError, match="gdn2"):
        adapter.GatedDeltaProvider(object()).gated_delta_rule("gdn2", True)


def test_slow_calls_are_the_bases(monkeypatch, log):
    monkeypatch.setattr(adapter, "_slow_reason", lambda *tensors: "path cuda_generic: sm90 needs K = V = 128")
    rule = adapter.GatedDeltaProvider(Configured()).gated_delta_rule("gdn")
    x = helpers.make_inputs(T=8, Hq=1, K=16, state=False)
    for _ in range(2):
        name, arguments, named = rule(**layers_call(x))
    assert name == "Megatron's" and arguments[0] is x.q and named["beta"] is x.beta and named["cu_seqlens"] is None
    assert [level for level, _ in log()] == ["INFO", "WARNING"] and "K = V = 128" in log()[1][1]


def test_question_about_slow_calls(fast):
    class OnGpu:
        is_cuda, device, dtype, shape, requires_grad = True, torch.device("cuda", 3), torch.bfloat16, (1, 8, 2, 128), False

    class Recorded(OnGpu):
        requires_grad = True

    fast.reason = "slow"
    assert adapter._slow_reason(OnGpu, OnGpu, OnGpu, None, Recorded) == "slow"
    with torch.no_grad():
        adapter._slow_reason(OnGpu, OnGpu, OnGpu, None, Recorded)
    assert fast.asked == [(3, torch.bfloat16, 128, 128, True), (3, torch.bfloat16, 128, 128, False)]


def test_unknown_keywords(log):
    rule = adapter.GatedDeltaProvider(Configured()).gated_delta_rule("gdn")
    x = helpers.make_inputs(T=8, Hq=1, K=16, state=False)
    rule(x.q, x.k, x.v, x.g, x.beta, cp_context=None)
    with pytest.raises(TypeError, match=r"gated_delta_rule: cp_context \(str\) must be .*leaving kernel_backend"):
        rule(x.q, x.k, x.v, x.g, x.beta, cp_context="context")


def test_auto_cp(monkeypatch, log):
    seen = []
    monkeypatch.setattr("flash_qla.ops.gated_delta_rule.chunk_gated_delta_rule", lambda *_, auto_cp, **named: seen.append(auto_cp))
    x = helpers.make_inputs(T=8, Hq=1, K=16, state=False)
    for value in ("0", "invariant", "1"):
        monkeypatch.setenv("FLASH_QLA_AUTO_CP", value)
        adapter.GatedDeltaProvider(Configured()).gated_delta_rule("gdn")(x.q, x.k, x.v, x.g, x.beta)
    assert seen == [False, "invariant", True]
    monkeypatch.setenv("FLASH_QLA_AUTO_CP", "perhaps")
    with pytest.raises(ValueError, match="FLASH_QLA_AUTO_CP"):
        adapter.GatedDeltaProvider(Configured())


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda provider: pickle.loads(pickle.dumps(provider))], ids=["copy", "deepcopy", "pickle"])
def test_specifications_are_copied(again):
    assert again(adapter.GatedDeltaProvider(Configured())).layer_norm() == "norm"


def test_declaration(monkeypatch):
    assert adapter.kernel_metadata() is None, "there is no Megatron here"
    Determinism = enum.Enum("Determinism", ["DETERMINISTIC"])
    Dependency = dataclasses.make_dataclass("Dependency", ["requirement", "module", "symbols"])
    DeterminismResult = dataclasses.make_dataclass("DeterminismResult", ["status", "reason"])
    KernelMetadata = dataclasses.make_dataclass("KernelMetadata", ["name", "requires", "determinism", "contract"])
    releases.stand_in(monkeypatch, adapter._METADATA, Determinism=Determinism, Dependency=Dependency, DeterminismResult=DeterminismResult, KernelMetadata=KernelMetadata)
    found = adapter.kernel_metadata()
    assert found.name == "gdn.flash_qla.chunk_gated_delta_rule" and found.contract == "megatron.core.ops.ssm.gated_delta"
    assert found.determinism.status is Determinism.DETERMINISTIC and "invariant" not in found.determinism.reason
    (needed,) = found.requires
    module = __import__(needed.module)
    assert needed.requirement == "flash-qla-native" and all(hasattr(module, name) for name in needed.symbols)
    monkeypatch.setenv("FLASH_QLA_AUTO_CP", "0")
    assert "batch_invariant, head_invariant, prefix_invariant" in adapter.kernel_metadata().determinism.reason


def test_status(monkeypatch):
    assert adapter.status() == (False, "not installed")
    version = "0.19.2"
    monkeypatch.setattr(_engines, "version_of", lambda name: version)
    monkeypatch.setattr(_engines, "slow_on_this_machine", lambda needs_grad: None if needs_grad else "must be asked for training")
    assert not adapter.status()[0] and "fla-core 0.5.2" in adapter.status()[1]
    version = "0.20.0rc1"
    assert adapter.status() == (True, "by kernel_backend=GatedDeltaProvider(base)")


@releases.needed
def test_release_imports_fla():
    """0.19.2 has no providers of recurrences: what its layers call is fla's function, by this name."""
    assert releases.version("megatron").startswith("0.19")
    text = releases.path_of("megatron", "megatron/core/ssm/gated_delta_net/common.py").read_text()
    assert "from fla.ops.gated_delta_rule import chunk_gated_delta_rule" in text
    assert not releases.path_of("megatron", "megatron/core/ops").exists()
