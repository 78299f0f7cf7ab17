"""What importing the package does to its process, and beside the other distribution of the same name."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, run

SWITCH = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


def distribution(folder, name, version, files=()):
    """What pip leaves behind of an installed distribution."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    return folder


@pytest.fixture(scope="module")
def package():
    """Folder of the installed package."""
    return run(sys.executable, "-c", "import flash_qla; print(*flash_qla.__path__)", cwd=ROOT / "tests").strip()


@pytest.fixture
def place(package, tmp_path):
    """A folder like site-packages with the package in it."""
    (tmp_path / "site").mkdir()
    subprocess.run(["cp", "-r", package, tmp_path / "site" / "flash_qla"], check=True)
    return tmp_path / "site"


def python(*folders, program, **environment):
    """Runs a program in a new process with these folders in front of the path."""
    variables = {key: value for key, value in os.environ.items() if key != SWITCH}
    variables |= {"PYTHONPATH": os.pathsep.join(map(str, folders))} | environment
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=variables, cwd=folders[0]
    )


PRINT_PACKAGE = "import flash_qla; print(flash_qla.__file__)"


def test_sharing_a_folder_with_the_other_distribution_is_refused_with_the_cure(place):
    distribution(place, "flash-qla", "0.1.3", ["flash_qla/__init__.py"])
    done = python(place, program=PRINT_PACKAGE)
    assert done.returncode != 0
    assert "ImportError: flash_qla: the distributions flash-qla and flash-qla-native share one folder" in done.stderr
    assert "pip uninstall -y flash-qla flash-qla-native, then install one" in done.stderr


def test_an_editable_installation_of_the_other_distribution_shares_nothing(place):
    """Its metadata lie beside this package, and its files somewhere else."""
    distribution(place, "flash-qla", "0.1.3", ["__editable__.flash_qla.pth"])
    (place / "__editable__.flash_qla.pth").write_text("")
    done = python(place, program=PRINT_PACKAGE)
    assert done.stdout.strip() == str(place / "flash_qla" / "__init__.py"), done.stderr


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["behind", "in front"])
def test_the_other_distribution_elsewhere_is_no_error(place, tmp_path, order):
    """Its files are gone, as after `rm -r`, in front of this package on the path or behind it."""
    other = distribution(tmp_path / "other", "flash-qla", "0.1.3", ["flash_qla/__init__.py"])
    done = python(*[place, other][order], program=PRINT_PACKAGE)
    assert done.stdout.strip() == str(place / "flash_qla" / "__init__.py"), done.stderr


def test_info_names_the_other_distribution_where_it_is_hidden(place, tmp_path):
    pytest.importorskip("typer")
    other = distribution(tmp_path / "other", "flash-qla", "0.1.3", ["flash_qla/__init__.py"])
    (other / "flash_qla").mkdir()
    (other / "flash_qla" / "__init__.py").write_text("")
    program = "import runpy, sys; sys.argv = ['flash_qla', 'info']; runpy.run_module('flash_qla', run_name='__main__')"
    done = python(place, other, program=program, COLUMNS="2000")
    assert done.returncode == 0, done.stderr
    assert f"the distribution flash-qla, at {other / 'flash_qla'}, provides flash_qla too" in done.stdout


def test_this_distribution_alone_is_not_mistaken_for_the_other(place):
    distribution(place, "flash-qla-native", "0.2.0", ["flash_qla/__init__.py"])
    done = python(place, program=PRINT_PACKAGE)
    assert done.stdout.strip() == str(place / "flash_qla" / "__init__.py"), done.stderr


# Shows the switch at each moment when tvm_ffi is looked for, and after the package has loaded it.
WATCH = f"""
import importlib.metadata, os, sys
seen = []
class Watch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "tvm_ffi":
            seen.append(os.environ.get("{SWITCH}"))
sys.meta_path.insert(0, Watch)
real = importlib.metadata.version
def version(name):
    if name != "torch":
        return real(name)
    if torch is None:
        raise importlib.metadata.PackageNotFoundError(name)
    return torch
importlib.metadata.version = version
"""


@pytest.mark.parametrize(
    "torch, before, set_by_user, expected",
    [
        ("2.9.1", "", None, "['1'] None"),
        ("2.6.0+cu124", "", None, "['1'] None"),
        ("2.10.0", "", None, "[None] None"),
        ("3.0.0a0", "", None, "[None] None"),
        ("2.9.1", "import tvm_ffi", None, "[None] None"),
        ("2.9.1", "", "0", "['0'] 0"),
        (None, "", None, "[None] None"),
    ],
)
def test_switch_of_tvm_ffi(package, torch, before, set_by_user, expected):
    """Set for an older PyTorch alone, only where this package is the first to import tvm-ffi, and taken back."""
    load = "import flash_qla\nflash_qla.build_info()"
    program = f"torch = {torch!r}\n{WATCH}\n{before}\n{load}\nprint(seen, os.environ.get('{SWITCH}'))"
    environment = {SWITCH: set_by_user} if set_by_user is not None else {}
    done = python(os.path.dirname(package), program=program, **environment)
    assert done.stdout.strip() == expected, done.stderr
