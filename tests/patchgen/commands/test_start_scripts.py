"""The scripts of `--script` hand on every word as it was given, run by bash with the cluster's commands replaced.

What a run on several machines cannot take is refused."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from invoked import invoke

from patchgen.commands.training import start_script
from patchgen.errors import ConfigError

RECIPE = "my recipes/it's $HOME; `touch broken`.yaml"
ASSIGNMENTS = [
    'data.sources.0.path=/data/a b/"c"',
    "model.freeze=['model.*', \"$x\"]",
    "name=two\nlines; touch broken",
]
STAND_INS = {
    "srun": 'shift; exec "$@"',  # on this machine
    "scontrol": "echo node0; echo node1",
    "ssh": 'exec bash -c "$3"',  # as sshd does: the words of a command are one text for a shell
    "patchgen": 'printf "%s\\0" "$@" > "arguments.$$"',
}


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_what_was_given_arrives(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """At the program of the environment that wrote the script, which nothing else puts on the path."""
    binaries, environment = tmp_path / "bin", tmp_path / "an $environment"
    binaries.mkdir()
    environment.mkdir()
    for name, does in STAND_INS.items():
        path = (environment if name == "patchgen" else binaries) / name
        path.write_text(f"#!/bin/bash\n{does}\n")
        path.chmod(0o755)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(environment))
    script = start_script(kind, Path(RECIPE), "a run\n#SBATCH --account=other", ASSIGNMENTS, 8, "2")
    assert "\n#SBATCH --account" not in script, "a name is one word"
    place = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7", "HOSTS": "node0 node1"}
    environment = {**os.environ, **place, "PATH": f"{binaries}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    arrived = [path.read_text().split("\0")[:-1] for path in tmp_path.glob("arguments.*")]
    sets = [word for assignment in ASSIGNMENTS for word in ("--set", assignment)]
    port = "20007" if kind == "slurm" else "29500"
    started = ["train", RECIPE, "--nproc", "8", "--nnodes", "2", *sets, "--rdzv-endpoint", f"node0:{port}"]
    assert arrived == [started] * (1 if kind == "slurm" else 2)
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
def test_a_script_does_not_drop_fresh_silently(kind: str):
    with pytest.raises(ConfigError, match="--fresh is not for --script.*--set log.directory"):
        invoke("train", "recipes/qwen3_moe_toy.yaml", "--script", kind, "--nnodes", "2", "--fresh")


@pytest.mark.parametrize("kind", ["slurm", "ssh"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["parallel.sp=3"], "does not divide the number of ranks, 16"),
        (["train.batches_per_step=10"], "batches_per_step = 10 is not divisible by the 16"),
        (["eval_data={}", "train.eval_batches=10"], "eval_batches = 10 is not divisible by the 16"),
    ],
)
def test_a_script_is_written_only_for_a_layout_that_fits(kind: str, settings: list[str], told: str):
    command = ["train", "recipes/qwen3_moe_toy.yaml", "--script", kind, "--nproc", "8", "--nnodes", "2"]
    with pytest.raises(ConfigError, match=told):
        invoke(*command, *(word for setting in settings for word in ("--set", setting)))
    assert f"PATH={sysconfig.get_path('scripts')}:" in invoke(*command).output


def test_a_range_of_one_number_of_machines_is_that_number():
    assert start_script("slurm", Path(RECIPE), "run", [], 8, "2:2") == start_script(
        "slurm", Path(RECIPE), "run", [], 8, "2"
    )


def test_a_number_of_ranks_that_is_none_is_refused():
    refused = invoke("train", "recipes/qwen3_moe_toy.yaml", "--nproc", "0")
    assert refused.exit_code == 2 and "--nproc" in refused.output


@pytest.mark.parametrize("nodes", ["two", "0", "2:", ":2", "4:2", "²"])
@pytest.mark.parametrize("shown", [["--dry-run"], ["--script", "ssh"], []])
def test_a_number_of_machines_that_is_none_is_refused(nodes: str, shown: list[str]):
    with pytest.raises(ConfigError, match=f"--nnodes must be a number .*, not '{nodes}'"):
        invoke("train", "recipes/qwen3_moe_toy.yaml", "--nnodes", nodes, *shown)


def test_a_script_is_for_a_fixed_number_of_machines():
    with pytest.raises(ConfigError, match=r"a fixed number of machines \(--nnodes\), not '2:4'"):
        invoke("train", "recipes/qwen3_moe_toy.yaml", "--script", "ssh", "--nnodes", "2:4")
