"""The other distribution on PyPI that provides a package called flash_qla: `flash-qla`. pip lets both be installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Optional

OTHER = "flash-qla"


def other_package() -> Optional[Path]:
    """The `flash_qla/__init__.py` that the distribution `flash-qla` provides, whether it is there or not; None where
    the distribution is not installed."""
    try:
        return Path(str(importlib.metadata.distribution(OTHER).locate_file("flash_qla/__init__.py")))
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_shared_folder(own: Path) -> None:
    """Raises ImportError where the distribution `flash-qla` has the same `flash_qla/__init__.py`, `own`. One that lies
    elsewhere is only hidden by this package, which `python -m flash_qla info` prints."""
    other = other_package()
    if other is not None and other.exists() and other.samefile(own):
        raise ImportError(
            "flash_qla: the distributions flash-qla and flash-qla-native share one folder and have overwritten each "
            "other's files: pip uninstall -y flash-qla flash-qla-native, then install one"
        )


refuse_shared_folder(Path(__file__).with_name("__init__.py"))
