"""The command line: each command once, what bad input gets, and files that are written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import typer
from invoked import invoke, record_proof

from patchgen import commands, model_configs, pipeline, provenance, upstream
from patchgen.cli import app
from patchgen.commands import examination, own_process
from patchgen.errors import ConfigError, PassMismatch, PatchgenError, SourceSyntaxError, StaleFile, UpstreamNotFound
from patchgen.runtime.verify import code_sets, source_keys

COMMANDS = ("generate", "check", "diff", "explain", "inspect", "new", "list", "mesh", "upgrade", "verify", "sweep")
COMMANDS += (
    "mutate",
    "export",
    "merge",
    "convert",
    "fingerprint",
    "train",
    "data",
    "doctor",
    "init",
    "report",
    "chat",
    "push",
)
MODEL = "qwen3"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of generated models with one in it, and a proof that holds: whether the committed one does is not at issue."""
    root = tmp_path / "generated_models"
    shutil.copytree(provenance.generated_root() / MODEL, root / MODEL, ignore=shutil.ignore_patterns("verify*"))
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    invoke("generate", MODEL, "--force")
    record_proof(root / MODEL)
    return root


@pytest.mark.parametrize("command", COMMANDS)
def test_every_help_has_an_example(command: str):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: patchgen {command}" in result.output


def test_the_commands_are_these():
    assert set(typer.main.get_command(app).commands) == set(COMMANDS)


def test_generate_writes_three_files_and_a_second_run_changes_none(tmp_path: Path):
    result = invoke("generate", MODEL, "--output", str(tmp_path))
    assert sorted(p.name for p in (tmp_path / MODEL).iterdir()) == [
        f"modeling_{MODEL}.diff",
        f"modeling_{MODEL}.py",
        "provenance.json",
    ]
    assert "fused_loss" in result.output
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / MODEL).iterdir()}
    assert "nothing changed" in invoke("generate", MODEL, "--output", str(tmp_path)).output
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / MODEL).iterdir()} == before


@pytest.mark.parametrize(
    "command",
    [["generate", "llama", "--output"], ["report", "llama", "--output"], ["init"]],
    ids=lambda words: words[0],
)
def test_an_output_that_cannot_be_written_is_named(command: list[str], tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(PatchgenError, match="file cannot be written: .* To fix: name another place"):
        invoke(*command, str(file))


def test_a_dry_run_writes_nothing(tmp_path: Path):
    assert "nothing written" in invoke("generate", MODEL, "--output", str(tmp_path), "--dry-run").output
    assert list(tmp_path.iterdir()) == []


def test_several_models_get_a_line_each(tmp_path: Path):
    output = invoke("generate", "llama", MODEL, "--output", str(tmp_path)).output
    assert f"{MODEL}: " in output and "llama: " in output


def configuration(model: str) -> str:
    """The text of upstream's configuration file."""
    return upstream.open_release().read(f"models/{model}/configuration_{model}.py")


def test_generate_from_a_file(tmp_path: Path):
    source = tmp_path / "modeling_own.py"
    source.write_text(upstream.load(MODEL).text)
    (tmp_path / f"configuration_{MODEL}.py").write_text(configuration(MODEL))
    invoke("generate", "own", "--source", str(source), "--output", str(tmp_path / "out"))
    text = (tmp_path / "out" / "own" / "modeling_own.py").read_text()
    assert "ops.causal_lm_loss(" in text and f"patchgen generate own --source {source}\n" in text
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match=r"made from a file modeling_own\.py.*no upstream class"):
        invoke("verify", "own", "--directory", str(tmp_path / "out" / "own"))


