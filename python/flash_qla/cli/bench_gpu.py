"""`bench` on a GPU: forward, backward, training step and decode, beside other packages where they are installed."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from rich.console import Console
from rich.progress import Progress

from . import bench_timing
from .bench_calls import bound_ms, calls_of, chunks, eager_call, exact
from .bench_inputs import GATES, make_inputs, recorded_times, rows_of
from .bench_options import Call, Tensors
from .bench_processes import Peer, notes, prepare_peers
from .bench_serving_inputs import SERVING_LENGTHS
from .errors import first_failure, head_errors
from .results import (
    Report,
    Row,
    geometric_mean,
    label,
    load,
    make_report,
    merge,
    peer_names,
    ratios,
    save,
    short_name,
    title,
    why_not_merge,
    write,
)

_FILE_NAMES = {
    "fwd": "forward",
    "bwd": "backward",
    "train": "train",
    "decode": "decode",
    "options": "options",
    "portable_forward": "portable_forward",
    "portable_backward": "portable_backward",
}
_FILE_NAMES |= dict.fromkeys(SERVING_LENGTHS, "serving")
_MODES = tuple(_FILE_NAMES)
_SERVING = "serving"  # all that go into that file

# Rows below this are timed with a flushed L2 cache as well: theirs may hold all that they read.
_SHORT_MS = 0.05

# What a row has of other packages, by their names.
_OF_OTHERS = ("peers", "peer_ms_min", "peer_ms_max", "peer_peak_bytes", "peer_err_median_head", "peer_err_worst_head")

# Of the calls of a timed graph that change a state in place: so many are held to the oracle.
_CHECKED_STEPS = 8

# Times of the calls behind the default one, and what they are.
_OTHER_SPLITS = {"unsplit_ms": "without a sequence split", "invariant_ms": "with one that all batches have alike"}

# How often ours and each other package take their turns on a row.
_TURNS = 3


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks for. `choice`: "all", "short" or "peers", as rows_of() says; `peers`: items as
    prepare_peers() takes them."""

    modes: Sequence[str]
    heads: str = ""
    seqs: str = ""
    choice: str = "all"
    gates: str = ""
    peers: Sequence[str] = ()
    peer_seconds: float = 600.0
    recorded: Optional[Path] = None
    runs: int = 15
    seconds: float = math.inf
    errors_only: bool = False
    compile_only: bool = False
    merge: bool = False
    out: Optional[Path] = None

    @property
    def serves(self) -> bool:
        """Whether the rows are of the serving modes; without any other, as _refused() sees to."""
        return any(mode in (*SERVING_LENGTHS, _SERVING) for mode in self.modes)

    @property
    def replays(self) -> int:
        return 0 if self.errors_only else self.runs

    def method(self) -> Dict[str, Any]:
        """What bench_protocol.py makes a sentence of."""
        method: Dict[str, Any] = {"device": "cuda", **({"serving": True} if self.serves else {})}
        if not self.errors_only:
            method.update(
                replays=self.runs,
                fewest_calls=bench_timing.FEWEST_CALLS,
                most_calls=bench_timing.MOST_CALLS,
                graph_ms=bench_timing.GRAPH_MS,
                load_s=bench_timing.LOAD_S,
                short_ms=_SHORT_MS,
                flush_mb=bench_timing.FLUSH_BYTES >> 20,
                eager_calls=bench_timing.EAGER_CALLS,
                eager_rounds=bench_timing.EAGER_ROUNDS,
            )
        if self.peers:
            method["judged" if self.errors_only else "peers"] = notes(self.peers)
            if not self.errors_only:
                method["turns"] = _TURNS
        return {**method, "recorded": self.recorded is not None}


