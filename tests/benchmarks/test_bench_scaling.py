"""Benchmarks on machines that are lent for minutes: a case that fails costs only its own result, and a run that was killed and
resumed is compared with itself."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import bench_recipe
import bench_scaling
from bench_scaling import CaseGrid
from bench_train import CASE_COLUMNS, TRANSFORMERS
from case_rows import UNFINISHED, CaseRows

CASE_ROW = {"layers": 2, "who": "ours", "layout": "FSDP", "ckpt": "none", "tokens/GPU": 64}


def rows_of(path: Path | None) -> CaseRows:
    return CaseRows(CASE_COLUMNS, result="s/step", path=path)


def test_a_case_that_was_started_is_known_to_the_next_process_and_its_last_row_counts(tmp_path):
    first = rows_of(tmp_path / "rows")
    first.start(CASE_ROW)
    reopened = rows_of(tmp_path / "rows")
    assert CASE_ROW in reopened and [row["s/step"] for row in reopened] == [UNFINISHED]
    reopened.add(CASE_ROW | {"s/step": 0.5})
    assert [row["s/step"] for row in rows_of(tmp_path / "rows")] == [0.5]
    assert CASE_ROW | {"tokens/GPU": 128} not in reopened and CASE_ROW | {"ckpt": "full"} not in reopened


def test_only_the_process_that_writes_touches_the_file(tmp_path):
    CaseRows(CASE_COLUMNS, result="s/step", path=tmp_path / "rows", writes=False).start(CASE_ROW)
    assert not (tmp_path / "rows").exists()


def test_a_grid_has_the_cases_that_bench_train_makes_of_its_options():
    grid = CaseGrid(("FSDP", TRANSFORMERS), (64, 128, 256), recompute_above=128)
    ours = {("FSDP", "none", 64), ("FSDP", "none", 128), ("FSDP", "full", 256)}
    upstreams = {(TRANSFORMERS, "none", 64), (TRANSFORMERS, "full", 128), (TRANSFORMERS, "full", 256)}
    assert grid.all_cases() == ours | upstreams
    theirs = CASE_ROW | {"who": TRANSFORMERS, "s/step": 1.0}
    assert grid.remaining([CASE_ROW, theirs]) == grid.all_cases() - {("FSDP", "none", 64), (TRANSFORMERS, "none", 64)}


def test_what_had_no_result_without_recomputing_is_measured_with_it_beside_the_layout_to_compare():
    grid = CaseGrid(("FSDP", "EP4, peer memory", TRANSFORMERS), (64, 128), recompute_above=128)
    rows = [CASE_ROW | {"loss 1": 5.0, "tokens/GPU": tokens} for tokens in (64, 128)]
    rows += [CASE_ROW | {"layout": "EP4, peer memory", "loss 1": 5.0}]
    out_of_memory = CASE_ROW | {"layout": "EP4, peer memory", "tokens/GPU": 128, "s/step": "out of memory"}
    with_recomputing = bench_scaling.grid_with_recomputing(grid, [*rows, out_of_memory])
    assert with_recomputing.all_cases() == {("FSDP", "full", 128), ("EP4, peer memory", "full", 128)}
    assert bench_scaling.grid_with_recomputing(grid, [*rows, out_of_memory | {"loss 1": 5.0}]) is None


def test_the_recipe_gets_the_settings_whose_cases_have_results():
    experts = CASE_ROW | {"layout": "EP4, peer memory", "loss 1": 5.0}
    assert bench_scaling.recipe_settings([experts, CASE_ROW | {"loss 1": 5.0}], 4) == ["parallel.ep=4"]
    collectives = "parallel.shard_exchange=collectives"
    assert bench_scaling.recipe_settings([CASE_ROW, experts], 4) == ["parallel.ep=4", collectives]
    upstreams = CASE_ROW | {"who": TRANSFORMERS, "loss 1": 5.0}
    assert bench_scaling.recipe_settings([upstreams], 4) == ["parallel.ep=1", collectives]


# Starts each case of the layouts in its arguments that the file of rows does not have; one kills its process, one is silent.
SCRIPT = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from case_rows import CaseRows
rows = CaseRows(("layers", "who", "layout", "ckpt", "tokens/GPU"), result="s/step", path=Path(sys.argv[2]))
for layout in sys.argv[3:]:
    row = {"layers": 2, "who": "ours", "layout": layout, "ckpt": "none", "tokens/GPU": 64}
    if row in rows:
        continue
    rows.start(row)
    if layout == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if layout == "hangs":
        time.sleep(600)
    rows.add(row | {"s/step": 0.1, "loss 1": 5.0})
"""