def test_a_file_names_its_model_and_its_config_stands_beside_it(tmp_path: Path):
    source, out = tmp_path / "modeling_own.py", tmp_path / "out"
    source.write_text(upstream.load(MODEL).text)
    with pytest.raises(ConfigError, match=rf"configuration_{MODEL}\.py, which it imports: put the file beside"):
        invoke("generate", "--source", str(source), "--output", str(out))
    (tmp_path / f"configuration_{MODEL}.py").write_text(configuration(MODEL))
    invoke("generate", "--source", str(source), "--output", str(out))
    assert "from transformers.configuration_utils" in (out / "own" / f"configuration_{MODEL}.py").read_text()
    kept = 'from patchgen.model_configs import ModelConfig\n\nCONFIG = ModelConfig(model="own", expect={"fused_loss": 7})\n'
    (tmp_path / "patchgen_own.py").write_text(kept)
    with pytest.raises(PassMismatch, match=r"expects 7.*\n(.*\n)*.*patchgen_own\.py"):
        invoke("generate", "--source", str(source), "--output", str(out))
    other = tmp_path / "other.py"
    other.write_text(kept.replace("7", "1"))
    invoke("generate", "--source", str(source), "--config", str(other), "--output", str(out))
    assert f"--source {source} --config {other}" in (out / "own" / "modeling_own.py").read_text()
    with pytest.raises(ConfigError, match=r"no file .*missing\.py \(given as --config\)"):
        invoke("generate", "--source", str(source), "--config", str(tmp_path / "missing.py"), "--output", str(out))


def test_a_star_import_that_hides_what_code_means_is_an_error(tmp_path: Path):
    """Passes know `PreTrainedModel` by its full name; a star import of another module hides nothing that they look for."""
    source, out = tmp_path / "modeling_own.py", tmp_path / "out"
    text = upstream.load(MODEL).text.replace("import torch\n", "import torch\nfrom math import *\n", 1)
    (tmp_path / f"configuration_{MODEL}.py").write_text(configuration(MODEL))
    source.write_text(text)
    invoke("generate", "--source", str(source), "--output", str(out))
    source.write_text(text.replace("from torch import nn\n", "from torch import *\n", 1))
    with pytest.raises(
        ConfigError, match=r"names hidden by `from torch import \*`: write out those that the file uses"
    ):
        invoke("generate", "--source", str(source), "--output", str(out))


def test_a_module_that_a_file_imports_whole_goes_along_with_it(tmp_path: Path):
    source, out = tmp_path / "modeling_own.py", tmp_path / "out"
    text = upstream.load(MODEL).text.replace("import torch\n", "import torch\nfrom . import parts\n", 1)
    source.write_text(
        text.replace("super().__init__()\n", "super().__init__()\n        self.limit = parts.LIMIT\n", 1)
    )
    (tmp_path / f"configuration_{MODEL}.py").write_text(configuration(MODEL))
    with pytest.raises(ConfigError, match=r"parts\.py, which it imports: put the file beside"):
        invoke("generate", "--source", str(source), "--output", str(out))
    (tmp_path / "parts.py").write_text("LIMIT = 7\n")
    invoke("generate", "--source", str(source), "--output", str(out))
    assert (out / "own" / "parts.py").read_text() == "LIMIT = 7\n"
    assert "\nfrom . import parts\n" in (out / "own" / "modeling_own.py").read_text()


def test_all_refusals_of_a_file_are_told_at_once(tmp_path: Path):
    source, text = tmp_path / "modeling_own.py", upstream.load("qwen3_moe").text
    text = text.replace("position_ids", "positions").replace("loss = self.loss_function(", "loss = self.other(")
    source.write_text(text)
    (tmp_path / "configuration_qwen3_moe.py").write_text(configuration("qwen3_moe"))
    with pytest.raises(PassMismatch, match=r"passes refuse modeling_own\.py") as caught:
        invoke("generate", "--source", str(source), "--output", str(tmp_path / "out"))
    for name in ("language_sp", "fused_loss"):
        assert f"The pass '{name}' missed" in str(caught.value) and f'"{name}": Expect(0' in str(caught.value)
    assert str(tmp_path / "patchgen_own.py") in str(caught.value)


def test_check_names_the_line_of_a_changed_character(models: Path):
    assert invoke("check").exit_code == 0
    path = models / MODEL / f"modeling_{MODEL}.py"
    lines = path.read_text().splitlines(keepends=True)
    lines[99] = lines[99][:-1] + " \n"
    path.write_text("".join(lines))
    result = invoke("check", MODEL)
    assert result.exit_code == 1
    assert f"modeling_{MODEL}.py:100" in result.output.replace("\n", "")


@pytest.mark.parametrize("name", [f"modeling_{MODEL}.diff", "provenance.json"])
def test_check_sees_the_other_files_too(models: Path, name: str):
    path = models / MODEL / name
    path.write_text(path.read_text().replace("qwen3", "qwen4", 1))
    assert invoke("check", MODEL).exit_code == 1


