"""flash_qla._paths.slow_reason(): what integrations ask before they take a call."""

import json
import pathlib
import random

import helpers
import pytest
import torch

import flash_qla
from flash_qla import _paths

REASON = "needs a GPU of compute capability 9.0"
RESULTS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks" / "results"
NO_TENSOR_CORES = "needs bf16 or fp16"
NEITHER = f"path cuda_generic: sm90 {REASON}; sm80 {NO_TENSOR_CORES}"
FORWARD, BACKWARD = "chunk_gated_delta_rule", "chunk_gated_delta_rule_bwd"


def explanation(path):
    """explain()'s text on a GPU where `path` takes the call."""
    sm90 = "taken" if path == "sm90" else REASON
    sm80 = "" if path in ("sm90", "sm80") else f"sm80: {NO_TENSOR_CORES}\n"
    return f"path: {path}\nworkspace: 42 bytes\nsequence split: none (short)\nsm90: {sm90}\n{sm80}{path}: taken"


@pytest.fixture
def asked(monkeypatch):
    """Replaces explain() and the device: answers by operation, and the calls that were explained."""
    calls, answers = [], {FORWARD: explanation("sm90"), BACKWARD: explanation("sm90")}

    def explain(*tensors, op=FORWARD):
        calls.append((op, tensors, torch.is_grad_enabled(), flash_qla._options.chosen_path()))
        if isinstance(answers[op], Exception):
            raise answers[op]
        return answers[op]

    monkeypatch.setattr(_paths, "explain", explain)
    monkeypatch.setattr(_paths, "_answers", {})
    monkeypatch.setattr(_paths, "_device", lambda index: calls.append(index) or torch.device("cpu"))
    monkeypatch.setattr(_paths, "_capability", lambda index: _paths.SM80_CAPABILITY)
    return calls, answers


@pytest.mark.cpu_only
def test_asks_once_for_each_key(asked):
    calls, _ = asked
    assert _paths.slow_reason(1, torch.bfloat16, 128, 64, False) is None
    assert calls[0] == 1
    ((op, tensors, grad, _),) = calls[1:]
    assert op == FORWARD and not grad and not tensors[0].requires_grad
    assert [(tuple(t.shape), t.dtype) for t in tensors] == [
        ((1, 512, 1, 128), torch.bfloat16), ((1, 512, 1, 128), torch.bfloat16), ((1, 512, 1, 64), torch.bfloat16),
        ((1, 512, 1), torch.float32), ((1, 512, 1), torch.float32)]
    for _ in range(3):
        assert _paths.slow_reason(1, torch.bfloat16, 128, 64, False) is None
    assert len(calls) == 2
    for key in ((0, torch.bfloat16, 128, 64, False), (1, torch.float16, 128, 64, False), (1, torch.bfloat16, 64, 64, False),
                (1, torch.bfloat16, 128, 128, False), (1, torch.bfloat16, 128, 64, True)):
        before = len(calls)
        _paths.slow_reason(*key)
        assert len(calls) > before, key


@pytest.mark.cpu_only
def test_gradients_ask_for_the_backward_pass_as_well(asked):
    calls, answers = asked
    with torch.inference_mode():
        assert _paths.slow_reason(0, torch.bfloat16, 128, 128, True) is None
    forward, backward = calls[1:]
    assert (forward[0], forward[2], backward[0]) == (FORWARD, True, BACKWARD) and forward[1][0].requires_grad
    answers[BACKWARD] = explanation("cuda_generic")
    assert _paths.slow_reason(0, torch.float16, 128, 128, True) == NEITHER
    assert _paths.slow_reason(0, torch.float16, 128, 128, False) is None


@pytest.mark.cpu_only
@pytest.mark.parametrize("K, V, taken", [
    (64, 64, True), (64, 128, True), (96, 192, True), (100, 70, True), (256, 256, True), (63, 64, False), (128, 32, False),
])
def test_sm80_takes_what_it_was_timed_with(asked, monkeypatch, K, V, taken):
    _, answers = asked
    answers.update({FORWARD: explanation("sm80"), BACKWARD: explanation("sm80")})
    reason = _paths.slow_reason(0, torch.bfloat16, K, V, False)
    assert reason == (None if taken else f"path sm80: was timed with 64 to 256 dimensions ({K}, {V})")
    assert _paths.slow_reason(0, torch.bfloat16, K, V, True) == reason
    monkeypatch.setattr(_paths, "_capability", lambda index: (8, 0))
    if taken:
        reason = _paths.slow_reason(1, torch.bfloat16, K, V, False)
        assert reason == "path sm80: was timed on compute capability 9.0 (8.0)"


