#!/usr/bin/env python3
"""Requirement 21: seeded differential fuzzing of the public calls against the fp64 oracle.

    python tests/fuzz/fuzz.py --seed 7 --cases 200                      # on the CPU
    python tests/fuzz/fuzz.py --seed 7 --cases 200 --device cuda        # the same cases on a GPU
    python tests/fuzz/fuzz.py --seed 7 --cases 200 --device cuda --against cpu   # GPU against the CPU path too
    python tests/fuzz/fuzz.py --seed 7 --cases 200 --device cuda --hopper        # cases for the Hopper path alone
    python tests/fuzz/fuzz.py --seed 7 --cases 3500 --device cuda --path sm80    # a path; what it does not take is counted apart

A case is drawn from (seed, number) alone, so the command printed for a failing case repeats it on any machine.
"""

import argparse
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import helpers
import numpy as np
import oracle
import paths_plugin
import torch

import flash_qla

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Head dims at and around the sizes that kernels treat specially, and a few that none does.
DIMS = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 48, 64, 65, 80, 96, 100, 127, 128, 129, 160, 192, 255, 256]
# Work of one case (tokens x heads x K x V) stays below this, so that a case takes about a second in the oracle.
MAX_WORK = 3e7
# Of errors that say that the path which was named does not take a call.
NOT_FOR_THE_PATH = ["no path computes this call", "must be one of: cuda_"]


def draw_lengths(rng):
    kind = rng.integers(4)
    if kind == 0:
        return [int(rng.integers(0, 300))]
    if kind == 1:
        return rng.integers(0, 12, int(rng.integers(1, 40))).tolist()
    if kind == 2:
        return rng.choice([0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129], int(rng.integers(1, 8))).tolist()
    return [int(rng.integers(150, 900)), *rng.integers(0, 70, int(rng.integers(0, 5))).tolist()]


