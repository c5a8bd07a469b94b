"""`patchgen train` as a command: stopped by Ctrl-C it saves and continues; a killed rank is restarted by the agent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import cases_trainer as cases
import pytest
import yaml

from patchgen.commands import training
from patchgen.errors import PatchgenError
from patchgen.runtime import launch
from patchgen.runtime.train import run_lock, run_log
from patchgen.runtime.train.recipe import RecipeError

STEPS = 30


def command(folder: Path, place: Path, *more: str, **changes: dict) -> list[str]:
    train = {"steps": STEPS, "batches_per_step": 4} | changes.pop("train", {})
    values = cases.recipe_of(folder, log={"directory": str(place / "run")}, train=train, **changes)
    (place / "mine.yaml").write_text(yaml.safe_dump(values))
    return [sys.executable, "-m", "patchgen.cli", "train", str(place / "mine.yaml"), *more]


def wait_for_step(process: subprocess.Popen, run: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while max((entry["step"] for entry in run_log.read(run)), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no step was taken"
        time.sleep(0.02)


def losses(run: Path) -> list[float]:
    entries = run_log.read(run)
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1)), "each step once, in order"
    return [entry["loss"] for entry in entries]


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def test_ctrl_c_saves_and_the_same_command_continues(trainer_folder, tmp_path, one_rank):
    arguments = command(trainer_folder, tmp_path)
    process = start(arguments)
    wait_for_step(process, tmp_path / "run", 3)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it
    text, _ = process.communicate(timeout=300)
    assert process.returncode == launch.STOPPED, text
    taken = len(losses(tmp_path / "run"))
    assert 3 <= taken < STEPS
    assert f"step {taken}: stopped on request" in text
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"continued after step {taken}" in done.stdout
    assert (tmp_path / "run" / "index.html").is_file()

    train = {"steps": STEPS, "batches_per_step": 4}
    values = cases.recipe_of(trainer_folder, train=train, log={"directory": str(tmp_path / "whole")})
    whole = one_rank.run(cases.train, values)[0][0]
    assert losses(tmp_path / "run") == whole, "bit for bit, as if never stopped"


@pytest.mark.slow
def test_a_killed_rank_is_restarted_from_the_last_checkpoint(trainer_folder, tmp_path):
    changes = {"train": {"restarts": 1}, "checkpoint": {"every": 5, "export": False}}
    process = start(command(trainer_folder, tmp_path, "--nproc", "2", "--set", "parallel.ep=2", **changes))
    wait_for_step(process, tmp_path / "run", 12)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    found = losses(tmp_path / "run")
    assert len(found) == STEPS
    assert "continued after step" in text

    (tmp_path / "whole").mkdir()
    arguments = command(trainer_folder, tmp_path / "whole", "--nproc", "2", "--set", "parallel.ep=2", **changes)
    whole = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert found == losses(tmp_path / "whole" / "run"), "bit for bit, as if never killed"


@pytest.mark.parametrize("moment", ["starting", "training"])
def test_ranks_end_with_a_killed_launcher(moment, trainer_folder, tmp_path):
    """A launcher that is killed can end nobody: its ranks end by themselves, and the same command can start again."""
    changes = {"train": {"steps": 10_000}, "checkpoint": {"export": False}}
    process = start(command(trainer_folder, tmp_path, "--nproc", "2", **changes))
    if moment == "training":
        wait_for_step(process, tmp_path / "run", 2)
    ranks = wait_for_ranks(process, 2)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 240  # a rank that is still importing torch on a busy machine ends after that
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline, f"some of {ranks} outlived their launcher"
        time.sleep(0.05)
    process.communicate(timeout=10)  # nobody holds its output any more, and with it the lock
    run_lock.require_free(tmp_path / "run")


def wait_for_ranks(process: subprocess.Popen, number: int) -> list[int]:
    deadline = time.monotonic() + 300
    while len(found := ranks_of(process.pid)) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no ranks were started"
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ({}, {}, False),
        ({}, {"processes": 2}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, {"processes": 2}, False),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "pod", "MASTER_PORT": "1"}, {"nodes": "4"}, False),
        ({"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node", "MASTER_PORT": "1"}, {}, True),
        ({"RANK": "3", "WORLD_SIZE": "4"}, {}, r"but not where they meet \(MASTER_ADDR and MASTER_PORT\)"),
        ({"RANK": "0", "WORLD_SIZE": "1", launch.TORCHRUN: "run"}, {}, True),
        (
            {"RANK": "1", "WORLD_SIZE": "2", launch.TORCHRUN: "run"},
            {"processes": 2},
            "--nproc 2 would start ranks, but torchrun",
        ),
        (
            {"RANK": "1", "WORLD_SIZE": "2", launch.TORCHRUN: "run"},
            {"nodes": "2"},
            "--nnodes 2 would start ranks, but torchrun",
        ),
    ],
)
def test_a_rank_is_known_by_torchruns_own_variable(variables, options, expected, monkeypatch):
    """RANK and WORLD_SIZE alone are also set in pods, and left behind by earlier commands."""
    for name in (*launch.RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT", launch.TORCHRUN):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if isinstance(expected, bool):
        assert launch.is_rank(**options) is expected
    else:
        with pytest.raises(RecipeError, match=expected):
            launch.is_rank(**options)


def test_a_run_that_skipped_most_steps_is_no_success(trainer_folder, tmp_path):
    optim = {"lr": 1e30, "warmup_steps": 0}
    arguments = command(trainer_folder, tmp_path, optim=optim, train={"steps": 6}, checkpoint={"export": False})
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == launch.SKIPPED, done.stdout + done.stderr
    skipped = [entry["skipped"] for entry in run_log.read(tmp_path / "run")]
    assert len(skipped) == 6 and sum(skipped) > 2
    assert f"skipped: {sum(skipped)} of 6 steps changed no weight" in done.stdout
    again = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert f"skipped: {sum(skipped)} of 6 steps" in again.stdout, "also where nothing is left to train"


def test_variables_of_a_rank_do_not_change_how_many_ranks_train(trainer_folder, tmp_path):
    arguments = command(trainer_folder, tmp_path, "--nproc", "2", train={"steps": 3}, checkpoint={"export": False})
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on 2 ranks" in done.stdout


@pytest.mark.slow
def test_ctrl_c_reaches_all_ranks_of_the_agent(trainer_folder, tmp_path):
    process = start(command(trainer_folder, tmp_path, "--nproc", "2"))
    wait_for_step(process, tmp_path / "run", 3)
    os.kill(process.pid, signal.SIGTERM)  # as a scheduler sends it: to the launcher alone
    text, _ = process.communicate(timeout=300)
    assert process.returncode == launch.STOPPED, text
    assert "stopped on request" in text
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_two_agents_train_as_one_and_outlive_a_killed_rank(trainer_folder, tmp_path):
    """Two machines are two agents that meet at a port: here both are on this one, with a rank each.

    The same losses, bit for bit, as one agent with two ranks; also when the rank of the second agent is killed once, for
    both agents then start theirs again from the last checkpoint.
    """
    changes = {"train": {"restarts": 1}, "checkpoint": {"every": 5, "export": False}, "parallel": {"ep": 2}}
    (tmp_path / "one").mkdir()
    arguments = command(trainer_folder, tmp_path / "one", "--nproc", "2", **changes)
    one = subprocess.run(arguments, capture_output=True, text=True, timeout=240)
    assert one.returncode == 0, one.stdout + one.stderr

    for name, kill in (("two", False), ("killed", True)):
        place = tmp_path / name
        place.mkdir()
        meeting = f"localhost:{free_port()}"
        arguments = command(
            trainer_folder, place, "--nproc", "1", "--nnodes", "2", "--rdzv-endpoint", meeting, **changes
        )
        agents = [start(arguments) for _ in range(2)]
        try:
            if kill:
                wait_for_step(agents[0], place / "run", 12)
                os.kill(ranks_of(agents[1].pid)[0], signal.SIGKILL)
            told = [agent.communicate(timeout=240)[0] for agent in agents]
        finally:
            for agent in agents:
                if agent.poll() is None:
                    os.killpg(agent.pid, signal.SIGKILL)
        assert [agent.returncode for agent in agents] == [0, 0], "\n".join(told)
        assert ("continued after step" in "".join(told)) == kill
        assert losses(place / "run") == losses(tmp_path / "one" / "run")


def test_an_error_of_a_rank_is_told_once_by_the_agent(tmp_path):
    """The rank itself writes it down and says nothing: of a thousand ranks all would say the same."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    rank = [sys.executable, "-m", "patchgen.runtime.launch", '{"model": {"source": "x"}, "data": {}, "zebra": 1}']
    environment = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run(rank, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    told = launch._reason(ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file)))
    assert told.startswith("recipe has 1 problem(s):\n  zebra: no such key.") and "Traceback" not in told


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


