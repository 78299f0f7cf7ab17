#!/usr/bin/env python3
"""Times two builds of the package in turns on one GPU, row by row: what a change of the kernels costs or gains.

    compare_speed.py OLD NEW [--mode fwd,options] [--heads 8x32,16x32] [--seqs 1x8192] [--seconds 120] [--out FILE]

OLD and NEW: what goes on PYTHONPATH for each, folders joined by ":", flash_qla among them. Rows are those of `bench`, the
default call alone; nothing is checked here, which the tests and `bench` do. A build is a process that keeps the inputs and a
CUDA graph of the row; in turns (old, new, new, old, ..) each replays its graph behind a load that is not timed. Prints each
row's medians and old time over new time, at the end the geometric mean by mode and the worst rows.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

TURNS = 4  # of each build: pairs whose order alternates, so that a drift of the clock does not count for one of them
REPLAYS = 9  # timed in a turn
LOAD_S = 0.03  # of replays in front of them: the other build's turn has just kept the GPU busy
WORST = 8


def serve() -> None:
    """A build's process: {"row": ..} prepares a row, {"replay": n} times it, each answered by a line."""
    from flash_qla.cli import bench_calls, bench_inputs, bench_timing

    bench_timing.LOAD_S = LOAD_S
    graph = None
    for line in sys.stdin:
        asked = json.loads(line)
        if "row" in asked:
            graph = None
            call = bench_calls.calls_of(asked["row"], bench_inputs.make_inputs(asked["row"]))[0]
            _, graph = bench_timing.capture(call.run)
            answer = {"ready": True}
        else:
            answer = {"ms": bench_timing.graphs_ms([graph], asked["replay"])[0]}
        print("answer " + json.dumps(answer), flush=True)


class Build:
    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path})

    def ask(self, question: dict) -> None:
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith("answer "):
                return json.loads(line[7:])
        sys.exit(f"compare_speed.py: a build's process ended with code {self._process.wait()}")


def title(row: dict) -> str:
    words = (row["mode"], f"{row['hq']}/{row['hv']}", row["name"], row["gates"], row["option"])
    return " ".join(word for word in words if word and word != "mixed")


def times(builds: list, row: dict) -> list:
    """Milliseconds of a row, of each build."""
    for build in builds:
        build.ask({"row": row})
    for build in builds:
        build.answer()
    found = [[], []]
    for turn in range(TURNS):
        for i in (0, 1) if turn % 2 == 0 else (1, 0):
            builds[i].ask({"replay": REPLAYS})
            found[i] += builds[i].answer()["ms"]
    return [statistics.median(of) for of in found]


def main() -> int:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--mode", default="fwd", help="modes of bench, joined by commas")
    parser.add_argument("--heads", default="", help="only these, as 8x32,16x32")
    parser.add_argument("--seqs", default="", help="only these rows, as 1x8192")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no row later")
    parser.add_argument("--out", help="a file of JSON lines, one for each row")
    options = parser.parse_args()
    sys.path[:0] = options.new.split(":")
    from flash_qla.cli import bench_inputs, results

    end = time.monotonic() + options.seconds
    builds = [Build(options.old), Build(options.new)]
    ratios: dict = {}
    for mode in options.mode.split(","):
        for row in bench_inputs.rows_of(mode, options.heads, options.seqs):
            if time.monotonic() > end:
                print(f"cut: {title(row)} and later rows of {mode} were not timed")
                break
            old, new = times(builds, row)
            ratios.setdefault(mode, []).append((old / new, title(row)))
            print(f"{title(row)}: {1e3 * old:.1f} us, {1e3 * new:.1f} us, {old / new:.3f}", flush=True)
            if options.out:
                with open(options.out, "a") as file:
                    file.write(json.dumps({"row": title(row), "old_ms": old, "new_ms": new}) + "\n")
    for mode, found in ratios.items():
        mean = results.geometric_mean([ratio for ratio, _ in found])
        print(f"{mode}: {mean:.4f} of the old speed (geometric mean of {len(found)} rows); worst:")
        for ratio, name in sorted(found)[:WORST]:
            print(f"  {ratio:.3f} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
