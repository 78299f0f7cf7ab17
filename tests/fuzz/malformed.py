#!/usr/bin/env python3
"""Calls whose device data is wrong: offsets that go back or past the end, slots that are not there, NaN and infinite gates and keys.

    python tests/fuzz/malformed.py --device cuda                       # the listed cases of all operations
    python tests/fuzz/malformed.py --device cuda --seed 7 --cases 500  # drawn ones
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/fuzz/malformed.py --device cuda --seed 7 --cases 500

What such a call computes is not promised. It must return, write nothing but its results (canaries stand around every tensor
that it is given, and between those that it allocates; slots that nothing names keep their bits), and leave the stream fit for
the next call: after each one a right call must give the bits that it gave before. A case is drawn from (seed, number) alone.
"""

import argparse
import collections
import faulthandler
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import helpers
import numpy as np
import paths_plugin
import torch
from helpers import Guarded, assert_bitwise

import flash_qla

LARGE = 2**31 - 1
# Offsets of sequences in T tokens. The first ones are those of tests/python/test_check_mode.py.
OFFSETS = {
    "begins late": lambda T: [5, T // 2, T], "begins before": lambda T: [-5, T // 2, T], "goes back": lambda T: [0, 6 * T // 10, T // 2],
    "past the end": lambda T: [0, T // 2, T + 1], "largest": lambda T: [0, LARGE, T], "negative": lambda T: [0, -1, T],
    "twice": lambda T: [0, T, 0, T], "four times": lambda T: [0, T] * 4, "least": lambda T: [0, -LARGE - 1, T],
    "downwards": lambda T: [T, T // 2, 0], "all past": lambda T: [2 * T, 3 * T, 4 * T],
    "overlapping": lambda T: [0, T, T // 4, T, T // 2, T],
    "64 bits": lambda T: [0, 2**62, -(2**62), T], "right": lambda T: [0, T // 3, T],
}
MODES = {
    "auto": dict(auto_cp=True), "invariant": dict(auto_cp="invariant"), "forced": dict(force_intra_cp=True),
    "invariant forced": dict(auto_cp="invariant", force_intra_cp=True), "off": dict(auto_cp=False)}
# Tokens with which a mode cuts a sequence in two value heads, and more than it allows itself room for where one is there twice.
TOKENS = {"auto": 4096, "invariant": 16_384, "forced": 2100, "invariant forced": 2100, "off": 1000}
VALUES = {
    "usual": {}, "no decay": dict(g=0.0), "NaN gates": dict(g=torch.nan), "g = inf": dict(g=torch.inf), "g = -inf": dict(g=-torch.inf),
    "huge gates": dict(g=1e30), "NaN betas": dict(beta=torch.nan), "infinite betas": dict(beta=torch.inf), "huge betas": dict(beta=-1e30),
    "NaN keys": dict(k=torch.nan), "infinite keys": dict(k=torch.inf), "huge keys": dict(k=6e4), "NaN values": dict(v=torch.nan),
    "infinite queries": dict(q=-torch.inf), "NaN everywhere": dict(q=torch.nan, k=torch.nan, v=torch.nan, g=torch.nan, beta=torch.nan)}
SLOTS = 9


def random_offsets(rng, T):
    return rng.integers(-T // 2, 3 * T // 2, int(rng.integers(2, 40))).tolist()


def random_slots(rng, shape):
    """Slots in the pool and out of it, null ones, some of them twice."""
    return rng.choice([*range(SLOTS), *range(SLOTS), -1, -7, SLOTS, SLOTS + 1, LARGE, -LARGE - 1], shape).tolist()


def listed(operation, device):
    """The cases of an operation that are always run: every mode with every kind of offsets, and all values."""
    for mode in MODES if device == "cuda" and operation != "decode" else ["auto"]:
        T = TOKENS[mode] if device == "cuda" else 130
        common = dict(operation=operation, mode=mode, K=128)
        for number, offsets in enumerate(OFFSETS):
            yield dict(common, T=T, offsets=OFFSETS[offsets](T), values="no decay" if number % 2 else "usual", seed=number)
        for seed in range(96, 100):  # both dtypes with 2 and with 4 value heads
            yield dict(common, T=T, offsets=OFFSETS["twice"](T), values="no decay", seed=seed)
        T = min(T, 4200)  # as many as "invariant" cuts
        for number, values in enumerate(VALUES):
            yield dict(common, T=T, offsets=[0, T - 1, T], values=values, seed=number)


def draw_case(seed, number, device):
    rng = np.random.default_rng([seed, number])
    mode = str(rng.choice(list(MODES)))
    T = int(rng.choice([70, 100, 300, 600, *([1000, 2100, 4096, TOKENS[mode]] if device == "cuda" else [])]))
    kind = str(rng.choice([*OFFSETS, *["random"] * 8]))
    return dict(
        operation=str(rng.choice(list(OPERATIONS))), mode=mode, T=T, offsets=random_offsets(rng, T) if kind == "random" else OFFSETS[kind](T),
        K=int(rng.choice([128, 128, 128, 64])), values=str(rng.choice([*VALUES, *["usual"] * 6])), seed=int(rng.integers(1 << 30)))


class Case:
    """The tensors of a case, between canaries, and what must not change."""

    def __init__(self, case, device):
        self.rng, self.device = np.random.default_rng(case["seed"]), device
        self.options = MODES[case["mode"]]
        dtype = helpers.LOW[case["seed"] % 2]
        heads = dict(Hq=1, Hv=2) if case["seed"] % 4 < 2 else dict(Hq=2, Hv=4)
        decode = case["operation"] == "decode"
        shape = dict(B=7, T=int(self.rng.integers(1, 17))) if decode else dict(T=case["T"])
        x = helpers.make_inputs(**shape, **heads, K=case["K"], dtype=dtype, state=False, device=device, drawn_on=device, seed=case["seed"])
        self.pool_dtype = dtype if case["seed"] % 5 == 0 else torch.float32
        for name, value in VALUES[case["values"]].items():
            t = getattr(x, name)
            t[torch.from_numpy(self.rng.random(t.shape[:3]) < self.rng.choice([0.02, 1.0])).to(device)] = value
        self.guarded = []
        offsets = torch.tensor(case["offsets"])
        wide = bool(offsets.abs().max() > LARGE or case["seed"] % 3 == 0)
        guarded = {name: self.guard(getattr(x, name)) for name in ("q", "k", "v", "g", "beta", "do")}
        self.x = x.replace(**guarded, cu_seqlens=None if decode else self.guard(offsets.to(device, torch.int64 if wide else torch.int32)))
        self.before = [(g, g.tensor.clone()) for g in self.guarded]
        self.N = 7 if decode else len(case["offsets"]) - 1
        self.bystanders = self.stand_between(x)

    def guard(self, value):
        self.guarded.append(Guarded(value))
        return self.guarded[-1].tensor

    def index(self, values):
        return self.guard(torch.tensor(values, dtype=torch.int32, device=self.device))

    @staticmethod
    def stand_between(x):
        """Tensors with holes between them, as large as results: what a call allocates lies there."""
        kept, holes = [], []
        for like in (x.v, x.v, x.q, x.q, x.dht, x.dht, x.g, x.g):
            holes.append(torch.empty_like(like))
            kept.append(torch.full_like(like, 7.0))
        return kept

    def states(self, rows):
        values = torch.randn(rows, *self.x.v.shape[2:], self.x.q.shape[3], generator=torch.Generator().manual_seed(1))
        return self.guard(values.to(self.device, self.pool_dtype))

    def check(self, pool=None, named=()):
        for g, was in self.before:
            assert_bitwise("an input", g.tensor, was)
        assert all(g.intact() for g in self.guarded), "written outside of a tensor"
        assert all((t == 7.0).all() for t in self.bystanders), "written outside of the results"
        if pool is not None:
            now, was = pool
            unused = [slot for slot in range(SLOTS) if slot not in named]
            assert_bitwise("slots that nothing names", now[unused], was[unused])


def run_forward(c):
    flash_qla.chunk_gated_delta_rule_fwd(
        c.x.q, c.x.k, c.x.v, c.x.g, c.x.beta, initial_state=c.guard(torch.zeros(c.N, *c.x.dht.shape[1:], device=c.device)),
        cu_seqlens=c.x.cu_seqlens, output_h=True, auto_cp=c.options.get("auto_cp", True),
        cp_context=flash_qla.build_cp_context(c.x.cu_seqlens, force_intra_cp="force_intra_cp" in c.options))
    with torch.no_grad():
        helpers.call(c.x, **c.options)
    c.check()


def run_backward(c):
    x = c.x.replace(initial_state=torch.zeros(c.N, *c.x.dht.shape[1:], device=c.device))
    helpers.run(x.replace(dht=torch.ones_like(x.initial_state)), **c.options)
    helpers.run(x.replace(dht=None, initial_state=None), **c.options)
    c.check()


def prefill(c, **more):
    pool, out = c.states(SLOTS), c.guard(torch.zeros_like(c.x.v))
    was, initial, final = pool.clone(), random_slots(c.rng, c.N), random_slots(c.rng, c.N)
    started = torch.tensor(c.rng.integers(0, 2, c.N), dtype=torch.bool, device=c.device)
    auto_cp = c.options.get("auto_cp", True)  # the serving call is not forced
    for indices in (final, None):
        flash_qla.gated_delta_rule_prefill(
            c.x.q, c.x.k, c.x.v, c.x.g, c.x.beta, pool, c.index(initial), None if indices is None else c.index(indices),
            cu_seqlens=c.x.cu_seqlens, has_initial_state=started, out=out, auto_cp=auto_cp, **more)
    c.check((pool, was), {*initial, *final})


def run_prefill(c):
    prefill(c)


def run_checkpoints(c):
    for starts in ([0] * (c.N + 1), [-3, *[LARGE] * c.N], c.rng.integers(-10, 20, c.N + 1).tolist()):
        prefill(c, checkpoint_every=64 * int(c.rng.integers(1, 3)), checkpoints=c.states(5), checkpoint_cu_starts=c.index(starts))


def run_listed(c):
    T, M = c.x.q.shape[1], int(c.rng.integers(1, 40))
    positions = c.rng.choice([0, 1, 63, 64, T, T + 1, -1, LARGE, -LARGE - 1, *c.rng.integers(0, T, 9)], M).tolist()
    slots = random_slots(c.rng, M)
    pool, out = c.states(SLOTS), c.guard(torch.zeros_like(c.x.v))
    was, initial = pool.clone(), random_slots(c.rng, c.N)
    flash_qla.gated_delta_rule_prefill(
        c.x.q, c.x.k, c.x.v, c.x.g, c.x.beta, pool, c.index(initial), cu_seqlens=c.x.cu_seqlens, out=out,
        checkpoint_offsets=c.index(positions), checkpoint_indices=c.index(slots), auto_cp=c.options.get("auto_cp", True))
    c.check((pool, was), {*initial, *slots})


def run_decode(c):
    T, N = c.x.q.shape[1], c.N
    for accepted in (None, c.rng.choice([0, -1, 1, 3, 9, LARGE, -LARGE - 1], N).tolist()):
        pool, out = c.states(SLOTS), c.guard(torch.zeros_like(c.x.v))
        was = pool.clone()
        initial, final = random_slots(c.rng, N if accepted is None else (N, 3)), random_slots(c.rng, (N, T))
        flash_qla.gated_delta_rule_decode(
            c.x.q, c.x.k, c.x.v, c.x.g, c.x.beta, pool, c.index(initial), c.index(final), out=out,
            num_accepted_tokens=None if accepted is None else c.index(accepted))
        c.check((pool, was), {*np.ravel(initial).tolist(), *np.ravel(final).tolist()})


OPERATIONS = {
    "forward": run_forward, "backward": run_backward, "prefill": run_prefill, "checkpoints": run_checkpoints, "listed": run_listed,
    "decode": run_decode}


class RightCall:
    """A call that is in order: right the first time, and the same bits every time after."""

    def __init__(self, device):
        lengths = [300, 0, 65] if device == "cuda" else [70, 0, 65]
        self.cases = [helpers.make_inputs(seqlens=lengths, Hq=1, Hv=2, dtype=dtype, device=device) for dtype in helpers.LOW]
        self.first = [helpers.run(x, auto_cp=False) for x in self.cases]
        for x, got in zip(self.cases, self.first):
            helpers.compare({name: got[name] for name in ("o", "final_state")}, helpers.reference(x, grads=False), x.dtype)

    def check(self, number):
        x, first = self.cases[number % 2], self.first[number % 2]
        for name, value in helpers.run(x, auto_cp=False).items():
            assert_bitwise(f"{name} of a right call", value, first[name])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=0, help="draw so many cases in place of the listed ones")
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--operation", choices=list(OPERATIONS), help="the listed cases of this operation alone")
    parser.add_argument("--seconds", type=float, default=60, help="a case that takes longer hangs: the program ends with a traceback")
    options = parser.parse_args()
    helpers.settings.device = options.device
    paths = paths_plugin.Paths(options.device)
    paths.watch()
    if options.cases:
        cases = [draw_case(options.seed, number, options.device) for number in range(options.cases)]
    else:
        cases = [case for name in ([options.operation] if options.operation else OPERATIONS) for case in listed(name, options.device)]
    print(f"commit: {flash_qla.build_info().get('commit', 'unknown')}", flush=True)
    right, by_path, failures, done, start = RightCall(options.device), collections.Counter(), 0, 0, time.time()
    paths.calls.clear()
    for number in range(len(cases)) if options.case is None else [options.case]:
        faulthandler.dump_traceback_later(options.seconds, exit=True)
        print(f"case {number}: {cases[number]}", flush=True)  # the last one that is printed is the one that crashed or hangs
        done, before = done + 1, len(paths.calls)
        try:
            OPERATIONS[cases[number]["operation"]](Case(cases[number], options.device))
            if options.device == "cuda":
                torch.cuda.synchronize()
            own = len(paths.calls)
            by_path.update({call.path for call in paths.calls[before:own]})
            right.check(number)
            del paths.calls[own:]
        except Exception:
            failures += 1
            traceback.print_exc()
            print(f"FAILED case {number}", flush=True)
            try:
                if options.device == "cuda":
                    torch.cuda.synchronize()
            except Exception:
                break  # the context is gone: every further case would fail
    faulthandler.cancel_dump_traceback_later()
    for name, value in paths.properties():
        print(f"{name}: {value}")
    what = f"seed {options.seed}" if options.cases else f"listed, {options.operation or 'all operations'}"
    counted = ", ".join(f"{path} {count}" for path, count in by_path.most_common())
    print(f"malformed data, {what}, {options.device}: {done} cases, {failures} failed, {time.time() - start:.1f} s; {counted}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
