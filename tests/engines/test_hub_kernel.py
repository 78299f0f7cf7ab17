"""The kernel directory for Hugging Face's `kernels`: what is in it, loading it, and Transformers with it beside patch()."""

import ast
import base64
import hashlib
import importlib.util
import inspect
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "flash_qla_native-0.0.0-py3-none-manylinux_2_28_x86_64.whl"
METADATA = "Metadata-Version: 2.4\nName: flash-qla-native\nLicense-Expression: MIT\nRequires-Dist: apache-tvm-ffi<0.2,>=0.1.11\n"

spec = importlib.util.spec_from_file_location("hub_kernel", ROOT / "tools" / "hub_kernel.py")
hub_kernel = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hub_kernel)


def make_wheel(folder, name=NAME, module=lambda built: built):
    """A wheel of the package as it stands in the source tree. `module`: the native module from the one that is built here."""
    package = ROOT / "python" / "flash_qla"
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("flash_qla_native-0.0.0.dist-info/METADATA", METADATA)
        for path in sorted(package.rglob("*")):
            if path.suffix in (".py", ".so", ".typed"):
                content = path.read_bytes()
                archive.writestr("flash_qla/" + path.relative_to(package).as_posix(), module(content) if path.suffix == ".so" else content)
    return folder / name


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """(the directory to name in LOCAL_KERNELS, the variant's folder)."""
    folder = tmp_path_factory.mktemp("hub")
    return folder / "out", hub_kernel.build(make_wheel(folder), folder / "out", 1, "13.0")


def described(variant):
    return json.loads((variant / "metadata.json").read_text())


def in_process(code, **environment):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, env={
        **{name: value for name, value in __import__("os").environ.items() if name != "PYTHONPATH"}, **environment})
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr[-3000:]


def test_names(tmp_path):
    out = tmp_path / "out"
    variant = hub_kernel.build(make_wheel(tmp_path, module=lambda _: b"code for the CPU"), out, 1, "13.0")
    assert variant == out / "build" / "tvm-ffi01-cpu-x86_64-linux"
    found = described(variant)
    assert (found["name"], found["version"], found["license"], found["python-depends"]) == ("flash-qla", 1, "MIT", ["tvm-ffi"])
    assert found["backend"] == {"type": "cpu"} and re.fullmatch(r"_flash_qla_cpu_[0-9a-f]{12}", found["id"])
    assert f'NAMESPACE = "{found["id"]}"' in (variant / "flash_qla" / "_identity.py").read_text()
    wheel = make_wheel(tmp_path, NAME.replace("x86_64", "aarch64"), module=lambda _: b"\0.nv_fatbin\0")
    cuda = hub_kernel.build(wheel, tmp_path, 3, "12.8")
    assert cuda.name == "tvm-ffi01-cu128-aarch64-linux"
    assert described(cuda)["backend"] == {"type": "cuda", "archs": ["9.0a"]} and described(cuda)["version"] == 3
    assert described(cuda)["id"] != found["id"]


def test_what_is_in_it(kernel):
    _, variant = kernel
    files = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file()}
    listed = described(variant)["digest"]
    assert set(listed["files"]) == files - {"metadata.json"} and listed["algorithm"] == "sha256"
    for name, digest in listed["files"].items():
        assert base64.b64decode(digest) == hashlib.sha256((variant / name).read_bytes()).digest()
    assert {"__init__.py", "flash_qla/__init__.py", "flash_qla/_lib/flash_qla_ffi.so", "flash_qla/integrations/layers.py"} <= files
    assert not [name for name in files if "/cli/" in name or "__main__" in name or "vllm" in name]