@pytest.mark.cpu_only
def test_sm80_is_the_faster_in_the_tables():
    """All rows of the measured tables that have fla's time, forward and backward."""
    timed = {"forward": 0, "backward": 0}
    for file in RESULTS.glob("*_portable_*.json"):
        for row in json.loads(file.read_text())["rows"]:
            for peer, ms in row["peers"].items():
                if peer.split()[0] != "fla" or not ms:
                    continue
                timed[file.stem.split("_")[-1]] += 1
                assert row["ms"] < ms, (file.name, row["hq"], row["hv"], row["seqlens"], row["options"], peer)
    assert min(timed.values()) >= 14, timed


@pytest.mark.cpu_only
def test_both_directions_have_to_be_fast(asked):
    _, answers = asked
    answers.update({FORWARD: explanation("sm80"), BACKWARD: explanation("cuda_generic")})
    assert _paths.slow_reason(0, torch.bfloat16, 64, 64, False) is None
    assert _paths.slow_reason(0, torch.bfloat16, 64, 64, True) == NEITHER


@pytest.mark.cpu_only
@pytest.mark.parametrize("answer, reason", [
    (explanation("cuda_generic"), NEITHER),
    ("path: cpu\nworkspace: 0 bytes\ncpu: taken", "path cpu: this build has no faster one"),
    (NotImplementedError("no path of this build"), "no path of this build"),
    (ValueError("K must be from 1 to 256"), "K must be from 1 to 256"),
    (TypeError("float64 is for the CPU"), "float64 is for the CPU"),
    (RuntimeError("No CUDA GPUs are available"), "No CUDA GPUs are available"),
], ids=range(6))
def test_reasons(asked, answer, reason):
    calls, answers = asked
    answers[FORWARD] = answer
    for _ in range(2):
        assert _paths.slow_reason(0, torch.bfloat16, 128, 128, False) == reason
    assert len(calls) == 2, "a refusal is an answer too"


@pytest.mark.cpu_only
def test_the_library_s_own_choice_is_asked_for(asked):
    calls, _ = asked
    with flash_qla.use_path("reference"):
        _paths.slow_reason(0, torch.bfloat16, 128, 128, False)
    assert calls[1][3] is None


@pytest.mark.cpu_only
def test_no_answer_while_a_call_is_traced(asked):
    from torch._subclasses import FakeTensorMode

    calls, _ = asked
    with FakeTensorMode():
        assert _paths.slow_reason(0, torch.bfloat16, 128, 128, False) == "is being traced"
    assert not calls
    assert _paths.slow_reason(0, torch.bfloat16, 128, 128, False) is None


@pytest.mark.cpu_only
def test_without_a_gpu_nothing_is_fast():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert _paths.slow_reason(0, torch.bfloat16, 128, 128, False)


@pytest.mark.cuda
def test_agrees_with_explain():
    """200 drawn keys, asked about with other numbers of tokens and heads than slow_reason() has."""
    draw = random.Random(7)
    found = set()
    for _ in range(200):
        dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
        K, V = (draw.choice([128, 128, 128, 64, 96, 256, draw.randint(1, 256)]) for _ in range(2))
        needs_grad, tokens, heads = draw.random() < 0.5, draw.choice([300, 512, 2000]), draw.choice([1, 4])
        x = helpers.make_inputs(T=tokens, Hq=heads, Hv=2 * heads, K=K, V=V, dtype=dtype)
        q = x.q.detach().requires_grad_(needs_grad)
        with helpers.use_path("auto"):
            texts = [flash_qla.explain(q, x.k, x.v, x.g, x.beta)]
            if needs_grad:
                texts.append(flash_qla.explain(x.q, x.k, x.v, x.g, x.beta, None, x.v, op=BACKWARD))
        paths = {text.splitlines()[0].removeprefix("path: ") for text in texts}
        timed = torch.cuda.get_device_capability() == (9, 0) and 64 <= min(K, V)  # of path sm80
        fast = all(path == "sm90" or (path == "sm80" and timed) for path in paths)
        reason = _paths.slow_reason(x.q.device.index, dtype, K, V, needs_grad)
        assert (reason is None) == fast, (dtype, K, V, needs_grad, reason, texts)
        found.add(fast)
    if torch.cuda.get_device_capability() == (9, 0):
        assert found == {True, False}, "the draw has calls of both kinds"