def draw_case(seed, number, hopper=False):
    """A dictionary that describes the case in plain words, and make_inputs' arguments. hopper: K = V = 128 in bf16 or fp16,
    and 65 tokens at least: of fewer, dg and dbeta on tensor cores are not held to bounds (docs/numerics.md)."""
    rng = np.random.default_rng([seed, number])
    Hq = int(rng.choice([1, 2, 3, 4]))
    arguments = dict(
        Hq=Hq, Hv=Hq * int(rng.choice([1, 1, 2, 3, 4])), K=int(rng.choice(DIMS)), V=int(rng.choice(DIMS)),
        dtype=DTYPES[rng.integers(len(DTYPES))], state=bool(rng.integers(2)), raw=bool(rng.integers(2)),
        state_v_first=bool(rng.integers(2)), seed=int(rng.integers(1 << 30)),
        state_dtype=DTYPES[rng.integers(len(DTYPES))], index_dtype=[torch.int32, torch.int64][rng.integers(2)])
    if arguments["raw"]:
        arguments["allow_neg_eigval"] = bool(rng.integers(2))
    lengths, packed = draw_lengths(rng), bool(rng.integers(2))
    if hopper:
        arguments |= dict(K=128, V=128, dtype=helpers.LOW[number % 2])
        lengths[0] += 65
    if packed:
        arguments |= dict(seqlens=lengths, padding=int(rng.choice([0, 0, 1, 40])))
    else:
        arguments |= dict(B=int(rng.integers(1, 4)), T=lengths[0])
    heads = arguments["Hv"] * arguments["K"] * arguments["V"]
    tokens = sum(lengths) if packed else arguments["B"] * arguments["T"]
    while hopper and arguments["Hv"] > 1 and tokens * heads > MAX_WORK:
        arguments |= dict(Hq=1, Hv=arguments["Hv"] // 2)
        heads = arguments["Hv"] * 128 * 128
    while not hopper and tokens * heads > MAX_WORK:
        arguments["K"], arguments["V"] = max(1, arguments["K"] // 2), max(1, arguments["V"] // 2)
        heads = arguments["Hv"] * arguments["K"] * arguments["V"]
    return dict(
        arguments=arguments, operation=["chunk", "chunk", "recurrent", "prefill", "decode"][rng.integers(5)],
        gate=["usual", "strong", "none", "absent"][rng.integers(4)], auto_cp=[True, False, "invariant"][rng.integers(3)],
        force_intra_cp=bool(rng.integers(4) == 0), strided=bool(rng.integers(4) == 0), pool_seed=int(rng.integers(1 << 30)),
        drafts=int(rng.integers(1, 17)))


def make_case(case, device):
    arguments = dict(case["arguments"])
    if case["operation"] == "decode":
        for name in ("seqlens", "padding"):
            arguments.pop(name, None)
        arguments |= dict(B=5, T=case["drafts"])
    x = helpers.make_inputs(**arguments, device=device)
    if case["gate"] == "absent" and not arguments["raw"]:
        x = x.replace(g=None)
    elif case["gate"] == "strong":
        x = x.replace(g=x.g * 50 if not arguments["raw"] else x.g + 5)
    elif case["gate"] == "none" and not arguments["raw"]:
        x = x.replace(g=torch.zeros_like(x.g))
    if case["strided"]:
        x = x.replace(**{name: getattr(x, name).transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v", "do")})
    return x


def run_chunk(case, x):
    got = helpers.run(x, auto_cp=case["auto_cp"], force_intra_cp=case["force_intra_cp"])
    return got, helpers.reference(x)


def run_recurrent(case, x):
    with torch.no_grad():
        o, final_state = flash_qla.fused_recurrent_gated_delta_rule(
            x.q, x.k, x.v, g=x.g, beta=x.beta, initial_state=x.initial_state, output_final_state=True, cu_seqlens=x.cu_seqlens,
            A_log=x.A_log, dt_bias=x.dt_bias, **x.options)
    return {"o": o, "final_state": final_state}, helpers.reference(x, grads=False)


def run_serving(case, x):
    """prefill or decode with slots drawn from the case: some skipped, some past the pool, reads and writes apart."""
    rng = np.random.default_rng(case["pool_seed"])
    N, Hv = x.num_sequences, x.v.shape[2]
    slots = 2 * N + 3
    order = rng.permutation(slots)
    initial, final = order[:N].copy(), order[N:2 * N].copy()
    if rng.integers(2):
        final = initial.copy()
    initial[rng.random(N) < 0.15] = -1
    final[rng.random(N) < 0.15] = -1
    final[rng.random(N) < 0.05] = slots + 5
    state = (Hv, x.v.shape[3], x.q.shape[3]) if x.options.get("state_v_first") else (Hv, x.q.shape[3], x.v.shape[3])
    dtype = DTYPES[rng.integers(len(DTYPES))]
    values = torch.from_numpy(rng.standard_normal((slots, *state))).to(x.q.device, dtype)
    pool, index_dtype = values.clone(), [torch.int32, torch.int64][rng.integers(2)]

    def tensor(array):
        return torch.from_numpy(np.asarray(array)).to(x.q.device, index_dtype)

    options = dict(state_v_first=False) | x.options
    if case["operation"] == "prefill":
        o = flash_qla.gated_delta_rule_prefill(
            x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial), tensor(final), cu_seqlens=x.cu_seqlens, A_log=x.A_log,
            dt_bias=x.dt_bias, auto_cp=case["auto_cp"], **options)
    else:
        o = flash_qla.gated_delta_rule_decode(
            x.q, x.k, x.v, x.g, x.beta, pool, tensor(initial), tensor(final), A_log=x.A_log, dt_bias=x.dt_bias, **options)
    want_o, want_pool, _ = oracle.pooled(
        *(helpers.to_numpy(t) for t in (x.q, x.k, x.v, x.g, x.beta)), pool=helpers.to_numpy(values), initial_indices=initial,
        final_indices=final, cu_seqlens=None if x.cu_seqlens is None else x.cu_seqlens.cpu().numpy(),
        A_log=helpers.to_numpy(x.A_log), dt_bias=helpers.to_numpy(x.dt_bias), options=helpers.oracle_options(x.dtype, options))
    written = sorted({int(f) for i, f in zip(initial, final) if i >= 0 and 0 <= f < slots})
    others = [slot for slot in range(slots) if slot not in written]
    helpers.assert_bitwise("pool", pool[others], values[others])
    bound = helpers.bound_for("pool", x.dtype if dtype == torch.float32 else dtype)
    if written:
        helpers.assert_close("pool", pool[written], want_pool[written], bound, 1)
    return {"o": o}, {"o": want_o}


RUNNERS = {"chunk": run_chunk, "recurrent": run_recurrent, "prefill": run_serving, "decode": run_serving}


def run_case(case, device, against):
    x = make_case(case, device)
    got, want = RUNNERS[case["operation"]](case, x)
    bounds = bounds_of(case, want)
    helpers.compare(got, want, x.dtype, bounds=bounds)
    if against == "cpu" and device != "cpu":
        on_cpu, _ = RUNNERS[case["operation"]](case, make_case(case, "cpu"))
        # Each is within the bound of the truth, so within twice of each other. The terms of sums are the oracle's.
        values = want | {name: helpers.to_numpy(t) for name, t in on_cpu.items()}
        helpers.compare(got, values, x.dtype, bounds={name: 2 * bound for name, bound in bounds.items()})


def bounds_of(case, want):
    """The usual bounds; results that come back in a narrower dtype than q's are held to that dtype's."""
    dtype, low = case["arguments"]["dtype"], helpers.LOW_PRECISION
    bounds = {name: helpers.bound_for(name, dtype) for name in want if name in helpers.TENSORS}
    if case["arguments"]["state_dtype"] in helpers.LOW and "dh0" in bounds:
        bounds["dh0"] = low["grad"]
    return bounds


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--case", type=int, help="run this case alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--path", default="auto")
    parser.add_argument("--hopper", action="store_true", help="draw K = V = 128 in bf16 and fp16 alone")
    parser.add_argument("--against", default="oracle", choices=["oracle", "cpu"])
    parser.add_argument("--seconds", type=float, help="stop after this time")
    options = parser.parse_args()
    print(f"commit: {flash_qla.build_info()['commit']}", flush=True)
    helpers.settings.device, start, failures, done, refused = options.device, time.time(), 0, 0, 0
    paths = paths_plugin.Paths(options.device)
    paths.watch()
    for number in [options.case] if options.case is not None else range(options.cases):
        if options.seconds and time.time() - start > options.seconds:
            break
        case = draw_case(options.seed, number, options.hopper)
        done += 1
        try:
            with helpers.use_path(options.path):
                run_case(case, options.device, options.against)
        except Exception as error:  # whatever it is, the case that did it must be printed
            if options.path != "auto" and any(words in str(error) for words in NOT_FOR_THE_PATH):
                refused += 1
                continue
            failures += 1
            print(f"FAILED case {number}: {type(error).__name__}: {error}\n  {case}")
            if options.case is not None:
                traceback.print_exc()
            print(f"  repeat: python tests/fuzz/fuzz.py --seed {options.seed} --case {number} --device {options.device} "
                  f"--path {options.path} --against {options.against}{' --hopper' * options.hopper}", flush=True)
    for name, value in paths.properties():
        print(f"{name}: {value}")
    print(f"fuzz{', Hopper' * options.hopper}, seed {options.seed}, {options.device}, path {options.path}, against {options.against}: "
          f"{done - refused} cases, {failures} failed, {refused} not for the path, {time.time() - start:.1f} s")
    return 1 if failures or done == refused else 0  # what computed nothing has tested nothing


if __name__ == "__main__":
    sys.exit(main())
