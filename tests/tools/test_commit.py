"""The commit that a build is stamped with (cmake/FlashQlaCommit.cmake): of a checkout, of one with changes, and of none."""

import shutil
import subprocess
from pathlib import Path

import pytest

flash_qla = pytest.importorskip("flash_qla")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one file; returns its folder and its commit, shortened."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "a.txt").write_text("a\n")
    git(folder, "init", "-q")
    git(folder, "add", "a.txt")
    git(folder, "-c", "user.name=n", "-c", "user.email=e", "commit", "-qm", "m")
    return folder, git(folder, "rev-parse", "--short=12", "HEAD").strip()


def git(folder, *arguments):
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout


def stamp(folder, output):
    """What the build would write of a source folder."""
    subprocess.run(
        [shutil.which("cmake"), f"-DSOURCE_DIR={folder}", f"-DTEMPLATE={ROOT / 'src/core/commit.cpp.in'}", f"-DOUTPUT={output}",
         "-P", ROOT / "cmake" / "FlashQlaCommit.cmake"], check=True)  # fmt: skip
    return output.read_text().partition('return "')[2].partition('"')[0]


def test_a_checkout_has_its_commit_and_says_if_files_differ(checkout, tmp_path):
    folder, commit = checkout
    assert len(commit) == 12 and stamp(folder, tmp_path / "commit.cpp") == commit
    (folder / "new.txt").write_text("not tracked\n")
    assert stamp(folder, tmp_path / "commit.cpp") == commit
    (folder / "a.txt").write_text("b\n")
    assert stamp(folder, tmp_path / "commit.cpp") == f"{commit}+changes"


def test_the_file_is_left_alone_where_the_commit_is_the_same(checkout, tmp_path):
    stamp(checkout[0], tmp_path / "commit.cpp")
    before = (tmp_path / "commit.cpp").stat().st_mtime_ns
    stamp(checkout[0], tmp_path / "commit.cpp")
    assert (tmp_path / "commit.cpp").stat().st_mtime_ns == before


def test_a_copy_without_a_checkout_of_its_own_has_none(checkout, tmp_path):
    folder, _ = checkout
    (folder / "vendored").mkdir()
    (tmp_path / "sdist").mkdir()
    assert stamp(folder / "vendored", tmp_path / "a.cpp") == "unknown"
    assert stamp(tmp_path / "sdist", tmp_path / "b.cpp") == "unknown"


def test_build_info_names_a_commit():
    commit = flash_qla.build_info()["commit"].removesuffix("+changes")
    assert commit == "unknown" or (len(commit) == 12 and int(commit, 16) >= 0)