def test_check_compares_bytes_and_names_changed_line_endings(models: Path):
    path = models / MODEL / f"modeling_{MODEL}.py"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    result = invoke("check", MODEL)
    assert result.exit_code == 1 and "line endings" in result.output


def test_check_calls_a_model_from_a_file_unchecked_and_sees_its_edits(models: Path, tmp_path: Path):
    source = tmp_path / "modeling_own.py"
    source.write_text(upstream.load(MODEL).text)
    (tmp_path / f"configuration_{MODEL}.py").write_text(configuration(MODEL))
    invoke("generate", "own", "--source", str(source))
    record_proof(models / "own")
    result = invoke("check")
    assert result.exit_code == 0
    assert "unchecked own" in result.output and "1 of 2 generated models are current, 1 unchecked" in result.output
    for name in ("modeling_own.py", "modeling_own.diff"):
        path = models / "own" / name
        before = path.read_bytes()
        path.write_bytes(before + b"# mine\n")
        result = invoke("check", "own")
        assert result.exit_code == 1 and name in result.output
        path.write_bytes(before)


def test_check_fails_for_models_without_any_proof(models: Path):
    assert "Every recorded proof is current" in invoke("check").output
    (models / MODEL / "verify.json").unlink()
    result = invoke("check")
    assert result.exit_code == 1
    assert f"unproven 1 of 1 models have no proof: {MODEL}. To fix: patchgen verify {MODEL}" in result.output
    assert "Every recorded proof" not in result.output and "No proof is recorded" in result.output


def test_check_without_models_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(provenance, "generated_root", lambda: tmp_path)
    with pytest.raises(PatchgenError):
        invoke("check")
    with pytest.raises(UpstreamNotFound):
        invoke("generate", "--all")


def test_check_of_a_model_that_is_not_committed_is_an_error(models: Path):
    with pytest.raises(PatchgenError, match="llama"):
        invoke("check", "llama")


def test_check_reports_a_stray_folder(models: Path):
    (models / "stray").mkdir()
    (models / "stray" / "modeling_stray.py").write_text("x = 1\n")
    result = invoke("check")
    assert result.exit_code == 1 and "stray" in result.output
    assert "stray" not in invoke("check", MODEL).output  # as its help says


@pytest.mark.parametrize("name", [f"modeling_{MODEL}.py", f"modeling_{MODEL}.diff"])
def test_an_edited_file_is_not_overwritten_without_force(models: Path, name: str):
    path = models / MODEL / name
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(StaleFile, match="--force"):
        invoke("generate", MODEL)
    assert path.read_text().endswith("# mine\n")
    invoke("generate", MODEL, "--force")
    assert not path.read_text().endswith("# mine\n")


def test_an_edited_file_that_lost_its_record_is_not_overwritten(models: Path):
    (models / MODEL / "provenance.json").unlink()
    path = models / MODEL / f"modeling_{MODEL}.py"
    path.write_text(path.read_text() + "# mine\n")
    with pytest.raises(StaleFile, match=r"without a record[\s\S]*--force"):
        invoke("generate", MODEL)
    assert path.read_text().endswith("# mine\n")


def test_a_record_that_cannot_be_read_is_overwritten_with_force_only(models: Path):
    path = models / MODEL / "provenance.json"
    whole = path.read_text()
    path.write_text(f"<<<<<<< HEAD\n{whole}=======\n")
    with pytest.raises(StaleFile, match="is not JSON.*--force"):
        invoke("generate", MODEL)
    output = invoke("generate", MODEL, "--force").output
    assert "provenance.json cannot be read" in output and "hand edits was not checked" in output
    assert path.read_text() == whole


def test_a_crash_leaves_the_old_file_whole(models: Path, monkeypatch: pytest.MonkeyPatch):
    path = models / MODEL / f"modeling_{MODEL}.py"
    path.write_text("# old\n")

    def crash(*_: object) -> None:
        raise OSError("power cut")

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(PatchgenError, match="cannot be written: power cut"):
        invoke("generate", MODEL, "--force")
    assert path.read_text() == "# old\n"
    assert not list((models / MODEL).glob("*.tmp"))


