"""`info`: what is installed, compiled in and found, in one table a bug report can hold."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from pathlib import Path
from typing import Dict, List

from rich.console import Console
from rich.table import Table

import flash_qla
from flash_qla import _distribution, _ffi
from flash_qla.integrations import _table

_PACKAGES = (
    "torch",
    "numpy",
    "apache-tvm-ffi",
    "flashinfer-python",
)


def _versions() -> Dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _other_copies() -> List[str]:
    """Other installations of an import package called flash_qla, whether they hide this one or are hidden by it."""
    own = Path(flash_qla.__file__).resolve().parent
    others = []
    for entry in sys.path:
        candidate = Path(entry or ".").resolve() / "flash_qla"
        if (candidate / "__init__.py").exists() and candidate != own and str(candidate) not in others:
            others.append(str(candidate))
    return others


def _shadowing() -> str:
    notes = [f"another flash_qla at {path}, hidden by this one" for path in _other_copies()]
    place = _distribution.other_package()
    if place is not None:
        other = f"the distribution {_distribution.OTHER}, at {place.parent}"
        notes.append(f"{other}, provides flash_qla too: uninstall one")
    return "; ".join(notes) or "none"


def _gpus() -> str:
    if importlib.util.find_spec("torch") is None:
        return "unknown (no torch)"
    import torch

    if not torch.cuda.is_available():
        return "none"
    return "; ".join(
        f"{i}: {p.name}, sm_{p.major}{p.minor}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} SMs"
        for i, p in ((i, torch.cuda.get_device_properties(i)) for i in range(torch.cuda.device_count()))
    )


def _engine(row: _table.Row) -> str:
    """"0.33.0, takes its calls: prefill"."""
    if row.version is None:
        return row.how
    if not row.takes:
        return f"{row.version}, left alone: {row.how}"
    return f"{row.version}, {row.how}" if row.how.startswith("by ") else f"{row.version}, takes its calls: {row.how}"


def report() -> None:
    """Prints the table."""
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = {
        "flash_qla": flash_qla.__version__,
        "package": str(Path(flash_qla.__file__).resolve().parent),
        "native module": str(_ffi.LIBRARY),
        **{key: value for key, value in flash_qla.build_info().items() if key != "version"},
        "GPUs": _gpus(),
        "Python": f"{platform.python_version()} on {platform.platform()}",
        **_versions(),
        **{row.engine: _engine(row) for row in _table.rows()},
        "other flash_qla": _shadowing(),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    Console().print(table)