def test_the_package_may_have_any_name():
    """Relative imports alone, and numpy, which kernels may not depend on, is imported by nothing."""
    for path in (ROOT / "python" / "flash_qla").rglob("*.py"):
        name = path.relative_to(ROOT / "python" / "flash_qla").as_posix()
        if not name.startswith(hub_kernel.LEFT_OUT):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                modules += [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
                assert not {"flash_qla", "numpy"} & {module.split(".")[0] for module in modules}, (name, node.lineno)


def test_a_second_build_replaces_the_first(tmp_path):
    wheel = make_wheel(tmp_path)
    variant = hub_kernel.build(wheel, tmp_path, 1, "13.0")
    (variant / "left_over.py").write_text("")
    assert hub_kernel.build(wheel, tmp_path, 1, "13.0") == variant and not (variant / "left_over.py").exists()


def test_command(tmp_path, capsys):
    hub_kernel.main([str(make_wheel(tmp_path)), str(tmp_path / "out"), "--version", "2"])
    assert described(Path(capsys.readouterr().out.strip()))["version"] == 2


@pytest.mark.parametrize("metadata, name, message", [
    (METADATA, "flash_qla_native-0.0.0-py3-none-any.whl", "name of a machine"),
    (METADATA.replace("apache-tvm-ffi", "other"), NAME, "apache-tvm-ffi"),
], ids=["no machine", "no tvm-ffi"])
def test_refused(tmp_path, monkeypatch, metadata, name, message):
    monkeypatch.setattr(sys.modules[__name__], "METADATA", metadata)
    with pytest.raises(SystemExit, match=message):
        hub_kernel.build(make_wheel(tmp_path, name), tmp_path, 1, "13.0")


LOAD = """
import importlib.util, json, sys
from pathlib import Path

def load(variant):  # as `kernels` does
    name = json.loads((Path(variant) / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, Path(variant) / "__init__.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
"""


def test_two_copies_and_the_package_in_one_process(kernel, tmp_path):
    other = hub_kernel.build(make_wheel(tmp_path, module=lambda built: built + b"\n"), tmp_path / "other", 1, "13.0")
    in_process(LOAD + f"""
first, second = load({str(kernel[1])!r}), load({str(other)!r})
sys.path.insert(0, {str(ROOT / "python")!r})
import flash_qla, torch
assert first.__name__ != second.__name__
x = (torch.randn(1, 70, 2, 16) / 8).requires_grad_()
results = [module.chunk_gated_delta_rule(x, x, x, None, None)[0] for module in (first, second, flash_qla)]
assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
results[0].sum().backward()
layer = first.layers.chunk_gated_delta_rule()
g, beta = torch.zeros(1, 70, 2), torch.ones(1, 70, 2)
y, z = x.detach() * 2, x.detach() * 3
expected = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, y, z, g, beta)[0]
assert torch.equal(layer(x, y, z, g, beta, chunk_size=4, position_ids=None)[0], expected)
from flash_qla.integrations import fla
assert fla.awaited and not sys.modules[first.__name__ + ".flash_qla.integrations.fla"].awaited
print("done")
""")


def test_layers_have_transformers_parameters():
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    from flash_qla.integrations import layers

    for ours, theirs in (("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"), ("recurrent_gated_delta_rule", "torch_recurrent_gated_delta_rule")):
        found = list(inspect.signature(getattr(layers, ours).forward).parameters.values())[1:]
        function = getattr(qwen, theirs)  # `kernels`, where it is there, has made a layer of it
        expected = list(inspect.signature(getattr(type(function), "forward", function)).parameters.values())
        expected = [p for p in expected if p.name != "self"]
        assert [(p.name, p.kind, p.default) for p in found] == [(p.name, p.kind, p.default) for p in expected]


KERNELS = """
import sys
sys.path[:0] = [{python!r}]
import torch
from kernels import LayerRepository, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping

try:
    from kernels._rust import Digest, DigestAlgorithm, Metadata
except ImportError:  # before 0.17
    pass
else:
    from pathlib import Path
    Metadata.read_from_file(Path({variant!r}) / "metadata.json").digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, {variant!r}))

class Layer(torch.nn.Module):
    def forward(self, query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, **kwargs):
        return "not replaced", None

use_kernel_forward_from_hub("chunk_gated_delta_rule")(Layer)
repository = LayerRepository("kernels-community/fla", layer_name="chunk_gated_delta_rule", revision="local")
layer = Layer()
mode = Mode.TRAINING | Mode.TORCH_COMPILE
with use_kernel_mapping({{"chunk_gated_delta_rule": {{"cpu": {{mode: repository}}}}}}):
    kernelize(layer, mode=mode, device="cpu")
import flash_qla
q, k, v = torch.randn(3, 1, 70, 2, 16) / 4
g, beta = torch.zeros(1, 70, 2), torch.ones(1, 70, 2)
assert torch.equal(layer(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0], flash_qla.chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=True)[0])
assert {id!r} + ".flash_qla" in sys.modules
print("done")
"""

TRANSFORMERS = """
import sys
sys.path[:0] = [{python!r}]
import torch
from kernels import LayerRepository, Mode, kernelize, use_kernel_mapping
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from flash_qla.integrations import transformers as integration

torch.manual_seed(0)
config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=16, linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=2,
    layer_types=["linear_attention", "full_attention"])
model = Qwen3_5ForCausalLM(config)
ids = torch.randint(0, 64, (2, 80))

def run():
    model.zero_grad()
    out = model(ids, labels=ids, use_cache=False)
    out.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    with torch.no_grad():
        words = model.eval().generate(ids[:, :20], max_new_tokens=6, do_sample=False)
    return out.logits.detach(), gradients, words

def close(a, b):
    return all(((x - y).norm() / y.norm()).item() < 1e-3 for x, y in zip(a[:2], b[:2])) and torch.equal(a[2], b[2])

theirs = run()
repository = lambda name: LayerRepository("kernels-community/fla", layer_name=name, revision="local")
mapping = {{"chunk_gated_delta_rule": {{"cpu": {{Mode.TRAINING: repository("chunk_gated_delta_rule")}}}},
           "fused_recurrent_gated_delta_rule": {{"cpu": {{Mode.TRAINING: repository("recurrent_gated_delta_rule")}}}}}}
with use_kernel_mapping(mapping):
    kernelize(model, mode=Mode.TRAINING, device="cpu")
layers = [sys.modules[name] for name in list(sys.modules) if name.startswith({id!r}) and name.endswith("integrations.transformers")]
assert layers, "the kernel was not loaded"
calls = []
own = layers[0].chunk
layers[0].chunk = lambda *a, **k: calls.append(1) or own(*a, **k)
kernel = run()
assert calls, "the kernel was not called"
assert close(kernel, theirs)
assert integration.patch()
assert close(run(), theirs)
integration.unpatch()
print("done")
"""


needs_kernels = pytest.mark.skipif(importlib.util.find_spec("kernels") is None, reason="needs the package kernels")


def with_local_kernels(code, kernel):
    out, variant = kernel
    code = code.format(python=str(ROOT / "python"), variant=str(variant), id=described(variant)["id"])
    in_process(code, LOCAL_KERNELS=f"kernels-community/fla={out}", HF_HUB_OFFLINE="1", PYTHONPATH=":".join(p for p in sys.path if p))


@needs_kernels
def test_kernels_loads_it_without_network(kernel):
    with_local_kernels(KERNELS, kernel)


@needs_kernels
def test_transformers_without_network(kernel):
    pytest.importorskip("transformers.models.qwen3_5")
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("this Transformers wants another version of kernels")
    with_local_kernels(TRANSFORMERS, kernel)