def is_running(pid: int) -> bool:
    """Whether a process does anything: one that has ended may keep its entry until somebody asks for its result."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ranks_of(pid: int) -> list[int]:
    """The processes that the agent started, in the order of their ranks."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(
        int(child) for child in children if b"patchgen.runtime.launch" in Path(f"/proc/{child}/cmdline").read_bytes()
    )


@pytest.mark.parametrize(
    ("asked", "assignments", "told"),
    [
        ({"processes": 3}, [], "is not divisible by the 3 batch groups"),
        ({"processes": 2}, ["parallel.ep=4"], "ep=4 does not divide"),
        ({"nodes": "2"}, [], "needs --rdzv-endpoint HOST:PORT"),
        ({"nodes": "two"}, [], "--nnodes must be a number of machines, at least 1, or min:max"),
        ({}, ["train.ep=2"], "Did you mean parallel.ep?"),
        ({}, ["model.attention=flash"], "model.attention = 'flash' is unknown"),
        (
            {},
            ["model.source=nowhere/at-all"],
            "is neither a folder with a config.json, nor a reachable model on the Hub",
        ),
        ({}, ["model.overrides.hiden_size=8"], "has no such field. Did you mean hidden_size"),
        ({}, ["kernels.fused_moe=fast"], "has no implementation 'fast'. Available: eager"),
        ({}, ["data.sources.0.path=nowhere.jsonl"], "nowhere.jsonl"),
        ({"dry_run": True}, ["data.sources.0.path=nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_contradictions_are_refused_in_one_sentence(asked, assignments, told, trainer_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    command(trainer_folder, tmp_path)
    defaults = {"processes": 1, "nodes": "1", "rdzv_endpoint": "", "fresh": False}
    defaults |= {"dry_run": False, "verbose": False, "print_config": False, "script": None}
    with pytest.raises(PatchgenError) as refusal:
        training.train(tmp_path / "mine.yaml", assignments, **defaults | asked)
    assert told in str(refusal.value)
    assert not (tmp_path / "run" / "steps.jsonl").exists()
