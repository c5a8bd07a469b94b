"""What a sweep cannot take is refused before any row is made; a type is blamed for a crash only if it crashes alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from invoked import invoke

from patchgen import upstream, wheels
from patchgen.commands import examination, head_sweep, own_process, sweeping
from patchgen.errors import ConfigError
from patchgen.runtime.verify import records, verify_model


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
def test_a_row_names_what_its_config_mends_in_this_release():
    """llama4, whose forward 5.24.0 has with a fault; llama has no config."""
    release = upstream.open_release()
    assert sweeping._mended_methods("llama4", release) == ["Llama4ForConditionalGeneration.forward"]
    assert sweeping._mended_methods("llama", release) == []


def test_types_of_which_none_can_be_compared_on_ranks_are_no_success(tmp_path, capsys):
    """A dense model has no experts to share."""
    assert sweeping.sweep_ranks("text", ["llama"], sweeping.layouts_of(1, 2, 2), tmp_path, fresh=False) == 1
    assert "None of llama can be compared with ep2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("has_row", [True, False])
def test_a_type_whose_process_dies_keeps_its_row_and_is_examined_again(has_row, tmp_path, monkeypatch, capsys):
    """Its row after the sweep is compared with the one before, or with none."""
    dying = {"llama"}

    def one_dies(_function: object, calls: dict, _jobs: int) -> Iterator[tuple[str, object]]:
        for name in calls:
            died = own_process.ProcessDied(name) if name in dying else None
            yield name, died or examination.unproven(name, examination.PROVEN, "", "digest")

    monkeypatch.setattr(own_process, "run_each", one_dies)
    path = records.path_in(tmp_path)
    before = {(False, "llama"): examination.row("llama", examination.PROVEN, "")} if has_row else {}
    records.write(path, before)
    assert sweeping.sweep("text", 2, None, ["llama", "gpt2"], tmp_path, fresh=False) == 1
    found = records.read(path)
    assert found.pop((False, "gpt2"))["status"] == examination.PROVEN
    assert found == before
    assert "not examined: llama" in capsys.readouterr().out
    dying.clear()
    assert sweeping.sweep("text", 2, None, ["llama", "gpt2"], tmp_path, fresh=False) == 0
    assert "made_with" in records.read(path)[False, "llama"]


def test_a_device_that_fails_gives_no_row(monkeypatch):
    def no_memory(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(examination, "_prove", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        examination.examine("llama", wheels.installed_version())
    monkeypatch.setattr(verify_model, "judge", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        head_sweep.examine("llama", {"base": "LlamaModel"}, wheels.installed_version())
