"""Requirement 11 with several GPUs: tensors decide the device and its current stream the stream, whatever device is current."""

import threading

import helpers
import pytest
import torch
from helpers import assert_bitwise, make_inputs

import flash_qla

pytestmark = [
    pytest.mark.requirement(11),
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device, or none"),
]

# What a call may be: the paths of bf16 and of other head dims, whole and cut, in-kernel options, packed sequences.
CASES = {
    "dense": dict(T=200, Hq=2, Hv=4),
    "packed": dict(seqlens=[65, 0, 130, 300], Hq=2, Hv=4),
    "cut": dict(seqlens=[700, 300], Hq=2, Hv=4, force_intra_cp=True),
    "raw": dict(T=150, Hq=2, Hv=4, raw=True),
    "K 64": dict(T=150, Hq=2, Hv=4, K=64),
    "fp32": dict(T=100, Hq=1, Hv=2, dtype=torch.float32),
}
every_case = pytest.mark.parametrize("case", CASES)


def inputs_of(case, device, **changes):
    return make_inputs(**{"dtype": torch.bfloat16, **CASES[case], **changes}, device=device)


def move(x, device):
    """The same inputs on another device."""
    fields = {name: value.to(device) for name, value in vars(x).items() if isinstance(value, torch.Tensor)}
    return x.replace(**fields)


def busy(device):
    """Keeps the device's current stream occupied for some milliseconds."""
    with torch.cuda.device(device):
        torch.cuda._sleep(20_000_000)


def decode(x, pool):
    return flash_qla.gated_delta_rule_decode(x.q, x.k, x.v, x.g, x.beta, pool, torch.arange(len(pool), device=pool.device))


@pytest.fixture(autouse=True)
def first_device_is_current():
    torch.cuda.set_device(0)
    yield
    torch.cuda.set_device(0)


@every_case
def test_tensors_of_another_device_than_the_current_one(case):
    here, there = (helpers.run(inputs_of(case, device)) for device in ("cuda:0", "cuda:1"))
    assert torch.cuda.current_device() == 0
    for name in here:
        assert there[name].device == torch.device("cuda:1"), name
        assert_bitwise(name, here[name].cpu(), there[name].cpu())


def test_decode_and_pooled_prefill_on_another_device():
    results = []
    for device in ("cuda:0", "cuda:1"):
        x = make_inputs(B=5, T=1, Hq=2, Hv=4, dtype=torch.bfloat16, grads=False, state_v_first=True, device=device)
        pool = x.initial_state.clone()
        outputs = {"decoded": decode(x, pool), "pool": pool}
        y = make_inputs(seqlens=[300, 20], Hq=2, Hv=4, dtype=torch.bfloat16, grads=False, device=device)
        slots = torch.tensor([4, 2], device=device)
        outputs["prefilled"] = flash_qla.gated_delta_rule_prefill(
            y.q, y.k, y.v, y.g, y.beta, pool, slots, cu_seqlens=y.cu_seqlens)
        results.append(outputs)
    assert torch.cuda.current_device() == 0
    for name, value in results[0].items():
        assert results[1][name].device == torch.device("cuda:1"), name
        assert_bitwise(name, value.cpu(), results[1][name].cpu())


@every_case
def test_the_stream_is_the_current_one_of_the_tensors_device(case):
    # Inputs that come late on that stream: a call that went elsewhere would see the NaN that was there before.
    x = inputs_of(case, "cuda:1")
    want = helpers.run(x)
    late = move(x, "cuda:1").replace(v=torch.full_like(x.v, torch.nan))
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(side):  # makes device 1 current as well
        busy("cuda:1")
        late.v.copy_(x.v)
        with torch.cuda.device(0):
            assert torch.cuda.current_device() == 0
            assert torch.cuda.current_stream("cuda:1") == side
            got = helpers.run(late)
    side.synchronize()
    for name in want:
        assert_bitwise(name, want[name], got[name])


@pytest.mark.parametrize("current", [0, 1])
def test_streams_of_both_devices_in_turns(current):
    # Calls of one thread on both devices, each on a stream of its own whose inputs come late, whichever device is current.
    devices = ("cuda:0", "cuda:1")
    given = {(case, device): inputs_of(case, device) for case in CASES for device in devices}
    want = {key: helpers.run(x) for key, x in given.items()}
    late = {key: move(x, key[1]).replace(v=torch.full_like(x.v, torch.nan)) for key, x in given.items()}
    streams = {device: torch.cuda.Stream(device) for device in devices}
    for device in devices:
        torch.cuda.synchronize(device)
    with torch.cuda.stream(streams[devices[1 - current]]), torch.cuda.stream(streams[devices[current]]):
        for device in devices:
            busy(device)
        got = {}
        for key, x in late.items():
            with torch.cuda.device(key[1]):
                x.v.copy_(given[key].v)
            assert torch.cuda.current_device() == current
            got[key] = helpers.run(x)
    for stream in streams.values():
        stream.synchronize()
    for key, results in want.items():
        for name, value in results.items():
            assert_bitwise(f"{key} {name}", value, got[key][name])


def test_decode_on_a_stream_of_another_device():
    x = make_inputs(B=5, T=1, Hq=2, Hv=4, dtype=torch.bfloat16, grads=False, state_v_first=True, device="cuda:1")
    pools = [x.initial_state.clone() for _ in range(2)]
    want = decode(x, pools[0])
    late = x.replace(v=torch.full_like(x.v, torch.nan))
    side = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.stream(side):
        busy("cuda:1")
        late.v.copy_(x.v)
        with torch.cuda.device(0):
            got = decode(late, pools[1])
    side.synchronize()
    assert_bitwise("o", want, got)
    assert_bitwise("pool", *pools)


@pytest.mark.parametrize("case", ["packed", "cut"])
def test_a_graph_captured_on_another_device(case):
    x = inputs_of(case, "cuda:1")
    elsewhere = inputs_of(case, "cuda:0")
    lengths = CASES[case]["seqlens"]
    leaves = {name: getattr(x, name).requires_grad_() for name in x.DIFFERENTIABLE if getattr(x, name) is not None}

    def step():
        o, final_state = helpers.call(x)
        return o, final_state, *torch.autograd.grad([o, final_state], list(leaves.values()), [x.do, x.dht])

    with torch.cuda.device(1):
        graph, results = helpers.captured(step)
    assert torch.cuda.current_device() == 0
    for changed in (lengths, lengths[::-1], [sum(lengths), *[0] * (len(lengths) - 1)]):
        x.cu_seqlens.copy_(helpers.offsets(changed, device="cuda:1"))
        helpers.run(elsewhere)  # work on the other device in between
        with torch.cuda.device(1):
            graph.replay()
            want = step()
        torch.cuda.synchronize("cuda:1")
        for i, (a, b) in enumerate(zip(results, want)):
            assert_bitwise(f"result {i}", a.detach(), b.detach())


def test_a_thread_for_each_device():
    wanted = {case: {name: value.cpu() for name, value in helpers.run(inputs_of(case, "cuda:0")).items()} for case in CASES}
    failures = []

    def work(device, set_current):
        try:
            if set_current:
                torch.cuda.set_device(device)
            for _ in range(10):
                for case in CASES:
                    got = helpers.run(inputs_of(case, device))
                    for name, value in wanted[case].items():
                        assert_bitwise(f"{case} {name} on {device}", value, got[name].cpu())
        except BaseException as error:
            failures.append(error)

    # Threads that set their device, and ones that leave it at 0.
    threads = [threading.Thread(target=work, args=(device, current)) for device in ("cuda:0", "cuda:1") for current in (True, False)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