class _Judge:
    """What the oracle says of a row."""

    def __init__(self, given: Row, x: Tensors) -> None:
        self._given, self._x, self.tensors = given, x, exact(given, x)

    def failure(self, call: Call, found: Tensors, steps: int = 1) -> Optional[str]:
        """What is wrong with what a call has returned, after so many steps if it changes something in place; None if
        nothing."""
        right = self.tensors if steps == 1 else exact(self._given, self._x, steps)
        wrong = self.missing(found) or first_failure(found, right, torch.bfloat16)[1]
        return wrong and f"{call.name} {wrong}".lstrip()

    def missing(self, found: Tensors) -> Optional[str]:
        """The tensors that are not there to be checked; None if all are."""
        names = [name for name in self.tensors if name not in found]
        return f"{', '.join(names)} must be checked (not there)" if names else None

    def heads(self, found: Tensors) -> Dict[str, Dict[str, Optional[float]]]:
        """Median and worst of the heads' relative errors, by tensor; None where no head has one, or where NaN or
        infinities stand in other places than the oracle's."""
        heads = {name: head_errors(name, found[name], right) for name, right in self.tensors.items() if name in found}
        picks: Dict[str, Callable[[List[float]], float]] = {"median": statistics.median, "worst": max}
        return {
            which: {name: e if of and math.isfinite(e := pick(of)) else None for name, of in heads.items()}
            for which, pick in picks.items()
        }


def _graph_failure(
    judge: _Judge, call: Call, single: bench_timing.Graph, graph: bench_timing.Graph
) -> Optional[str]:
    """What is wrong with what the timed graph has left. `single`: the graph of one such call."""
    wrong = judge.failure(call, graph.results) if call.restore is None else _steps_failure(judge, call, single, graph)
    return wrong and f"what the timed graph left: {wrong}"


def _steps_failure(
    judge: _Judge, call: Call, single: bench_timing.Graph, graph: bench_timing.Graph
) -> Optional[str]:
    """_graph_failure() of a call that changes its state in place. The state is put back, and the first few calls one by
    one are held to the oracle; the timed graph has to leave the bits of as many single calls. Hundreds of calls cannot
    be held to the oracle: a state in bfloat16 then differs by roundings that add up."""
    assert call.restore is not None
    steps = min(graph.calls, _CHECKED_STEPS)
    call.restore()
    for _ in range(steps):
        single.graph.replay()
    wrong = judge.failure(call, single.results, steps) or judge.missing(graph.results)
    if wrong is not None:
        return wrong
    for _ in range(graph.calls - steps):
        single.graph.replay()
    one_by_one = {name: t.clone() for name, t in single.results.items()}
    call.restore()
    graph.graph.replay()
    differ = [name for name, t in one_by_one.items() if not torch.equal(t, graph.results[name])]
    return f"{', '.join(differ)} must have the bits of {graph.calls} single calls (other bits)" if differ else None


def _options(given: Row) -> Dict[str, str]:
    """What differs from the default call."""
    if given["mode"] in SERVING_LENGTHS:
        return {"state_dtype": given["state_dtype"], **({"option": given["option"]} if given["option"] else {})}
    if given["option"]:
        return {"option": given["option"]}
    if given["mode"] != "decode":
        named: Dict[str, str] = {name: str(given[name]) for name in ("K", "V", "path") if name in given}
        return named if given["gates"] == "mixed" else {**named, "gates": str(given["gates"])}
    return {"state_dtype": given["state_dtype"], "state_layout": "[V, K]" if given["state_v_first"] else "[K, V]"}


def _times(name: str, ms: Sequence[float]) -> Row:
    """Median, least and most under this name."""
    values = {name: statistics.median(ms), f"{name}_min": min(ms), f"{name}_max": max(ms)}
    return {key: round(value, 5) for key, value in values.items()}