def test_two_runs_at_once_leave_one_whole_result(tmp_path: Path):
    command = [sys.executable, "-m", "patchgen.cli", "generate", MODEL, "--output", str(tmp_path)]
    runs = [subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(run.wait(), run.stderr.read()) for run in runs] == [(0, b""), (0, b"")]
    generated = pipeline.generate(upstream.load(MODEL))
    assert {p.name: p.read_text() for p in (tmp_path / MODEL).iterdir()} == generated.files


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["generate"], UpstreamNotFound, "No model was named"),
        (["generate", "qwen3_mo"], UpstreamNotFound, "Nearest: .*, .*, "),
        (["generate", MODEL, "--source", "no_such.py"], UpstreamNotFound, "no file no_such.py"),
        (["generate", MODEL, "--transformers", "newest"], UpstreamNotFound, "not a version of transformers"),
        (["explain", "fused_los"], UpstreamNotFound, "fused_loss"),
        (["inspect", "qwen3_mo"], UpstreamNotFound, "qwen3_moe"),
        (["new", "qwen3_mo"], UpstreamNotFound, "qwen3_moe"),
        (["new", "gpt-neo"], ConfigError, "cannot name a Python file"),
        (["new", MODEL], ConfigError, "exists"),
        (["sweep", "--family", "speech"], ConfigError, "text"),
        (["verify"], UpstreamNotFound, "No model was named"),
        (["verify", "nonsense"], UpstreamNotFound, "no generated model 'nonsense'"),
        (["verify", MODEL, "--directory", "no_such_folder"], StaleFile, "holds no generated model"),
        (["generate", MODEL, "llama", "--source", "own.py"], ConfigError, "2 names were given"),
        (["generate", MODEL, "--source", "own.py", "--transformers", "5.17.0"], ConfigError, "contradict"),
        (["upgrade", "nonsense"], UpstreamNotFound, "Not committed: nonsense"),
        (["verify", MODEL, "--against", "5.20.0", "--code", "own"], ConfigError, "omit --code"),
        (["verify", MODEL, "--against", "5.20.0", "--generated", "own"], ConfigError, "omit --generated"),
        (["verify", MODEL, "--against", "5.20.0", "--sp", "2"], ConfigError, "omit --sp"),
        (["verify", MODEL, "--against", "5.20.0", "--ep", "2"], ConfigError, "omit --ep"),
        (["verify", MODEL, "--against", "5.20.0", "--fsdp"], ConfigError, "omit --fsdp"),
        (["verify", MODEL, "--python", "python3"], ConfigError, "give --against"),
        (["upgrade", MODEL, "--python", "python3"], ConfigError, "give --apply"),
    ],
)
def test_bad_input_says_what_to_do(arguments: list[str], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        invoke(*arguments)


def test_a_source_that_does_not_parse_is_named_by_its_place(tmp_path: Path):
    (tmp_path / "modeling_own.py").write_text("x = 1\ndef f(:\n")
    with pytest.raises(SourceSyntaxError, match=r"modeling_own\.py:2:\d+"):
        invoke("generate", "own", "--source", str(tmp_path))


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("# caf\xe9\n".encode("latin-1"), SourceSyntaxError, r"modeling_own\.py: byte 5 is not UTF-8"),
        (b"", ConfigError, "defines no class"),
        (b"# only a comment\n", ConfigError, "defines no class"),
    ],
)
def test_a_source_that_is_no_model_is_refused(tmp_path: Path, content: bytes, error: type[Exception], message: str):
    (tmp_path / "modeling_own.py").write_bytes(content)
    with pytest.raises(error, match=message):
        invoke("generate", "own", "--source", str(tmp_path))


