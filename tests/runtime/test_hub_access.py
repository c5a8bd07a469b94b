"""Commands that need the Hub do not wait long for one that is not there."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from patchgen.commands import upgrading
from patchgen.runtime import hub_access
from patchgen.runtime.train.recipe import from_dict, reads_hub

ROOT = Path(__file__).parents[2]


class SilentServer:
    """Accepts connections, counts them, and never answers."""

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                self.connections.append(self._server.accept()[0])

    def close(self) -> None:
        for one in (self._server, *self.connections):
            one.close()


@pytest.fixture
def silent():
    server = SilentServer()
    yield server
    server.close()


def run(environment: dict[str, str], *command: str) -> str:
    """What a command says."""
    found = subprocess.run(
        [sys.executable, "-m", "patchgen", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return found.stdout + found.stderr


def test_it_is_waited_for_less_than_ten_seconds(silent, monkeypatch, capsys):
    assert hub_access.SECONDS < 10
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", silent.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv(hub_access.OFFLINE, "")  # as it was, after the test
    started = time.monotonic()
    hub_access.use_cache_if_silent(seconds=0.5)
    assert time.monotonic() - started < 5
    assert f"{silent.address} does not answer" in capsys.readouterr().err
    assert os.environ[hub_access.OFFLINE] == "1", "the ranks do not ask again"
    hub_access.use_cache_if_silent(seconds=0.5)
    assert capsys.readouterr().err == "" and len(silent.connections) == 1, "nor does this process"


@pytest.mark.parametrize("command", ["train", "doctor"])
def test_a_command_asks_a_silent_hub_once(command, silent, tmp_path):
    """No clock is needed to see that it does not ask for file after file."""
    (tmp_path / "mine.yaml").write_text("model: {source: nobody/nothing}\ndata: {sources: [{path: builtin:stdlib}]}\n")
    environment = {"HF_ENDPOINT": silent.address, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": ""}
    said = run(environment, command, str(tmp_path / "mine.yaml"), "--set", f"log.directory={tmp_path / 'run'}")
    assert f"{silent.address} does not answer" in said and "HF_HUB_OFFLINE=1" in said
    assert "nobody/nothing" in said, "what it was needed for is told as well"
    assert len(silent.connections) == 1


def test_an_index_that_is_silent_ends_an_upgrade(silent, tmp_path):
    environment = {"PIP_INDEX_URL": silent.address, "PATCHGEN_CACHE": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    said = run(environment, "upgrade", "llama", "--to", "5.0.99")
    assert "The wheel of transformers 5.0.99 is unavailable" in said
    assert upgrading.INDEX_SECONDS < 10 and len(silent.connections) == 1


@pytest.mark.parametrize(
    ("model", "path", "expected"),
    [
        ("qwen3", "builtin:stdlib", False),
        ("qwen3", "data/*.jsonl", False),
        ("qwen3", "not/here.parquet", False),
        ("qwen3", "someone/corpus", True),
        ("someone/model", "builtin:stdlib", True),
        (".", ".", False),
    ],
)
def test_the_hub_is_asked_only_for_what_may_be_there(model, path, expected):
    assert reads_hub(from_dict({"model": {"source": model}, "data": {"sources": [{"path": path}]}})) == expected
