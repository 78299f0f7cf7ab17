"""A rank's call that goes on from the segments of its own links, in place of computing their states again: against the recurrence
in fp64, from run to run, and replayed from a graph. On the CPU, and on other GPUs than Hopper's, nothing is carried."""

import helpers
import pytest
import torch
from test_cards_segments import BEFORE, inputs, on_device

from flash_qla import _context_parallel, _torch_links
from flash_qla._options import make_options
from flash_qla.distributed.cut import Parts

HEADER = 64  # floats of a carry before its matrices, of four value heads
TOKENS = helpers.with_cuda([400], [1, 64, 1000, 4096, 5003, 9999, 32768])


def parts_of(x, enters):
    """The second of three sequences goes on after this rank; `enters`: it began before it."""
    device = x.q.device
    rows, none, flag = on_device(((1, 1),), device), on_device((-1, -1), device), on_device((enters,), device)
    return Parts(rows=rows, enters=flag, leaves=on_device((True,), device), through=flag,
                 entering_rows=rows[0, :1] if enters else none[:1], leaving_rows=rows[0, :1],
                 starts_here=flag, ends_here=flag, order=None, place=none[:1])


def carries(x):
    return x.q.is_cuda and torch.cuda.get_device_capability(x.q.device) == (9, 0) and x.options.get("auto_cp", True) is not False


def forward(x, enters=True, spoil=None, output_A=False):
    """o, final_state and A. The second initial state enters, where one does: the call's own row is then NaN."""
    parts = parts_of(x, enters)
    entered = x.initial_state[1:2].mT.contiguous() if x.options.get("state_v_first") else x.initial_state[1:2].clone()
    h0 = x.initial_state.clone()
    if enters:
        h0[1].fill_(torch.nan)
    else:
        entered.fill_(torch.nan)
    tensors = (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, h0)
    options = make_options("carry", **x.options)
    _, carry = _context_parallel.make_link(options, tensors, parts)
    assert (carry is not None) == carries(x)
    if spoil is not None and carry is not None:
        spoil(carry)
    rest = (parts.entering_rows, entered, carry, True, output_A)
    found = _torch_links.compute("part_forward", (*tensors, *rest[:3]), options, tensors, rest)
    return found


def check(x, found):
    raw = x.options.get("use_gate_in_kernel", False)
    wanted = (helpers.reference if raw else helpers.library_reference)(x, grads=False)
    for name, ours in zip(("o", "final_state"), found):
        helpers.assert_close(name, ours, wanted[name], helpers.bound_for(name, x.q.dtype), 2 if name == "o" else 1)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("enters", [True, False], ids=["enters", "begins"])
@pytest.mark.parametrize("dtype", helpers.LOW, ids=helpers.dtype_name)
def test_a_part_between_others(tokens, enters, dtype, device):
    x = inputs(tokens, dtype)
    check(x, forward(x, enters))


@pytest.mark.parametrize("changes", [dict(raw=True), dict(raw=True, allow_neg_eigval=True), dict(state_v_first=True),
                                     dict(scale=0.3), dict(auto_cp=False), dict(auto_cp="invariant")], ids=str)
def test_options(changes, device):
    x = inputs(400 if device == "cpu" else 5003, torch.bfloat16, **changes)
    for enters in (True, False):
        check(x, forward(x, enters))


def test_A_is_left_for_the_backward(device):
    x = inputs(400 if device == "cpu" else 5003, torch.bfloat16)
    found = forward(x, output_A=True)
    check(x, found)
    assert torch.equal(found[2], forward(x, spoil=lambda carry: carry.zero_(), output_A=True)[2])


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [(2, 4), (4, 16)], ids=str)
def test_the_carry_is_what_the_call_goes_on_from(heads, device):
    """Other matrices in it are other outputs of heads that keep their state, and of no others."""
    x = helpers.make_inputs(seqlens=[BEFORE, 16384, 50], Hq=heads[0], Hv=heads[1], dtype=torch.bfloat16)
    if not carries(x):
        pytest.skip("nothing is carried on this GPU")
    keep = heads[1] // 2
    x.g[..., :keep], x.g[..., keep:] = 0.0, x.g[..., keep:] * 0.5 - 0.3
    right = forward(x)
    check(x, right)
    header = (heads[1] * 28 + 255) // 256 * HEADER  # a chain takes 28 bytes
    wrong = forward(x, spoil=lambda carry: carry[:, header:].mul_(2.0))
    assert torch.equal(right[0][:, :, keep:], wrong[0][:, :, keep:])
    for head in range(keep):
        assert helpers.relative_error(wrong[0][:, :, head].double(), right[0][:, :, head].double())[0] > 0.05, head


@pytest.mark.cuda
def test_the_same_bits_again_and_again(device):
    x = inputs(9999, torch.bfloat16)
    first = forward(x)
    for _ in range(50):
        for ours, theirs in zip(forward(x), first):
            assert torch.equal(ours, theirs)


@pytest.mark.cuda
def test_heads_do_not_depend_on_each_other(device):
    """With "invariant" a chain is cut by its own length: another head's gates do not change its bits."""
    x = inputs(5003, torch.bfloat16, auto_cp="invariant")
    first = forward(x)
    x.g[..., 1] = -1.0
    assert torch.equal(forward(x)[0][:, :, [0, 2, 3]], first[0][:, :, [0, 2, 3]])


@pytest.mark.cuda
def test_a_graph_replays_with_other_lengths_and_gates(device):
    x = inputs(9000, torch.bfloat16)
    gates, offsets = x.g.clone(), x.cu_seqlens.clone()
    graph, (o, final_state) = helpers.captured(lambda: forward(x))
    generator = torch.Generator().manual_seed(1)
    for length in (9000, 1, 64, 777, 4999, 0, 8999):
        start = int(torch.randint(0, 9000 - length + 1, (1,), generator=generator))
        x.cu_seqlens.copy_(torch.tensor([0, start, start + length, start + length + 1]))
        x.g.copy_(gates[..., torch.randperm(4, generator=generator).to(gates.device)])
        graph.replay()
        for ours, theirs in zip((o, final_state), forward(x)):
            assert torch.equal(ours, theirs), length
        check(x, (o, final_state))
    x.cu_seqlens.copy_(offsets)


@pytest.mark.cuda
@pytest.mark.parametrize("offsets", [[0, 9000, -5, 12], [5000, 3, 100, 4000], [-(2**62), 2**62, 7, 0], [0, 9087, 0, 9087]], ids=str)
def test_offsets_out_of_order_harm_nobody(offsets, device):
    """Any numbers are taken for some tokens within the tensors; what is written outside compute-sanitizer sees."""
    x = inputs(9000, torch.bfloat16)
    x.cu_seqlens.copy_(torch.tensor(offsets))
    forward(x)
    torch.cuda.synchronize()
