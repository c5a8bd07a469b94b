"""What a sweep cannot take is refused before any row is made; a type is blamed for a crash only if it crashes alone."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from invoked import invoke

from patchgen import wheels
from patchgen.commands import examination, head_sweep, sweeping
from patchgen.errors import ConfigError
from patchgen.runtime.verify import verify_model


def on_ranks(kind: str, output, family: str = "text") -> int:
    return sweeping.sweep_ranks(family, [kind], sweeping.layouts_of(2, 1, 2), output, fresh=False)


def in_one_process(kind: str, output, family: str = "text") -> int:
    return sweeping.sweep(family, 1, None, [kind], output, fresh=False)


@pytest.mark.parametrize("start", [on_ranks, in_one_process])
def test_a_type_that_does_not_exist_is_named_and_leaves_no_row(start, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"--only qwen3_mo: transformers .* has no such type \(nearest: qwen3_moe.*patchgen verify --code FOLDER",
    ):
        start("qwen3_mo", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", [on_ranks, in_one_process])
def test_a_type_of_the_other_kind_says_how_it_is_swept(start, tmp_path):
    with pytest.raises(
        ConfigError,
        match="--only qwen3_vl: transformers .* has no causal head of that type, but .*give --family media",
    ):
        start("qwen3_vl", tmp_path)
    with pytest.raises(ConfigError, match="no head with media of that type, but .*omit --family media"):
        start("qwen3_moe", tmp_path, "vision")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["--sp", "4"], "--sp 4 does not divide --world 2.*give --world 4, or a multiple"),
        (["--sp", "2", "--ep", "3", "--world", "4"], "--ep 3 does not divide --world 4.*give --world 6"),
        (["--world", "4"], "--world 4 alone is no layout.*give --sp or --ep with it, or --world 2"),
        (["--world", "2", "--jobs", "4"], "one type at a time, on all ranks.*omit --jobs"),
        (["--sp", "2", "--transformers", "5.20.0"], "with the installed release.*omit --transformers"),
        (["--sp", "2", "--jobs", "4"], "one type at a time, on all ranks.*omit --jobs"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused_before_a_row_says_no(sizes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        invoke("sweep", *sizes, "--only", "qwen3", "--output", str(tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_types_of_which_none_can_be_compared_on_ranks_are_no_success(tmp_path, capsys):
    """A dense model has no experts to share."""
    assert sweeping.sweep_ranks("text", ["llama"], sweeping.layouts_of(1, 2, 2), tmp_path, fresh=False) == 1
    assert "None of llama can be compared with ep2" in " ".join(capsys.readouterr().out.split())


class CrashingPool:
    """For a pool of two: `crashes` ends it, and with it `slow`, which was submitted before, and all that come after."""

    def __init__(self, jobs: int, **_: object) -> None:
        self.is_broken, self.jobs = False, jobs

    def __enter__(self) -> CrashingPool:
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, _call: Callable, kind: str, *_: object, **__: object) -> Future:
        self.is_broken |= kind == "crashes"
        done = Future()
        if self.is_broken or (kind == "slow" and self.jobs > 1):
            done.set_exception(BrokenProcessPool("terminated abruptly"))
        else:
            done.set_result(examination.unproven(kind, examination.PROVEN, "", "digest"))
        return done


def test_a_crash_is_blamed_on_the_type_that_crashes_alone(monkeypatch):
    monkeypatch.setattr(sweeping, "ProcessPoolExecutor", CrashingPool)
    monkeypatch.setattr(sweeping, "generated_digest", lambda *_: "digest")
    types = dict.fromkeys(("slow", "crashes", "third", "fourth"), "")
    rows = {found.model_type: found.row for found in sweeping._examine_all(types, "5.0", 2, takes_media=False)}
    statuses = {kind: row["status"] for kind, row in rows.items()}
    assert statuses == {"slow": "proven", "crashes": "generated", "third": "proven", "fourth": "proven"}
    assert rows["crashes"]["reason"].startswith("its process died")


def test_a_device_that_fails_gives_no_row(monkeypatch):
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(examination, "_prove", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        examination.examine("llama", wheels.installed_version())
    monkeypatch.setattr(verify_model, "judge", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        head_sweep.examine("llama", {"base": "LlamaModel"}, wheels.installed_version())