@dataclass(frozen=True)
class Scripted(CaseGrid):
    def command(self, gpus: int, rows_file: Path, budget: float) -> list[str]:
        return [sys.executable, "-c", SCRIPT, str(bench_scaling.HERE), str(rows_file), *self.layouts]


def test_a_case_that_dies_or_hangs_costs_itself_alone(tmp_path):
    rows_file, grid = tmp_path / "rows", Scripted(("first", "kills", "hangs", "last"), (64,), recompute_above=64)
    bench_scaling.measure(grid, 1, rows_file, tmp_path / "log", time.monotonic() + 60, max_silence=1.0)
    found = {row["layout"]: row["s/step"] for row in bench_scaling.last_rows(rows_file)}
    assert found == {"first": 0.1, "kills": UNFINISHED, "hangs": UNFINISHED, "last": 0.1}


@dataclass(frozen=True)
class Broken(CaseGrid):
    def command(self, gpus: int, rows_file: Path, budget: float) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(2)"]


def test_nothing_is_tried_twice_where_a_process_starts_no_case(tmp_path, capsys):
    bench_scaling.measure(
        Broken(("FSDP",), (64,), recompute_above=64),
        1,
        tmp_path / "rows",
        tmp_path / "log",
        time.monotonic() + 60,
        max_silence=30.0,
    )
    assert capsys.readouterr().out.count("bench_train: started 0 cases; exit status 2") == 1


# ------------------------------------------------------------------------------------------- the recipe


def lines(*losses: float, first: int = 1) -> list[dict]:
    return [{"step": step, "loss": loss, "grad_norm": 2 * loss} for step, loss in enumerate(losses, first)]


def test_the_steps_of_both_runs_are_compared():
    found = bench_recipe.compare(lines(5.0, 4.0, 3.0, 2.0), lines(5.0, 4.0, 3.0, 2.2, 1.0), saved=2)
    assert found["steps of both"] == [3, 4] and found["last step"] == 5
    assert found["loss: relative difference of the first step after"] == 0.0
    assert found["loss: largest relative difference"] == pytest.approx(0.1)
    assert found["grad_norm: largest relative difference"] == pytest.approx(0.1)


def test_runs_that_cannot_be_compared_are_no_success():
    with pytest.raises(bench_recipe.RecipeFailed, match="did not keep the losses"):
        bench_recipe.compare(lines(5.0, 4.0, 3.0), lines(5.0, 4.1, 3.0), saved=2)
    with pytest.raises(bench_recipe.RecipeFailed, match="No step after the checkpoint"):
        bench_recipe.compare(lines(5.0, 4.0), lines(5.0, 4.0, 3.0), saved=2)


def test_a_partial_checkpoint_does_not_count(tmp_path):
    (tmp_path / "checkpoints" / ".step-24.partial").mkdir(parents=True)
    assert bench_recipe.newest_complete_step(tmp_path) is None
    (tmp_path / "checkpoints" / "step-12").mkdir()
    assert bench_recipe.newest_complete_step(tmp_path) == 12


def test_a_run_that_ends_by_itself_was_not_killed(tmp_path):
    command = [sys.executable, "-c", "print('done')"]
    with pytest.raises(bench_recipe.RecipeFailed, match="ended by itself, with 0"):
        bench_recipe.run_and_kill(command, tmp_path, tmp_path / "log", time.monotonic() + 30)
