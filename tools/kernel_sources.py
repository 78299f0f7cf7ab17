"""Which source files a kernel is made of, in the working tree or at a commit, and one number that tells two versions apart."""

import functools
import hashlib
import io
import re
import subprocess
import tarfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\((?:[^()]|\([^()]*\))*\)\s*)?(?:void\s+)?(\w+)\s*\(")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*")
# Kernels of records that were made before they got the names that they have: the same code.
RENAMED = {
    "ask_lengths_kernel": "read_lengths_kernel",
    "classify_boundaries_kernel": "classify_cuts_kernel",
    "clear_chunk_forward_kernel": "zero_fill_kernel",
    "list_tiles_kernel": "list_items_kernel",
    "plan_chunk_forward_kernel": "sort_sequences_kernel",
    "sm90_chunk_bwd_combine_kernel": "sm90_chunk_bwd_scan_kernel",
    "sm90_chunk_bwd_states_kernel": "sm90_chunk_bwd_passes_kernel",
    "sm90_chunk_forward_kernel": "sm90_chunk_fwd_kernel",
    "sm90_pair_forward_kernel": "sm90_chunk_fwd_2cta_kernel",
    "sm90_state_tiles_kernel": "sm90_segment_states_kernel",
}


class Sources:
    """The files under src/cuda: those of the working tree, or of a commit, which may be unknown here: then there are none."""

    def __init__(self, commit: str = "", root: Path = ROOT):
        if commit:
            self.texts = self._of_commit(commit, root)
        else:
            paths = (path for path in (root / "src" / "cuda").rglob("*") if path.is_file())
            self.texts = {path.relative_to(root).as_posix(): path.read_text() for path in paths if self._is_source(path.name)}

    @staticmethod
    def _is_source(name: str) -> bool:
        return name.endswith((".cu", ".cuh", ".h"))

    @classmethod
    def _of_commit(cls, commit: str, root: Path) -> dict:
        done = subprocess.run(["git", "-C", root, "archive", commit, "src/cuda"], capture_output=True)
        if done.returncode:
            return {}
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            return {file.name: archive.extractfile(file).read().decode() for file in archive if file.isfile() and cls._is_source(file.name)}

    @functools.cached_property
    def definitions(self) -> dict:
        """The file of each kernel, by its name alone."""
        return {name: path for path, text in sorted(self.texts.items()) for name in KERNEL.findall(text)}

    def files(self, kernel: str) -> set:
        """What a kernel, named as launches.h names it, is compiled from: the file that has it and what that includes of them."""
        name = kernel.split("<")[0].rpartition("::")[2]
        first = self.definitions.get(name) or self.definitions.get(RENAMED.get(name))
        found, next_ones = set(), [first] if first else []
        while next_ones:
            path = next_ones.pop()
            found.add(path)
            for name in INCLUDE.findall(self.texts[path]):
                beside, below = str(PurePosixPath(path).parent / name), f"src/{name}"
                next_ones += [x for x in (beside, below) if x in self.texts and x not in found]
        return found

    def digest(self, kernel: str) -> str:
        """Of the code without comments; empty where there is no such kernel."""
        files = sorted(self.files(kernel))
        code = ["\n".join(line.rstrip() for line in COMMENT.sub("", self.texts[path]).splitlines() if line.strip()) for path in files]
        return hashlib.sha256(repr(list(zip(files, code))).encode()).hexdigest()[:16] if files else ""
