"""The sentence in a results file on how its rows were measured, made from the file's "method": a test makes it again
from every file. This file needs nothing but Python."""

from __future__ import annotations

from typing import Any, Dict

Method = Dict[str, Any]

_INPUTS = (
    "bfloat16 q, k (normalised), v; float32 g, beta, states; a quarter of the heads without decay; initial state in, "
    "final state out; the same tensors in every call"
)
_SERVING_INPUTS = (
    "bfloat16 q, k, v as parts of one tensor, raw gates in bfloat16; norms, gates and sigmoid in the kernel; a quarter "
    "of the heads next to without decay; states in a pool, read and written in place, of verification read alone and "
    "written after each token elsewhere; the same tensors in every call"
)
_CHECKED = "every tensor of ours checked against the fp64 oracle in the same run"


def cpu_protocol(method: Method) -> str:
    """Of `bench --cpu`."""
    return (
        "float32, batch 1; forward, and forward + backward through autograd; "
        f"{method['runs']} runs of both implementations in turns, behind one of each that is not timed; medians; "
        "every tensor of ours checked against the fp64 reference, of a call before the times and of the last timed one"
    )


def gpu_protocol(method: Method) -> str:
    """Of `bench` on a GPU. A method without "replays" has no times."""
    parts = [_SERVING_INPUTS if method.get("serving") else _INPUTS]
    if "replays" in method:
        parts += [
            f"times are medians of {method['replays']} replays of a CUDA graph of {method['fewest_calls']} to "
            f"{method['most_calls']} calls (as many as take {method['graph_ms']} ms), one after another behind "
            f"{method['load_s']} s of such replays in the same queue, the forward's with and without its sequence "
            "split in turns; the host's work is not in them; the L2 cache is not flushed, the card's clocks are not "
            "fixed",
            f"flushed: of single calls below {1e3 * method['short_ms']:g} us, {method['flush_mb']} MB written in front",
            f"eager: {method['eager_calls']} calls one after another without a graph, median of "
            f"{method['eager_rounds']}, until the last has returned to the host (host) and until the device is done "
            "(wall); a training step through autograd",
            f"{_CHECKED}: of every kind of call before it is timed, and of what its timed graph has left",
        ]
    else:
        parts += ["errors and memory alone: nothing was timed", _CHECKED]
    if method.get("peers"):
        parts.append(
            "other packages: in processes of their own on the same inputs, compiled before anything was timed, in "
            f"{method['turns']} turns with ours row by row, each under such a load of its own; medians over all turns, "
            f"ours too; their tensors compared with the same oracle{_notes(method['peers'])}"
        )
    if method.get("judged"):
        parts.append(
            f"errors and memory alone of {', '.join(sorted(method['judged']))}, on the same inputs against the same "
            f"oracle{_notes(method['judged'])}"
        )
    if "fla" in {**method.get("peers", {}), **method.get("judged", {})}:
        parts.append("fla runs its own kernels (FLA_FLASH_QLA=0)")
    if method.get("recorded"):
        parts.append("recorded times are of an earlier run, or published by other packages' authors")
    return "; ".join(parts)


def cards_protocol(method: Method) -> str:
    """Of `bench --mode cp_fwd,cp_train`."""
    clock = "CUDA events around it" if method["device"] == "cuda" else "the host's clock around it"
    return (
        "one sequence in equal shares over the cards, without initial and final states; bfloat16 q, k (normalised), v; "
        "float32 g, beta; a quarter of the heads without decay; cp_fwd: a forward, cp_train: forward + backward by "
        f"autograd; medians of {method['runs']} eager calls behind others that are not timed, begun by all cards "
        f"together, {clock}, of each call the slowest card's; simulated: ranks one after another on one card, the "
        "slowest rank's, without the gather between cards; one_card: the whole sequence by the plain call in the same "
        "run; checked against the fp64 oracle in the same run, of a sequence above 262,144 tokens two key heads with "
        "their value heads; other packages: in processes of their own on the same cards and inputs, timed in the same "
        "way"
    )


def protocol(method: Method) -> str:
    if method.get("cards"):
        return cards_protocol(method)
    return gpu_protocol(method) if method["device"] == "cuda" else cpu_protocol(method)


def _notes(packages: Dict[str, str]) -> str:
    """What is special about how the packages run here, of those that say so."""
    notes = [f"{name}: {note}" for name, note in sorted(packages.items()) if note]
    return f" ({'; '.join(notes)})" if notes else ""