class _OtherPackages:
    """Their processes, and what those say of a row."""

    def __init__(self, ready: Sequence[Peer], console: Console) -> None:
        self._ready, self._console = ready, console

    def turn(
        self,
        place: int,
        given: Row,
        number: int,
        last: bool,
        row: Row,
        times: Dict[str, List[float]],
        judge: _Judge,
    ) -> None:
        """Each process that can run `given`, the row at `place`, runs it, one after another. What they say goes into
        `row` and `times`."""

        def take(answer: Row) -> None:
            peer = answer["peer"]
            if "error" in answer:
                self._console.print(f"peer {peer}, {label(given)}: {answer['error']}")
                return
            times.setdefault(peer, []).extend(answer["ms"])
            if "peak_bytes" in answer:
                row["peer_peak_bytes"][peer] = answer["peak_bytes"]
            if "tensors" in answer:
                file = Path(answer["tensors"])
                device = next(iter(judge.tensors.values())).device
                for which, errors in judge.heads(torch.load(file, map_location=device)).items():
                    row[f"peer_err_{which}_head"][peer] = errors
                file.unlink()

        for peer in self._ready:
            if place in peer.rows:
                trouble = peer.turn(place, number, last, take)
                if trouble is not None:
                    self._console.print(f"peer {peer.name}: {trouble}")


def _measure(
    given: Row, place: int, replays: int, others: Optional[_OtherPackages]
) -> Tuple[Optional[Row], Optional[str]]:
    """One row: checked, timed, and what was timed checked again; or None and what a check found. Without replays
    nothing is timed."""
    x = make_inputs(given)
    calls = calls_of(given, x)
    eager = eager_call(given, x, calls[0])
    judge = _Judge(given, x)
    found = calls[0].run()
    errors, failure = first_failure(found, judge.tensors, torch.bfloat16)
    heads = judge.heads(found)
    del found
    for call in (*calls[1:], *([] if eager is calls[0] else [eager])):
        failure = failure or judge.failure(call, call.run())
    if failure is not None:
        return None, failure
    # What is timed gets memory of its own, not pieces of what the oracle's larger tensors have left.
    torch.cuda.empty_cache()
    case = {name: given[name] for name in ("mode", "hq", "hv", "seqlens")}
    row: Row = {
        "peak_bytes": bench_timing.peak_bytes(calls[0].run),
        "err": errors,
        "err_median_head": heads["median"],
        "err_worst_head": heads["worst"],
        **{name: {} for name in _OF_OTHERS},
        "recorded": {},
    }
    captured = [bench_timing.capture(call.run) for call in calls] if replays else []
    singles, graphs = [single for single, _ in captured], [graph for _, graph in captured]
    ours: List[List[float]] = [[] for _ in graphs]
    theirs: Dict[str, List[float]] = {}
    turns = _TURNS if others is not None and replays else 1
    for turn in range(turns):
        for of_graph, ms in zip(ours, bench_timing.graphs_ms(graphs, replays) if graphs else []):
            of_graph += ms
        if others is not None:
            others.turn(place, given, turn, turn == turns - 1, row, theirs, judge)
    if not graphs:
        return {**case, "options": _options(given), **row}, None
    times = _times("ms", ours[0])
    if times["ms"] < _SHORT_MS:
        times.update(_times("flushed_ms", bench_timing.flushed_ms(singles[0], replays)))
    for call, single, graph in zip(calls, singles, graphs):
        failure = failure or _graph_failure(judge, call, single, graph)
        if call is calls[0] and "flushed_ms" in times:
            failure = failure or _graph_failure(judge, call, single, single)
    if failure is not None:
        return None, failure
    for name, ms in zip(_OTHER_SPLITS, ours[1:]):
        times.update(_times(name, ms))
    for peer, ms in theirs.items():
        row["peers"][peer], row["peer_ms_min"][peer], row["peer_ms_max"][peer] = _times("ms", ms).values()
    host_us, eager_ms = bench_timing.eager_times(eager.run)
    bound = bound_ms(given)
    times.update(
        eager_ms=round(eager_ms, 5),
        eager_host_us=round(host_us, 1),
        # Time of one chunk of one value head on one multiprocessor, the card taken as full.
        step_us=round(1e3 * times["ms"] * _sm_count() / (given["hv"] * chunks(given["seqlens"])), 3),
        roofline=None if bound is None else round(bound / times["ms"], 3),
    )
    return {**case, "options": _options(given), **times, **row}, None


def _repeat(given: Row) -> str:
    heads, gates = f"{given['hq']}x{given['hv']}", "" if given["gates"] == "mixed" else f" --gates {given['gates']}"
    return f"python -m flash_qla bench --mode {given['mode']} --heads {heads} --seqs {given['name']}{gates}"


