"""What the record of a test run on a GPU says: which path has passed which requirement, in which dtype."""

from collections import defaultdict

from figures.markdown import spans, table
from figures.reports import EARLIER, NOTHING


def of_paths(record: dict) -> list:
    """(path, dtype) of everything that has computed a case."""
    return sorted({(path, dtype) for part in record["pytest"] for path, dtypes in part["paths"].items() for dtype in dtypes})


def subject(part: dict) -> str:
    """What a part of a record is about; earlier records say "rung" for "requirement"."""
    return part["what"].replace("rung ", "requirement ") if part["what"].startswith("rung ") else part["what"]


def requirements_of(record: dict, path: str, dtype: str) -> tuple:
    """Numbers of the requirements of which a path has computed a case that passed in that dtype, and of those with a gradient."""
    parts = {int(subject(part)[12:]): part for part in record["pytest"] if subject(part).startswith("requirement ")}
    return tuple(tuple(sorted(n for n, part in parts.items() if part[kind].get(path, {}).get(dtype))) for kind in ("paths", "backward"))


def ran(name: str, record: dict) -> str:
    """How many of the tests have run, and whether it passed."""
    # The tests' own commits: those of other programs stand beside these.
    commits = list(dict.fromkeys(part["commit"] for part in record["pytest"] if "commit" in part)) or record["commits"]
    text = f"On an {record['machine']}, {record['date']}: "
    if name in EARLIER:
        return text + f"commit {', '.join(commits)}: " + (
            f"{record['summary']['cases']} cases of tests, device programs and `check`, {record['summary']['failed']} failed. This record is "
            "of an earlier version, which does not say which path has computed a case: no requirement counts as passed by `sm90` until it is made "
            "again."
        )
    # Of each commit by itself: a later one may have run some of an earlier one's tests again.
    runs = []
    for commit in commits:
        parts = [part for part in record["pytest"] if part.get("commit", commit) == commit]
        cases, failed, expected, skipped = (sum(part[key] for part in parts) for key in ("cases", "failed", "expected_failures", "skipped"))
        runs.append(f"commit {commit}, {cases} cases of the Python tests, {failed} failed, {expected} more failed as expected, {skipped} skipped")
    return f"{text}{'; '.join(runs)}."


def ladder(records: dict) -> str:
    """Which path has passed which requirement in which dtype, as the records have it."""
    text = "## The tests on a GPU\n\n"
    for name, record in records.items():
        text += f"{ran(name, record)}\n"
        if name not in EARLIER:
            text += passed(record) + by_requirement(record)
    return text if records else text + NOTHING


def passed(record: dict) -> str:
    """A line for each path and dtype; empty where no requirement has one."""
    text = ""
    for path, dtype in of_paths(record):
        requirements, backward = requirements_of(record, path, dtype)
        if requirements:
            gradients = f", with a gradient of {spans(backward)}" if backward else ""
            text += f"- Path `{path}` in {dtype} has computed cases that passed of requirements {spans(requirements)}{gradients}.\n"
    return f"\n{text}" if text else ""


def by_requirement(record: dict) -> str:
    columns = of_paths(record)
    lines = []
    for part in record["pytest"]:
        cells = []
        for path, dtype in columns:
            count, backward = (part[kind].get(path, {}).get(dtype, 0) for kind in ("paths", "backward"))
            cells.append("" if not count else f"{count} ({backward})" if backward else str(count))
        counts = [str(part[name]) for name in ("cases", "failed", "expected_failures", "skipped")]
        lines.append([subject(part) + (", cut short" if part["cut_short"] else ""), part["commit"], *counts, *cells])
    header = ["requirement or file", "commit", "cases", "failed", "failed as expected", "skipped", *(f"{path}, {dtype}" for path, dtype in columns)]
    reasons = defaultdict(int)
    for part in record["pytest"]:
        for reason, count in part["reasons"].items():
            reasons[reason] += count
    skipped = "".join(f"- {count}: {reason}\n" for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]))
    return (
        "\nA case counts for a path if it has passed and the path has computed at least one call of it; in brackets those with a "
        f"gradient among them.\n\n{table(header, lines)}" + (f"\nSkipped, or failed as expected, and why:\n\n{skipped}" if skipped else "")
    )
