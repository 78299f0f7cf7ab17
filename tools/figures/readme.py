"""README's parts on speed and tests, each as short as a first screen asks for."""

from figures.choice import best, on_a_cpu, on_a_gpu
from figures.ladder import of_paths, ran, requirements_of
from figures.markdown import spans, table
from figures.plot import NAME as PLOT
from figures.reports import EARLIER, MODES, NOTHING

PAGE = "[docs/benchmarks.md](docs/benchmarks.md)"
NOTES = {
    "†": "the others' times are of an earlier run on the same kind of machine",
    "§": f"measured by an earlier version of the bench, which {PAGE} describes, and not yet again",
}
KNOWN = "[known misses](tests/python/known_misses.py)"
# The Hopper kernels' path: what README says of the tests.
PATH = "sm90"


def listed(words) -> str:
    """ "a, b and c"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def notes(text: str) -> str:
    """What the marks in a text mean, in one line; empty without any."""
    found = [f"{mark} {note}" for mark, note in NOTES.items() if mark in text]
    return f"{'; '.join(found)}." if found else ""


def headline(reports: dict) -> str:
    """One figure with its range, and the plot."""
    found = best(on_a_gpu(reports), "fwd")
    if found is None:
        return NOTHING
    calls = f"geometric mean of {len(found.ratios)} calls, from {found.span}" if found.span else "one call"
    how = "timed in the same run" if found.kind == "peers" else "timed in an earlier run on the same kind of machine"
    earlier = ", by an earlier version of the bench ([§](#speed))" if "§" in found.marks else ""
    return (
        f"On an {found.machine} its forward is **{found.mean:.2f} times as fast** as the fastest other package on the same call: "
        f"{calls}, against {listed(found.packages)} {how}{earlier}.\n\n"
        f"![Time per call of other packages as a multiple of flash_qla's, on an {found.machine}](docs/images/{PLOT})\n"
    )


def speed(reports: dict) -> str:
    """Five rows: what a GPU does, and the training step on a CPU."""
    gpu, cpu = on_a_gpu(reports), on_a_cpu(reports)
    found = [(mode, best(gpu, mode)) for mode in ("fwd", "bwd", "train", "decode")] + [("train", best(cpu, "train"))]
    rows = [
        [MODES[mode], of.machine, f"{of.mean:.2f}", of.span, str(len(of.ratios)), listed(of.packages), of.source]
        for mode, of in found
        if of is not None
    ]
    if not rows:
        return NOTHING
    header = ["what", "machine", "speed-up", "least to most", "calls", "over the fastest of, call by call", "table"]
    text = table(header, rows)
    told = notes(text)
    return f"{text}\nBelow 1 ours takes longer. {told}\nEvery row, with machine, commit and protocol: {PAGE}.\n".replace(". \n", ".\n")


def status(records: dict) -> str:
    """What has run on a GPU, and which requirements the Hopper kernels have passed."""
    if not records:
        return NOTHING
    text = ""
    for name, record in records.items():
        text += f"{ran(name, record)}\n".replace("failed as expected", f"failed as expected ({KNOWN})")
        requirements = {}
        for path, dtype in of_paths(record) if name not in EARLIER else ():
            if path == PATH:
                requirements.setdefault(requirements_of(record, path, dtype), []).append(dtype)
        for (forward, backward), dtypes in requirements.items():
            if forward:
                gradients = f" (with gradients {spans(backward)})" if backward else ""
                text += f"The Hopper kernels (path `{PATH}`) have passed cases of requirements {spans(forward)}{gradients} in {listed(dtypes)}.\n"
    return f"{text}Every path, by requirement and dtype: [docs/benchmarks.md](docs/benchmarks.md#the-tests-on-a-gpu).\n"