def test_errors_for_the_user_come_without_a_traceback():
    command = [sys.executable, "-m", "patchgen.cli", "generate", "qwen3_mo"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("patchgen: ") and "Traceback" not in result.stderr


def test_looking_at_models_and_passes():
    assert "fused_loss" in invoke("diff", MODEL).output
    assert "mixer_sp" in invoke("explain").output
    explained = invoke("explain", "router_loss").output
    assert "before" in explained and "ops.router_means" in explained
    assert "apply_rotary_pos_emb  (upstream line" in invoke("explain", MODEL).output
    inspected = invoke("inspect", MODEL).output
    assert "causal head" in inspected and "CONFIG = ModelConfig(" in inspected
    assert MODEL in invoke("list").output


def test_list_shows_a_proof_of_another_file_as_stale(models: Path):
    path = models / MODEL / f"modeling_{MODEL}.py"
    record = {"status": "proven", "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (models / MODEL / "verify.json").write_text(json.dumps(record))
    output = invoke("list").output
    assert "proven" in output and "stale" not in output
    path.write_bytes(path.read_bytes() + b"# mine\n")
    assert "stale" in invoke("list").output
    (models / MODEL / "verify.json").unlink()
    assert "not" in invoke("list").output


def test_new_writes_a_config_that_generates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(model_configs, "__file__", str(tmp_path / "__init__.py"))
    invoke("new", "olmoe")
    namespace: dict = {}
    exec((tmp_path / "olmoe.py").read_text(), namespace)
    assert namespace["CONFIG"].roots == ("OlmoeForCausalLM",)
    pipeline.generate(upstream.load("olmoe"), namespace["CONFIG"])


def test_upgrade_to_the_same_release_reports_no_change(models: Path):
    result = invoke("upgrade", MODEL)
    assert result.exit_code == 0 and "no class, function or field that the model uses changed" in result.output


def in_this_process(function: Callable, calls: Mapping[str, Mapping], _jobs: int) -> Iterator[tuple[str, object]]:
    """For `own_process.run_each`: in a process that has loaded torch already."""
    for name, arguments in calls.items():
        yield name, function(name, **arguments)


def sweep(folder: Path, *types: str) -> tuple[int, dict]:
    """Sweeps these types into `folder`; the exit code, and the rows by type."""
    only = [argument for kind in types for argument in ("--only", kind)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(own_process, "run_each", in_this_process)
        code = invoke("sweep", "--jobs", "1", "--output", str(folder), *only).exit_code
    record = code_sets.read(folder / "coverage.json")
    return code, {row["model_type"]: row for row in record["rows"]}


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The row of a type that a sweep proved."""
    pytest.importorskip("torch")
    code, rows = sweep(tmp_path_factory.mktemp("swept"), "arcee")
    assert code == 0 and rows["arcee"]["status"] == "proven"
    return rows["arcee"]


def test_a_sweep_of_one_type_keeps_the_other_rows_and_counts_those_of_another_prover(tmp_path: Path, proven: dict):
    old = {**examination.row("llama", examination.PROVEN, ""), "seconds": 1.5}
    (tmp_path / "coverage.json").write_text(code_sets.dumps({"key": {}, "rows": [old]}, indent=1))
    code, rows = sweep(tmp_path, "doge")
    assert code == 1  # what was asked for by name is not proven
    assert rows["doge"]["status"] == "failed"
    assert rows["llama"] == old
    assert "1 of 2 rows were made by another prover" in (tmp_path / "coverage.md").read_text()
    (tmp_path / "coverage.json").write_text(code_sets.dumps({"key": {}, "rows": [proven, rows["doge"]]}, indent=1))
    sweep(tmp_path, "arcee")
    assert "another prover" not in (tmp_path / "coverage.md").read_text()


def test_a_sweep_proves_again_only_what_does_not_hold(tmp_path: Path, proven: dict, monkeypatch: pytest.MonkeyPatch):
    held = proven | {"seconds": 77.0}
    (tmp_path / "coverage.json").write_text(code_sets.dumps({"key": {}, "rows": [held]}, indent=1))
    assert sweep(tmp_path, "arcee")[1]["arcee"] == held
    monkeypatch.setattr(source_keys, "generator_hash", lambda: "moved, and gives the same bytes")
    moved = sweep(tmp_path, "arcee")[1]["arcee"]
    assert moved["sources"] != held["sources"]
    assert moved == held | {"sources": moved["sources"]}
    changed = held | {"made_with": held["made_with"] | {"prover": "older"}}
    (tmp_path / "coverage.json").write_text(code_sets.dumps({"key": {}, "rows": [changed]}, indent=1))
    again = sweep(tmp_path, "arcee")[1]["arcee"]
    assert again["seconds"] != 77.0 and again["made_with"] == held["made_with"]


def test_a_sweep_writes_beside_the_package_wherever_it_is_called(models: Path, monkeypatch: pytest.MonkeyPatch):
    elsewhere = models.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert invoke("sweep", "--only", "doge").exit_code == 1
    assert (models.parent / "records" / "coverage.json").is_file() and not list(elsewhere.iterdir())


def test_what_is_no_command_is_no_attribute():
    """torch's compiler asks every module that it meets for names: an ImportError ended a proof."""
    assert not hasattr(commands, "torch") and commands.generation.__name__ == "patchgen.commands.generation"
