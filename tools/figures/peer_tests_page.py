"""The table of docs/peer_tests.md: what other packages' tests gave on this library, from benchmarks/results/peer_tests."""

import json
from pathlib import Path


def load(folder: Path) -> list:
    """Every run of every record, by the record's name; a record is a list of runs, as tools/peer_tests.sh writes it."""
    return [run for path in sorted(folder.glob("*.json")) for run in json.loads(path.read_text())]


def counts(run: dict) -> tuple:
    """Passed, failed and skipped tests of a run."""
    return tuple(sum(file[what] for file in run["files"].values()) for what in ("passed", "failed", "skipped"))


def _calls(run: dict) -> str:
    paths: dict = {}
    for call, times in run["calls"].items():
        path = call.split()[1]
        paths[path] = paths.get(path, 0) + times
    return ", ".join(f"{path} {times}" for path, times in sorted(paths.items())) or "none"


def table(runs: list) -> str:
    if not runs:
        return "No run has been recorded yet.\n"
    lines = [
        "| run | GPU | commit | passed | failed | skipped | calls of this library, by path | does it count? |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        passed, failed, skipped = counts(run)
        gpu = run["gpu"].split(",")[0]
        verdict = f"no: {run['wrong']}" if run["wrong"] else "yes"
        lines.append(
            f"| `{run['binding']}` | {gpu} | {run['commit']} | {passed} | {failed} | {skipped} | {_calls(run)} | {verdict} |"
        )
    failures = [f"`{run['binding']}`, {test}: {why}" for run in runs for test, why in run["failed"].items()]
    text = "\n".join(lines) + "\n"
    if failures:
        text += "\nFailed:\n\n" + "\n".join(f"- {line}" for line in failures) + "\n"
    return text