def _describe(row: Row) -> str:
    """A row in a line, with what stands beside it."""
    words = [f"{title(row)}:"]
    if "ms" in row:
        words.append(f"{row['ms']:.4f} ms ({row['ms_min']:.4f} to {row['ms_max']:.4f})")
        words += [] if row["roofline"] is None else [f"{100 * row['roofline']:.0f}% of roofline"]
        words.append(f"eager {row['eager_ms']:.4f} ms, host {row['eager_host_us']:.0f} us")
    words.append(f"{row['peak_bytes'] / 1e6:.0f} MB")
    for kind, note in (("peers", ""), ("recorded", " recorded")):
        words += [f"{peer} {ms:.4f}{note} ({ms / row['ms']:.2f}x)" for peer, ms in row[kind].items() if "ms" in row]
    worst, head = (max(filter(None, row[key].values()), default=0.0) for key in ("err", "err_worst_head"))
    return " ".join(words) + f" worst error {worst:.1e} (of a head {head:.1e})"


def _print_summary(rows: Sequence[Row], console: Console) -> None:
    for mode in dict.fromkeys(row["mode"] for row in rows):
        of_mode = [row for row in rows if row["mode"] == mode and "ms" in row]
        for kind, note in (("peers", ""), ("recorded", ", its times recorded earlier")):
            for peer in peer_names(of_mode, kind):
                found = ratios(of_mode, peer, kind)
                console.print(f"{mode}: {geometric_mean(found):.2f}x of {peer}{note} (geometric mean of {len(found)} "
                              f"rows, least {min(found):.2f}x)")  # fmt: skip
        for name, words in _OTHER_SPLITS.items():
            gains = [row[name] / row["ms"] for row in of_mode if name in row]
            if gains:
                console.print(f"{mode}: {geometric_mean(gains):.2f}x of the same calls {words} (geometric mean of "
                              f"{len(gains)} rows, least {min(gains):.2f}x)")  # fmt: skip


class _Files:
    """The results files of a run. "{machine}" and "{mode}" in the name of `out` stand for what they say: with the
    latter every mode has a file of its own. Rows come in the order of `wanted`; those that are not there, because the
    run was cut or their check failed, are named."""

    def __init__(self, options: Options, wanted: Sequence[Row]) -> None:
        self._out, self._wanted = options.out, wanted
        self.report = make_report(options.method(), cuda=True)
        self.rows: Dict[int, Row] = {}  # by place in `wanted`
        self._old: Dict[Path, Report] = {}
        self.why_not: Optional[str] = None  # the rows cannot come into the files that are there
        for path in self._paths() if options.merge else ():
            if path.exists():
                self._old[path] = load(path)
                trouble = why_not_merge(self._old[path], self.report)
                self.why_not = self.why_not or (trouble and f"{path} {trouble}")

    def _paths(self) -> Dict[Path, List[int]]:
        """Each file with its rows' places."""
        paths: Dict[Path, List[int]] = {}
        for place, row in enumerate(self._wanted) if self._out is not None else ():
            name = str(self._out).replace("{machine}", short_name(self.report["machine"]))
            paths.setdefault(Path(name.replace("{mode}", _FILE_NAMES[row["mode"]])), []).append(place)
        return paths

    def keep(self, put: Callable[[Path, Report], None] = save) -> List[Path]:
        """Writes the files that have rows; returns their names."""
        written = []
        for path, places in self._paths().items():
            rows = [self.rows[place] for place in places if place in self.rows]
            if not rows:
                continue
            missing = [self._wanted[place] for place in places if place not in self.rows]
            left_out = [title({**row, "options": _options(row)}) for row in missing]
            report = {**self.report, **({"left_out": left_out} if left_out else {}), "rows": rows}
            put(path, merge(self._old[path], report) if path in self._old else report)
            written.append(path)
        return written


