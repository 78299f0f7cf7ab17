"""No file of code is so long that a reader loses the thread."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 600
SUFFIXES = {".h", ".hpp", ".cuh", ".c", ".cpp", ".cu", ".py", ".sh"}


def test_files_are_short():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True)
    lengths = {
        name: len((ROOT / name).read_text().splitlines())
        for name in listed.stdout.splitlines()
        if Path(name).suffix in SUFFIXES and (ROOT / name).exists()
    }
    assert lengths
    assert {name for name, lines in lengths.items() if lines > MOST_LINES} == set()
