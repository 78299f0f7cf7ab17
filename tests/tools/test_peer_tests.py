"""tools/peer_tests.sh on small stand-ins for the checkouts of FlashQLA and FLA: what is bound, counted and recorded."""

import json
import os
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]

INPUTS = """
import torch

def inputs():
    x = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 5, 1, 16, generator=x) for _ in range(3))
    return q, k, v, -torch.rand(1, 5, 1, generator=x), torch.rand(1, 5, 1, generator=x)
"""

# As FlashQLA's files begin: tilelang in conftest.py, six values, a device named once, and a mark for tests of a GPU.
FLASHQLA = {
    "flash_qla/__init__.py": "raise ImportError('the package of the checkout was imported')\n",
    "tests/conftest.py": """
        import pytest, tilelang.contrib.nvcc
        assert isinstance(tilelang.contrib.nvcc.get_target_compute_version(), str)

        def pytest_collection_modifyitems(items):
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="CUDA GPU not available"))
        """,
    "tests/test_gdr_unit.py": INPUTS + """
import pytest
import tilelang
from flash_qla import chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from flash_qla.utils import l2norm

DEVICE = "cuda"

@pytest.mark.gpu
def test_six_values():
    assert DEVICE == "cpu"
    q, k, v, g, beta = inputs()
    c, A, o, h, s, cache = chunk_gated_delta_rule_fwd(q, k, v, g, beta, output_h=True)
    assert len(chunk_gated_delta_rule_fwd(q, k, v, g, beta, enable_fwd_cp_cache=True)) == 6
    assert h.ndim == 5 and len(chunk_gated_delta_rule_bwd(q, k, v, c, beta, A, o, cp_cache=cache)) == 6

@pytest.mark.slow
def test_slow():
    chunk_gated_delta_rule_fwd(*inputs())

def test_without_a_call():
    assert l2norm(inputs()[0]).isfinite().all()

def test_skipped():
    pytest.skip("for another GPU")
""",
    "tests/test_sm120_backward_disabled.py": """
        import os

        def test_fails_where_asked():
            assert "FAIL" not in os.environ
        """,
}

# The parts of fla that are looked up, with a function that says that it was called.
FLA = {
    "fla/__init__.py": "",
    "fla/backends.py": """
        import os

        _DISPATCH_DISABLED = os.environ.get("FLA_DISABLE_BACKEND_DISPATCH") == "1"
        registered = []

        class BaseBackend:
            pass

        def register(operation):
            return lambda backend: registered.append((operation, backend()))
        """,
    "fla/ops/__init__.py": "",
    "fla/ops/gated_delta_rule/__init__.py": """
        from .chunk import chunk_gated_delta_rule
        from .fused_recurrent import fused_recurrent_gated_delta_rule
        """,
    "fla/ops/gated_delta_rule/chunk.py": """
        import os

        from fla.backends import registered


        class ChunkGatedDeltaRuleFunction:
            @staticmethod
            def forward(q):
                return q, None


        def chunk_gated_delta_rule(q, k, v, g, beta):
            if registered and "OWN" not in os.environ:
                import flash_qla

                ((operation, backend),) = registered
                assert operation == "gated_delta_rule" and backend.backend_type == "flash_qla"
                return backend.chunk_gated_delta_rule(q, k, v, g, beta)
            return ChunkGatedDeltaRuleFunction.forward(q)
        """,
    "fla/ops/gated_delta_rule/fused_recurrent.py": "class FusedRecurrentFunction:\n    forward = None\n",
    "tests/ops/test_gdn.py": INPUTS + """
import os
import fla.ops.gated_delta_rule.chunk as own
from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

def test_chunk():
    q, k, v, g, beta = inputs()
    assert chunk_gated_delta_rule(q, k, v, g, beta)[0].shape == v.shape
    fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)
    if "OWN" in os.environ:
        own.ChunkGatedDeltaRuleFunction.forward(q)

def test_flash_qla_chunk():
    assert chunk_gated_delta_rule(*inputs())[0].shape == (1, 5, 1, 16)

def test_gate():
    raise AssertionError("left out")
""",
    "tests/layers/test_gated_deltanet.py": INPUTS + """
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

def test_layer():
    from flash_qla import _paths

    assert "cuda_generic" in _paths.FAST_PATHS
    assert chunk_gated_delta_rule(*inputs())[0].shape == (1, 5, 1, 16)
""",
    "tests/models/test_modeling_gated_deltanet.py": "def test_model():\n    pass\n",
    "fla/ops/cp.py": "build_cp_context = None\n",
    # As FLA's file: processes of their own, which import it again.
    "tests/context_parallel/test_cp_gdn.py": INPUTS + """
import os
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from fla.ops.cp import build_cp_context
from fla.ops.gated_delta_rule import chunk_gated_delta_rule

def worker(rank, world_size, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    whole = inputs()
    context = build_cp_context(torch.tensor([0, 5]), dist.group.WORLD, rank_tokens=[3, 2])
    o, _ = chunk_gated_delta_rule(*(x[:, 3 * rank : 3 + 2 * rank] for x in whole), cp_context=context)
    wanted = chunk_gated_delta_rule(*whole)[0][:, 3 * rank : 3 + 2 * rank]
    dist.destroy_process_group()
    assert torch.allclose(o, wanted, atol=1e-5) and "FAIL" not in os.environ

def test_two_ranks(tmp_path):
    mp.start_processes(worker, args=(2, str(tmp_path)), nprocs=2, join=True, start_method="spawn")

def test_of_more_cards():
    pytest.skip("At least 8 GPUs required")
""",
}
FLA["fla/ops/gated_delta_rule/fused_recurrent.py"] += "\n\nfused_recurrent_gated_delta_rule = None\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A copy of the script and its plug-in: the record goes to the folder `out` beside them."""
    base = tmp_path_factory.mktemp("tools")
    (base / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "peer_tests.sh", base / "tools")
    shutil.copytree(ROOT / "tools" / "peer_tests", base / "tools" / "peer_tests", ignore=shutil.ignore_patterns("__pycache__"))
    return base


