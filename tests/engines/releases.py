"""Parts of the engines' released Python, run as they are between stand-ins for what they import.

FLASH_QLA_ENGINES names a folder with the Python files of the wheels: FOLDER/vllm/vllm/.., FOLDER/sglang/sglang/.. and so
on, as tools/engine_contracts.py fetch leaves it. Nothing of them is in this repository.
"""

import __future__

import ast
import os
import sys
import types
from pathlib import Path

import pytest

FOLDER = os.environ.get("FLASH_QLA_ENGINES")
needed = pytest.mark.skipif(FOLDER is None, reason="needs the engines' released Python: set FLASH_QLA_ENGINES")


def path_of(distribution, file):
    return Path(FOLDER) / distribution / file


def version(distribution):
    """The version of the wheel that was unpacked."""
    folder = next((Path(FOLDER) / distribution).glob("*.dist-info"))
    return folder.name.removesuffix(".dist-info").rpartition("-")[2]


def _names(node):
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}


def cut(monkeypatch, module_name, file, names, around):
    """A module `module_name` of the top-level statements of `file` that define `names`, as they are, among the globals
    `around`. None of its imports is made. Annotations are not evaluated: they name what nobody calls."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if _names(node) & set(names)]
    found = set().union(*map(_names, tree.body))
    assert set(names) <= found, f"{file} has no {sorted(set(names) - found)}"
    module = types.ModuleType(module_name)
    module.__dict__.update(around)
    code = compile(tree, str(file), "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
    monkeypatch.setitem(sys.modules, module_name, module)
    exec(code, module.__dict__)
    return module


def whole(monkeypatch, module_name, file):
    """A module of all of `file`, whose imports have to be there."""
    module = types.ModuleType(module_name)
    monkeypatch.setitem(sys.modules, module_name, module)
    exec(compile(file.read_text(), str(file), "exec", dont_inherit=True), module.__dict__)
    return module


def stand_in(monkeypatch, name, **members):
    """A module `name` with some members; its packages are made where they are missing."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ".".join(parts[:i])
        if package not in sys.modules:
            monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
            sys.modules[package].__path__ = []
    module = types.ModuleType(name)
    module.__path__ = []
    module.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, module)
    return module
