"""Other packages beside ours in the GPU bench: a process for each and the rows that need the same kernels."""

from __future__ import annotations

import concurrent.futures
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

Row = Dict[str, Any]

_PEER_SCRIPT = Path(__file__).with_name("bench_peers.py")

# A peer's process that says nothing for this long in its turn is ended: a row takes a few seconds.
_SILENCE_S = 60.0

# What is special about a package in such a folder, in a sentence for the results' protocol.
NOTE = "bench_note.txt"


def notes(items: Sequence[str]) -> Dict[str, str]:
    """The packages of `items` ("name" or "name=folder"), each with the notes that its folders have."""
    found = {}
    for name, _, path in (item.partition("=") for item in items):
        files = (Path(folder) / NOTE for folder in path.split(os.pathsep) if folder)
        found[name] = " ".join(file.read_text().strip() for file in files if file.exists())
    return found


class Peer:
    """A process of bench_peers.py. It compiles what its rows need; once told to, it runs and times them."""

    def __init__(self, item: str, rows: Sequence[Tuple[int, Row]], replays: int, folder: Path) -> None:
        self.name, _, path = item.partition("=")
        self.rows = {i for i, _ in rows}
        self._complaints = tempfile.TemporaryFile("w+")
        # Without this package, whose import name one of them shares; and fla with its own kernels, which it would leave
        # for any flash_qla that it can import.
        self._process = subprocess.Popen(
            [sys.executable, str(_PEER_SCRIPT), self.name, str(replays), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env={**os.environ, "PYTHONPATH": path, "FLA_FLASH_QLA": "0"},
            text=True,
        )
        self._lines: queue.Queue[Optional[str]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._write(json.dumps(list(rows)))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def _write(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError:  # it has ended; why is told where its lines end
            pass

    def _answers(self, seconds: Callable[[], float]) -> Iterator[Row]:
        """Its lines, each waited for as long as seconds() says: queue.Empty where none came. Ends with the process."""
        while True:
            line = self._lines.get(timeout=max(0.0, seconds()))
            if line is None:
                return
            if line.startswith(('{"row"', '{"ready"')):  # the rest is what the package itself prints
                yield json.loads(line)

    def prepare(self, end: float, refused: Callable[[Row], None]) -> Optional[str]:
        """Until it is ready, at most to the time `end`. Returns what went wrong, or None; rows that it cannot run go to
        `refused`, and are no longer among its rows."""
        try:
            for answer in self._answers(lambda: end - time.monotonic()):
                if "ready" in answer:
                    return None
                self.rows.discard(answer["row"])
                refused(answer)
        except queue.Empty:
            self.end()
            return "took too long to compile"
        return self._complaint() or "ended before it was ready"

    def turn(self, row: int, number: int, last: bool, take: Callable[[Row], None]) -> Optional[str]:
        """One turn on a row, alone on the GPU: take(answer) for each way of calling the package. Returns what went
        wrong with the process, which then has no rows any more, or None."""
        self._write(json.dumps({"row": row, "turn": number, "last": last}))
        try:
            for answer in self._answers(lambda: _SILENCE_S):
                if "done" in answer:
                    return None
                if "error" in answer:
                    self.rows.discard(row)
                take(answer)
        except queue.Empty:
            self.rows.clear()
            self.end()
            return "ended: it took too long"
        self.rows.clear()
        return self._complaint() or "ended in its turn"

    def _complaint(self) -> Optional[str]:
        """The last line that it complained with, of a process that has closed its output; None if all went well."""
        code = self._process.wait()
        self._complaints.seek(0)
        last = self._complaints.read().strip().splitlines()[-1:]
        return last[0] if code != 0 and last else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


def _groups(items: Sequence[str], given: Sequence[Row]) -> Iterator[Tuple[str, List[Tuple[int, Row]]]]:
    """Each package with the rows of each mode, head count and head dims: what is compiled for one serves the others.
    Several processes compile beside each other."""
    for item in items:
        alike: Dict[Tuple[Any, ...], List[Tuple[int, Row]]] = {}
        for i, row in enumerate(given):
            key = tuple(row.get(name) for name in ("mode", "hq", "hv", "K", "V"))
            alike.setdefault(key, []).append((i, row))
        for rows in alike.values():
            yield item, rows


def prepare_peers(
    items: Sequence[str],
    given: Sequence[Row],
    replays: int,
    seconds: float,
    folder: Path,
    refused: Callable[[Row], None],
) -> Tuple[List[Peer], List[str]]:
    """The packages `items` ("name" or "name=folder") compile for the rows `given`, beside each other, at most `seconds`
    long. Returns the processes that are ready, and sentences on what went wrong; rows that a package cannot run go to
    `refused`."""
    end = time.monotonic() + seconds
    troubles: List[str] = []

    def start(group: Tuple[str, List[Tuple[int, Row]]]) -> Optional[Peer]:
        item, rows = group
        if time.monotonic() >= end:
            troubles.append(f"peer {item.partition('=')[0]}: no time was left to compile")
            return None
        peer = Peer(item, rows, replays, folder)
        trouble = peer.prepare(end, refused)
        if trouble is not None:
            troubles.append(f"peer {peer.name}: {trouble}")
        return peer if trouble is None else None

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return [peer for peer in pool.map(start, _groups(items, given)) if peer is not None], troubles