def checkout(files, folder):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    (folder / "PEER_COMMIT").write_text("0123abc\n")
    return folder


def run(tools, suite, folder, *options, **environment):
    """(exit code, output, runs of the record by binding)"""
    done = subprocess.run([tools / "tools" / "peer_tests.sh", suite, folder, *options], env={**os.environ, **environment},
                          capture_output=True, text=True)
    runs = json.loads((tools / "out" / f"peer_tests_{suite}.json").read_text())
    return done.returncode, done.stdout + done.stderr, {one["binding"]: one for one in runs}


def test_flashqla(tools, tmp_path):
    folder = checkout(FLASHQLA, tmp_path)
    code, output, runs = run(tools, "flashqla", folder, "--device", "cpu")
    (one,) = runs.values()
    assert code == 0, output
    assert one["files"] == {"tests/test_gdr_unit.py": {"passed": 2, "failed": 0, "skipped": 1},
                            "tests/test_sm120_backward_disabled.py": {"passed": 1, "failed": 0, "skipped": 0}}
    assert one["calls"] == {"chunk_gated_delta_rule_fwd cpu float32": 2, "chunk_gated_delta_rule_bwd cpu float32": 1}
    assert one["without_calls"] == ["tests/test_gdr_unit.py::test_without_a_call",
                                    "tests/test_sm120_backward_disabled.py::test_fails_where_asked"]
    assert (one["skipped"], one["failed"], one["wrong"]) == ({"for another GPU": 1}, {}, None)
    assert one["peer_commit"] == "0123abc" and one["commit"] and one["version"]
    assert "tests/test_gdr_unit.py: 2 passed, 0 failed, 1 skipped" in output
    assert not list(folder.rglob("__pycache__")), "nothing is written into the checkout"

    code, output, runs = run(tools, "flashqla", folder, "--device", "cpu", "--slow", FAIL="1")
    one = runs["low_level"]
    assert code == 1 and "assert 'FAIL' not in" in one["failed"]["tests/test_sm120_backward_disabled.py::test_fails_where_asked"]
    assert one["files"]["tests/test_gdr_unit.py"]["passed"] == 3

    code, output, runs = run(tools, "flashqla", folder, "--device", "cpu", "-k", "without_a_call")
    assert code == 1 and runs["low_level"]["wrong"] == "this library was not called" and "NOT COUNTED" in output

    code, _, runs = run(tools, "flashqla", folder)  # no GPU is pretended: their own skip stays
    assert runs["low_level"]["skipped"]["CUDA GPU not available"] == 1


def test_fla(tools, tmp_path):
    folder = checkout(FLA, tmp_path)
    code, output, runs = run(tools, "fla", folder)
    assert code == 0, output
    assert list(runs) == ["functions", "backend", "layers", "cards"]
    assert runs["cards"]["files"] == {"tests/context_parallel/test_cp_gdn.py": {"passed": 1, "failed": 0, "skipped": 1}}
    assert runs["cards"]["calls"] == {"chunk_gated_delta_rule cpu float32": 4}, "two by each of two processes"
    assert runs["functions"]["files"] == {"tests/ops/test_gdn.py": {"passed": 1, "failed": 0, "skipped": 0}}
    assert runs["functions"]["calls"] == {"chunk_gated_delta_rule cpu float32": 1, "fused_recurrent_gated_delta_rule cpu float32": 1}
    assert runs["backend"]["files"] == {"tests/ops/test_gdn.py": {"passed": 1, "failed": 0, "skipped": 0}}
    assert runs["backend"]["calls"] == {"chunk_gated_delta_rule cpu float32": 1}
    assert {file: counts["passed"] for file, counts in runs["layers"]["files"].items()} == {
        "tests/layers/test_gated_deltanet.py": 1, "tests/models/test_modeling_gated_deltanet.py": 1}
    assert runs["layers"]["without_calls"] == ["tests/models/test_modeling_gated_deltanet.py::test_model"]

    code, output, runs = run(tools, "fla", folder, "--binding", "functions", OWN="1")
    assert code == 1 and runs["functions"]["wrong"] == "fla's own kernels were called 1 times", output
    assert runs["backend"]["wrong"] is None, "the runs of other bindings stay"

    code, output, runs = run(tools, "fla", folder, "--binding", "cards", FAIL="1")
    assert code == 1 and list(runs["cards"]["failed"]) == ["tests/context_parallel/test_cp_gdn.py::test_two_ranks"], output
    code, _, runs = run(tools, "fla", folder, "--binding", "cards", "-k", "more_cards")
    assert code == 0 and runs["cards"]["wrong"] is None, "a machine has as many cards as it has"


def test_usage(tools, tmp_path):
    for arguments in ([], ["other", tmp_path], ["fla", tmp_path / "nowhere"]):
        done = subprocess.run([tools / "tools" / "peer_tests.sh", *arguments], capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("usage: tools/peer_tests.sh")
