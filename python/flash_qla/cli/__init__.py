"""The command line. Each command is a module of its own, imported when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Optional

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="flash_qla: report, check, measure, demonstrate.")


@app.command()
def info() -> None:
    """Report the environment: version, paths, instruction sets, GPUs, neighbouring packages."""
    from .info import report

    report()


@app.command()
def check(
    set_: str = typer.Option("develop", "--set", help="develop, varlen, profile or product"),
    num_heads: int = typer.Option(32, min=1, help="value heads of every case"),
    ref_dtype: str = typer.Option("float64", help="float64 or float32: dtype of the oracle's inputs and results"),
    device: str = typer.Option("cpu", help="cpu or cuda"),
    seed: int = typer.Option(0, help="seed of the first case; each case adds one"),
    only: Optional[int] = typer.Option(None, help="run this case of the set alone"),
) -> None:
    """Compare forward and backward with the fp64 oracle; exit with 1 if any case fails."""
    from .check import run_set

    raise typer.Exit(run_set(set_, num_heads, ref_dtype, device, seed, only))


@app.command()
def bench(
    cpu: bool = typer.Option(False, "--cpu", help="the CPU path against Transformers' torch functions"),
    mode: str = typer.Option(
        "fwd",
        help="on a GPU: any of fwd,bwd,train,decode,options,portable_forward,portable_backward,prefill,steps,verify; "
        "serving: the last three; or cp_fwd,cp_train",
    ),
    ranks: Optional[int] = typer.Option(None, min=1, help="of cp_fwd and cp_train: so many simulated ranks"),
    peer_results: str = typer.Option("", help="of cp_fwd and cp_train: folders of cli/bench_cards_peers.py"),
    heads: str = typer.Option("", help="on a GPU: only these, as 16x64,8x32"),
    seqs: str = typer.Option("", help="on a GPU: only these rows, as 8192x4,1x32768"),
    short: bool = typer.Option(False, "--short", help="on a GPU: a few rows of each mode, a minute in all"),
    peer_rows: bool = typer.Option(False, "--peer-rows", help="on a GPU: the rows chosen for peers that compile long"),
    gates: str = typer.Option("", help="on a GPU: any of mixed,none,strong,changing (decay)"),
    peers: str = typer.Option(
        "",
        help="on a GPU: fla, flashqla, flashinfer, vllm, sglang (their Triton operations); name=folder where it is not "
        "importable here",
    ),
    peer_seconds: float = typer.Option(600.0, min=1.0, help="on a GPU: most that the peers may take to compile"),
    compile_only: bool = typer.Option(
        False, "--compile-only", help="on a GPU: let the peers compile into their caches, and measure nothing"
    ),
    errors_only: bool = typer.Option(
        False, "--errors-only", help="on a GPU: errors and memory of ours and of the peers, and no times"
    ),
    recorded: Optional[Path] = typer.Option(
        None, help="on a GPU: other packages' times of an earlier run on it, as benchmarks/recorded/h200_peers.csv"
    ),
    runs: int = typer.Option(15, min=1, help="timed repetitions; the median counts"),
    seconds: Optional[float] = typer.Option(
        None, min=1.0, help="on a GPU: begin no row later than this; the files name the rows that they lack"
    ),
    merge: bool = typer.Option(
        False, "--merge", help="on a GPU: put the rows into the files that are there, of the same machine and commit"
    ),
    out: Optional[Path] = typer.Option(
        None,
        help="results file to write (.json), with a .csv and a .png beside it; on a GPU {machine} stands for the GPU "
        "(h200) and {mode} for the mode",
    ),
) -> None:
    """Measure, each row after a correctness check; a row whose check fails is not written and the exit code is 1.

    The results file is brought up to date after every row. cp_fwd and cp_train are about several cards: torchrun
    starts a process for each, or --ranks simulates them.
    """
    if mode.startswith("cp_"):
        from . import bench_cards

        cards = bench_cards.Options(
            modes=mode.split(","),
            heads=heads,
            seqs=seqs,
            gates=gates,
            ranks=ranks,
            cpu=cpu,
            runs=runs,
            peer_results=[Path(folder) for folder in peer_results.split(",") if folder],
            merge=merge,
            out=out,
            **({} if seconds is None else {"seconds": seconds}),
        )
        raise typer.Exit(bench_cards.run(cards))
    if cpu:
        from .bench_cpu import run

        raise typer.Exit(run(runs, out))
    from .bench_gpu import Options
    from .bench_gpu import run as run_gpu

    options = Options(
        modes=mode.split(","),
        heads=heads,
        seqs=seqs,
        choice="peers" if peer_rows else "short" if short else "all",
        gates=gates,
        peers=[item for item in peers.split(",") if item],
        peer_seconds=peer_seconds,
        recorded=recorded,
        runs=runs,
        errors_only=errors_only,
        compile_only=compile_only,
        merge=merge,
        out=out,
        **({} if seconds is None else {"seconds": seconds}),
    )
    raise typer.Exit(run_gpu(options))


@app.command()
def demo(
    tokens: int = typer.Option(4096, min=1, help="length of the prompt"),
    device: Optional[str] = typer.Option(None, help="cpu or cuda; default: cuda where this build has it"),
) -> None:
    """Prefill a prompt with real shapes, decode a few tokens after it, print tokens per second."""
    from .demo import run

    raise typer.Exit(run(tokens, device))
