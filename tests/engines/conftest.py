"""Adapters for engines, on the CPU backend.

    pytest tests/engines                                     what needs nothing of an engine
    FLASH_QLA_ENGINES=FOLDER pytest tests/engines            also with the engines' released Python, unpacked in FOLDER by
                                                             tools/engine_contracts.py fetch FOLDER
"""

import logging
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

from flash_qla import _paths  # noqa: E402
from flash_qla.integrations import _engines  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch):
    """Nothing has been logged yet, and no variable of the caller's shell decides."""
    monkeypatch.setattr(_engines, "_said", set())
    for name in ("FLASH_QLA_VLLM", "FLASH_QLA_SGLANG", "FLASH_QLA_AUTO_CP"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def fast(monkeypatch):
    """As on a GPU with fast kernels. Assign .reason to have them refuse."""

    class Answer:
        reason = None
        asked = []

        def __call__(self, *key):
            self.asked.append(key)
            return self.reason

    answer = Answer()
    answer.asked = []
    monkeypatch.setattr(_paths, "slow_reason", answer)
    return answer


@pytest.fixture
def log(caplog):
    """The messages of the logger flash_qla, with their levels."""
    caplog.set_level(logging.INFO, logger="flash_qla")
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "flash_qla"]
