"""The other distribution on PyPI that provides a package called flash_qla: `flash-qla`. pip lets both be installed."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Optional

OTHER = "flash-qla"
_FILE = "flash_qla/__init__.py"


def other_package() -> Optional[Path]:
    """The `flash_qla/__init__.py` that the distribution `flash-qla` has installed; None where there is no such
    distribution, or it has installed none (an editable one)."""
    try:
        other = importlib.metadata.distribution(OTHER)
    except importlib.metadata.PackageNotFoundError:
        return None
    if other.files is not None and not any(file.as_posix() == _FILE for file in other.files):
        return None
    return Path(str(other.locate_file(_FILE)))


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
