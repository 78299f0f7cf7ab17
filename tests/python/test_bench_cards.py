"""`bench --mode cp_fwd,cp_train`, on the CPU: simulated ranks, ranks of torchrun, and what other packages have left."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flash_qla.cli import bench_cards, bench_cards_inputs, bench_protocol
from flash_qla.cli.bench_cards_ranks import Ranks

pytestmark = pytest.mark.cpu_only

CLI = Path(bench_cards.__file__).parent
TENSORS = {"cp_fwd": {"o"}, "cp_train": {"o", "dq", "dk", "dv", "dg", "dbeta"}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(bench_cards_inputs, "BLOCK", 128)
    monkeypatch.setattr("flash_qla.cli.bench_timing.LOAD_S", 0.01)


def options(tmp_path, **others):
    given = dict(modes=["cp_fwd", "cp_train"], heads="1x2", seqs="1x384", ranks=3, cpu=True, runs=2, out=tmp_path / "{machine}_cards.json")
    return bench_cards.Options(**{**given, **others})


def report_of(tmp_path):
    file, = tmp_path.glob("*_cards.json")
    return json.loads(file.read_text())


def test_simulated_ranks(tmp_path, capsys):
    assert bench_cards.run(options(tmp_path)) == 0
    report = report_of(tmp_path)
    assert report["protocol"] == bench_protocol.protocol(report["method"])
    assert [(row["mode"], row["options"]) for row in report["rows"]] == [(mode, {"cards": 3, "simulated": True}) for mode in TENSORS]
    for row in report["rows"]:
        assert set(row["err"]) == set(row["one_card_err"]) == TENSORS[row["mode"]]
        assert all(0 < error < 5e-3 for error in row["err"].values())
        assert row["ms_min"] <= row["ms"] <= row["ms_max"] and row["speedup"] == pytest.approx(row["one_card_ms"] / row["ms"], abs=1e-3)
        assert row["share_ms_min"] <= row["share_ms"] <= row["share_ms_max"]
        assert row["work"] == pytest.approx(row["ms"] / row["share_ms"], abs=1e-3)
    printed = capsys.readouterr().out
    assert "cp_train 1/2 384 cards 3" in printed and "its share by the plain call" in printed


def test_one_rank_is_the_plain_call_and_comes_into_the_same_file(tmp_path):
    assert bench_cards.run(options(tmp_path, modes=["cp_fwd"])) == 0
    assert bench_cards.run(options(tmp_path, modes=["cp_fwd"], ranks=None, merge=True)) == 0
    first, second = report_of(tmp_path)["rows"]
    assert (first["options"]["cards"], second["options"]) == (3, {"cards": 1}) and "speedup" not in second
    assert second["err"]["o"] == pytest.approx(first["one_card_err"]["o"], rel=1e-6)


def test_a_gather_that_is_lost_is_found(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench_cards._Simulated, "all_gather", lambda self, x: torch.zeros((self.size(), *x.shape)))
    assert bench_cards.run(options(tmp_path, gates="none")) == 1
    assert not list(tmp_path.iterdir()) and "FAIL cp_fwd 1/2 384: o" in capsys.readouterr().out


@pytest.mark.parametrize("changes, sentence", [
    (dict(modes=["cp_fwd", "bwd"]), "--mode must be of cp_fwd, cp_train (bwd)"),
    (dict(gates="changing"), "--gates must be of mixed, none, strong (changing)"),
    (dict(merge=True, out=None), "--merge needs --out (no file was named)"),
    (dict(cpu=False), "a CUDA GPU must be present (none was found)"),
])  # fmt: skip
def test_what_is_refused(tmp_path, monkeypatch, capsys, changes, sentence):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_cards.run(options(tmp_path, **changes)) == 2
    assert sentence in capsys.readouterr().out


def test_tokens_that_do_not_divide_are_no_row(tmp_path, capsys):
    assert bench_cards.run(options(tmp_path, ranks=5)) == 1
    assert "384 tokens must be a multiple of the ranks (5)" in capsys.readouterr().out


def test_a_row_that_does_not_fit_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Ranks, "free_bytes", lambda self, alone=False: 1000)
    assert bench_cards.run(options(tmp_path)) == 0
    assert "left out cp_fwd 1/2 384: does not fit" in capsys.readouterr().out


ROW = dict(bench_cards_inputs.rows_of(["cp_train"], "2x4", "1x300", "")[0])


def test_shares_are_parts_of_one_stream():
    whole = bench_cards_inputs.make_share(ROW, 0, 300, torch.device("cpu"))
    part = bench_cards_inputs.make_share(ROW, 100, 290, torch.device("cpu"))
    head = bench_cards_inputs.make_share(ROW, 100, 290, torch.device("cpu"), 1)
    for name, x in whole.items():
        assert torch.equal(part[name], x[:, 100:290])
        assert torch.equal(head[name], bench_cards_inputs.heads_of(ROW, name, part[name], 1))
    assert head["q"].shape[2] == 1 and head["v"].shape[2] == head["g"].shape[2] == 2
    still = (whole["g"] == 0).all(1)[0]
    assert still.sum() == 1 and still.nonzero().item() == bench_cards_inputs.still_heads(ROW).item()
    assert not torch.equal(whole["v"][:, :128], whole["v"][:, 128:256])


def test_of_a_longer_stream_two_heads_are_checked():
    row = bench_cards_inputs.rows_of(["cp_fwd"], "8x32", "1x1048576", "")[0]
    heads = bench_cards_inputs.checked_heads(row)
    counts = [sum(still // 4 == h for still in bench_cards_inputs.still_heads(row).tolist()) for h in range(8)]
    assert len(heads) == 2 and sorted(counts[h] for h in heads) == sorted(counts)[-2:]
    assert bench_cards_inputs.checked_heads({**row, "seqlens": [131072]}) == list(range(8))


def test_the_table_has_two_lengths_of_two_head_counts_a_mode():
    rows = bench_cards_inputs.rows_of(["cp_fwd", "cp_train"], "", "", "")
    assert [(r["hq"], r["hv"], r["seqlens"]) for r in rows[:4]] == [(h, 4 * h, [n]) for n in (131072, 1048576) for h in (8, 16)]
    assert len(rows) == 8 and len({bench_cards.label(row) for row in rows}) == 8


def test_other_packages_stand_beside_ours(tmp_path, monkeypatch):
    """Their program, with a package whose outputs are off by a part in a hundred."""
    import flash_qla

    def stub(row, offsets):
        return lambda q, k, v, g, beta: flash_qla.chunk_gated_delta_rule(q, k, v, g, beta)[0] * 1.01

    monkeypatch.syspath_prepend(str(CLI))
    import bench_cards_peers

    monkeypatch.setattr(bench_cards_peers, "Ranks", lambda cpu: Ranks(cpu=True))
    monkeypatch.setattr(sys.modules["bench_cards_inputs"], "BLOCK", 128)
    monkeypatch.setitem(bench_cards_peers.PACKAGES, "stub", (stub, "numpy"))

    def broken(row, offsets):
        raise NotImplementedError("one card alone")

    monkeypatch.setitem(bench_cards_peers.PACKAGES, "broken", (broken, "numpy"))
    for package in ("stub", "broken"):
        bench_cards_peers.main(package, "cp_fwd", "1x2", "1x384", "", "2", str(tmp_path / "peers"))
    assert bench_cards.run(options(tmp_path, modes=["cp_fwd"], ranks=None, peer_results=[tmp_path / "peers"])) == 0
    row, = report_of(tmp_path)["rows"]
    (name, ms), = row["peers"].items()
    assert name.startswith("stub ") and row["peer_ms_min"][name] <= ms <= row["peer_ms_max"][name]
    assert row["peer_err_worst_head"][name]["o"] == pytest.approx(0.01, rel=0.3)


def test_ranks_of_torchrun(tmp_path):
    command = ["-m", "flash_qla", "bench", "--cpu", "--mode", "cp_train", "--heads", "1x2", "--seqs", "1x256", "--runs", "1"]
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *command,
                          "--out", str(tmp_path / "x_cards.json")], capture_output=True, text=True, timeout=120,
                         env={**os.environ, "OMP_NUM_THREADS": "1"})  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    row, = report_of(tmp_path)["rows"]
    assert row["options"] == {"cards": 2} and set(row["err"]) == TENSORS["cp_train"]
    assert ran.stdout.count("cp_train 1/2 256 cards 2:") == 1, "one rank prints"