def _refused(options: Options) -> Optional[str]:
    """What is wrong with the options or the machine; None if nothing."""
    modes = (*_MODES, _SERVING)
    for what, values, known in (("--mode", options.modes, modes), ("--gates", options.gates.split(","), GATES)):
        unknown = [value for value in values if value and value not in known]
        if unknown:
            return f"{what} must be of {', '.join(known)} ({unknown[0]})"
    if options.serves and not all(mode in (*SERVING_LENGTHS, _SERVING) for mode in options.modes):
        return f"--mode must have {_SERVING} modes alone or none of them ({','.join(options.modes)})"
    if options.merge and options.out is None:
        return "--merge needs --out (no file was named)"
    if not torch.cuda.is_available():
        return "a CUDA GPU must be present (none was found); --cpu measures the CPU path"
    machine = short_name(torch.cuda.get_device_name())
    if options.recorded is not None and not options.recorded.name.startswith(f"{machine}_"):
        return f"--recorded must be of this machine, {machine}_*.csv ({options.recorded.name})"
    return None


def run(options: Options) -> int:
    """Measures and prints; returns the exit code. The results are whole after each row, and the rows of the short run
    come first: a run that is cut loses the rest alone, and its files name them."""
    end = time.monotonic() + options.seconds
    console = Console(highlight=False, soft_wrap=True)
    trouble = _refused(options)
    if trouble is not None:
        console.print(f"bench: {trouble}")
        return 2
    modes = [name for mode in options.modes for name in (SERVING_LENGTHS if mode == _SERVING else (mode,))]
    wanted = [
        row
        for mode in modes
        for row in rows_of(mode, options.heads, options.seqs, options.choice, options.gates)
    ]
    files = _Files(options, wanted)
    trouble = files.why_not if wanted else "--heads, --seqs and --gates must leave a row of the table (none is left)"
    if trouble is not None:
        console.print(f"bench: {trouble}")
        return 2
    console.print(f"commit: {files.report['commit']}\n{files.report['machine']}; {files.report['protocol']}")
    with tempfile.TemporaryDirectory() as folder:
        ready, troubles = prepare_peers(
            options.peers, wanted, options.replays, options.peer_seconds, Path(folder),
            lambda answer: console.print(f"peer {answer['peer']}, {label(wanted[answer['row']])}: {answer['error']}"),
        )  # fmt: skip
        for sentence in troubles:
            console.print(sentence)
        try:
            if options.compile_only:
                console.print(f"{len(ready)} processes compiled for {len(wanted)} rows")
                return 1 if troubles else 0
            failed = _measure_all(
                options, wanted, files, _OtherPackages(ready, console) if ready else None, end, console
            )
        finally:
            for peer in ready:
                peer.end()
    _print_summary([row for _, row in sorted(files.rows.items())], console)
    for path in files.keep(write):
        console.print(f"wrote {path}")
    return 1 if failed else 0


def _measure_all(
    options: Options,
    wanted: Sequence[Row],
    files: _Files,
    others: Optional[_OtherPackages],
    end: float,
    console: Console,
) -> bool:
    """Rows of `wanted` come into `files` until the time `end`. Returns whether one failed."""
    earlier = {} if options.recorded is None else recorded_times(options.recorded)
    failed = False
    with Progress(console=console, transient=True) as progress:
        in_order = sorted(enumerate(wanted), key=lambda pair: not pair[1]["short"])
        for done, (place, given) in enumerate(progress.track(in_order, description="rows")):
            if time.monotonic() > end:
                console.print(
                    f"cut after {options.seconds:g} s: {len(wanted) - done} of {len(wanted)} rows not measured"
                )
                break
            try:
                row, failure = _measure(given, place, options.replays, others)
            except Exception as error:  # the rows after this one are worth having
                row, failure = None, f"{type(error).__name__}: {error}"
            if row is None:
                failed = True
                console.print(f"FAIL {label(given)}: {failure}  repeat: {_repeat(given)}")
                continue
            if not row["options"]:
                row["recorded"] = earlier.get((row["mode"], row["hq"], row["hv"], given["name"]), {})
            files.rows[place] = row
            files.keep()
            console.print(f"{_describe(row)}  repeat: {_repeat(given)}")
    return failed


def _sm_count() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
