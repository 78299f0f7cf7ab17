"""Requirement 22: what importing the package brings in, and that torch may be imported before it, after it or not at all. Each test runs in a
fresh interpreter, for what has been imported stays."""

import helpers
import pytest

pytestmark = [pytest.mark.requirement(22), pytest.mark.cpu_only]  # about modules of the host

# One token from a state of zeros: S = k u^T with u = beta v, so o = scale (q . k) beta v, in numbers that float32 holds exactly.
CASE = """
def case(torch, **options):
    q = torch.tensor([1.0, 2.0, -1.0, 0.5], **options).reshape(1, 1, 1, 4)
    k = torch.tensor([0.5, 1.0, 2.0, -1.0], **options).reshape(1, 1, 1, 4)
    v = torch.tensor([3.0, -2.0], **options).reshape(1, 1, 1, 2)
    beta = torch.full((1, 1, 1), 0.5, **options)
    return q, k, v, None, beta

O, DV = [0.0, 0.0], [0.0, 0.0]  # q . k = 0.5 + 2 - 2 - 0.5
O_OF_K, DV_OF_K = [4.6875, -3.125], [1.5625, 1.5625]  # scale 1/2, k . k = 6.25, beta 1/2

def check(torch, call):
    q, k, v, g, beta = case(torch)
    assert call(q, k, v, g, beta).flatten().tolist() == O
    v.requires_grad_()
    o = call(k.clone(), k, v, g, beta)  # Dynamo refuses one tensor given twice to an autograd.Function
    assert o.flatten().tolist() == O_OF_K, o
    o.sum().backward()
    assert v.grad.flatten().tolist() == DV_OF_K, v.grad
"""
EAGER = "check(torch, lambda *inputs: flash_qla.chunk_gated_delta_rule(*inputs)[0])\n"
FLASH_QLA_FIRST = "import flash_qla, torch"  # the order of sorted imports, where torch is found by the first call
BOTH_ORDERS = pytest.mark.parametrize("imports", [FLASH_QLA_FIRST, "import torch, flash_qla"])


def run(*lines):
    done = helpers.in_subprocess("\n".join((CASE, *lines, "print('done')")))
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]


def test_importing_brings_in_neither_torch_nor_what_imports_it():
    run("import sys, flash_qla",
        "import flash_qla.integrations.fla",
        "for name in ('torch', 'tvm_ffi', 'numpy'): assert name not in sys.modules, name")


def test_the_version_is_there_without_a_call():
    run("import flash_qla",
        "assert flash_qla.__version__ == flash_qla.build_info()['version']",
        "try: flash_qla.no_such_name",
        "except AttributeError as error: assert 'no_such_name' in str(error)",
        "else: raise AssertionError")


@BOTH_ORDERS
def test_either_order_computes(imports):
    run(imports, EAGER)


def test_arrays_before_tensors():
    run("import flash_qla, numpy",
        "x = numpy.ones((1, 1, 1, 4), numpy.float32)",
        "assert (flash_qla.fused_recurrent_gated_delta_rule(x, x, x)[0] == 2).all()",  # 4 of k . k, scale 1/2
        FLASH_QLA_FIRST, EAGER,
        "assert (flash_qla.fused_recurrent_gated_delta_rule(x, x, x)[0] == 2).all()")


def test_the_first_call_is_in_a_compiled_function():
    run(FLASH_QLA_FIRST,
        "call = torch.compile(lambda *inputs: flash_qla.chunk_gated_delta_rule(*inputs)[0] * 1, fullgraph=True, backend='aot_eager')",
        "check(torch, call)",
        "check(torch, call)",
        # A graph without gradients and one with: what the first call has loaded must make no later one compile again.
        "assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 2, torch._dynamo.utils.counters",
        EAGER)


def test_the_first_call_is_a_compiled_one_of_serving():
    run(FLASH_QLA_FIRST,
        "q, k, v, _, beta = case(torch)",
        "pool, slots = torch.zeros(2, 1, 2, 4), torch.tensor([1])",
        "step = torch.compile(flash_qla.gated_delta_rule_decode, fullgraph=True, backend='aot_eager')",
        "assert step(k, k, v, None, beta, pool, slots).flatten().tolist() == O_OF_K",
        "assert not pool[0].any() and pool[1, 0, 0].tolist() == [0.75, 1.5, 3.0, -1.5]")  # u_0 k = 1.5 k


def test_the_first_call_is_on_fake_tensors():
    run(FLASH_QLA_FIRST,
        "from torch._subclasses.fake_tensor import FakeTensorMode",
        "with FakeTensorMode():",
        "    q, k, v, g, beta = case(torch)",
        "    o = flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)[0]",
        "    assert type(o).__name__ == 'FakeTensor' and o.shape == v.shape",
        EAGER)


def test_the_first_call_is_exported():
    run(FLASH_QLA_FIRST,
        "class Layer(torch.nn.Module):",
        "    def forward(self, q, k, v, beta):",
        "        return flash_qla.chunk_gated_delta_rule(q, k, v, None, beta)[0]",
        "q, k, v, _, beta = case(torch)",
        "program = torch.export.export(Layer(), (q, k, v, beta))",
        "assert 'torch.ops.flash_qla.chunk_forward' in str(program), program",
        "assert program.module()(k, k, v, beta).flatten().tolist() == O_OF_K")


def test_operators_are_there_once_torch_was_imported_first_or_there_was_a_call():
    names = "for name in ('chunk_forward', 'recurrent', 'pool_forward', 'chunk_backward'): assert hasattr(torch.ops.flash_qla, name), name"
    run("import torch, flash_qla", names)
    run("import flash_qla, torch", EAGER, names)
    run("import flash_qla, torch", "flash_qla.workspace_size('chunk_gated_delta_rule', 64, 1, 1, 1, 16, 16, device='cpu')", names)


def test_threads_may_make_the_first_calls_at_once():
    run("import flash_qla, torch, threading",
        "start, errors = threading.Barrier(8), []",
        "def work():",
        "    start.wait()",
        "    try: " + EAGER.strip(),
        "    except BaseException as error: errors.append(error)",
        "threads = [threading.Thread(target=work) for _ in range(8)]",
        "[thread.start() for thread in threads]",
        "[thread.join() for thread in threads]",
        "assert not errors, errors")
