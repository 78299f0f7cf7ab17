"""What the adapters for engines have in common: switches, versions, one line in the log, keywords that nobody knows."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any, Callable, Dict, Iterable, Literal, Mapping, Optional, Sequence, Set, Tuple, Union

logger = logging.getLogger("flash_qla")

AutoCp = Union[bool, Literal["invariant"]]

# Sets auto_cp of the adapters for engines, and of nothing else.
AUTO_CP = "FLASH_QLA_AUTO_CP"
_AUTO_CP: Dict[str, AutoCp] = {"1": True, "0": False, "invariant": "invariant"}

_said: Set[Tuple[int, str]] = set()


def auto_cp() -> AutoCp:
    """auto_cp of an engine's calls: what the environment says, else True."""
    given = os.environ.get(AUTO_CP, "1").strip().lower()
    if given not in _AUTO_CP:
        raise ValueError(f"{AUTO_CP} ({given}) must be 1, 0 or invariant")
    return _AUTO_CP[given]


def say_once(level: int, message: str) -> None:
    """Logs a message the first time that this process has it."""
    if (level, message) not in _said:
        _said.add((level, message))
        logger.log(level, message)


def attempt(engine: str, register: Callable[[], None]) -> None:
    """Runs an entry point's work. Never raises: an exception there would end the engine."""
    try:
        register()
    except Exception as error:
        say_once(logging.WARNING, f"flash_qla: {engine} was left as it is: {type(error).__name__}: {error}")


def setting_of(switch: str) -> str:
    """What an environment variable says, in small letters; empty without it."""
    return os.environ.get(switch, "").strip().lower()


def setting_of_known(
    engine: str, switch: str, own: str, version: Callable[[], str], known: Sequence[str]
) -> Optional[str]:
    """The switch of an engine (0, 1, its `own` word or nothing), or None where the engine is left alone, which is then
    said: it is switched off, or its version is not known and 1 does not ask for it all the same.

    Raises:
        ValueError: another word, or a wrong FLASH_QLA_AUTO_CP, which is told now and not by a first call.
    """
    setting = setting_of(switch)
    if setting == "0":
        say_once(logging.INFO, f"flash_qla: switched off for {engine} by {switch}=0")
        return None
    if setting not in ("", "1", own):
        raise ValueError(f"{switch} ({setting}) must be 0, 1 or {own}")
    auto_cp()
    reason = None if setting == "1" else unknown_version(engine, version(), known, switch)
    if reason is not None:
        say_once(logging.WARNING, f"flash_qla: left alone: {reason}")
        return None
    return setting


def version_of(distribution: str) -> Optional[str]:
    """The installed version of a distribution; None where it is not installed. It is not imported."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_version(version: str, prefixes: Sequence[str]) -> bool:
    """Whether a version is one of some: "0.33" stands for all of 0.33.x."""
    return any(version == prefix or version.startswith(prefix + ".") for prefix in prefixes)


def unknown_version(name: str, version: str, known: Sequence[str], switch: str) -> Optional[str]:
    """Why a version is left alone; None where it is one of `known`. What an adapter calls may have another meaning in a
    version that nobody has looked at, under the same name."""
    if is_version(version, known):
        return None
    return f"{name} {version} is not known here ({', '.join(known)} are); {switch}=1 tries it all the same"


def refuse_unknown(operation: str, given: Mapping[str, Any], switch: str) -> None:
    """TypeError for a keyword that an adapter does not know and that says something: to ignore it could be wrong."""
    for name, value in given.items():
        if value is not None:
            rule = "must be a keyword that flash_qla knows"
            raise TypeError(f"{operation}: {name} ({type(value).__name__}) {rule}; {switch} turns it off")


def missing(holder: Any, names: Iterable[str]) -> Tuple[str, ...]:
    """Those of `names` that a module or class does not have."""
    return tuple(name for name in names if not hasattr(holder, name))


def slow_on_this_machine(needs_grad: bool = False) -> Optional[str]:
    """Why the fast kernels would not take a model's calls (K = V = 128, bfloat16) on the first GPU; None: they do."""
    from .. import _paths

    try:
        import torch
    except ImportError:
        return "PyTorch is not installed"
    if not torch.cuda.is_available():
        return "no GPU"
    return _paths.slow_reason(0, torch.bfloat16, 128, 128, needs_grad)
