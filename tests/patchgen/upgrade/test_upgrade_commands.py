"""`patchgen upgrade` and its kin as commands: exit codes, JSON, refusals of single models, the move itself."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from invoked import invoke
from planted_releases import Drift, planted

from patchgen import pipeline, provenance, upgrade, upstream, wheels
from patchgen.errors import PatchgenError, UpstreamNotFound
from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify import code_sets
from patchgen.upgrade import applying, releases
from patchgen.upgrade.applying import prove_against
from patchgen.upgrade.findings import REVIEW, ModelUpgrade, Site, Upgrade
from patchgen.upgrade.messages import commit_message

MODEL = "qwen3"
FILE = f"models/{MODEL}/modeling_{MODEL}.py"
SLICED = Drift(FILE, "Qwen3Model.forward", "self.layers[: self.config.num_hidden_layers]", "self.layers[self.first :]")
COMMENT = Drift(FILE, "Qwen3MLP.forward", "return down_proj", "return (down_proj)  # as ever")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of generated models with one in it."""
    root = tmp_path / "generated_models"
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    provenance.write(pipeline.generate(upstream.load(MODEL)), root / MODEL)
    return root


def test_an_upgrade_lists_the_changes_and_exits_with_its_verdict(models: Path, tmp_path: Path):
    release = str(planted(tmp_path / "release", [SLICED]))
    before = {path: path.read_bytes() for path in (models / MODEL).iterdir()}
    result = invoke("upgrade", "--to", release)
    assert result.exit_code == 10
    assert SLICED.old in result.output and SLICED.new in result.output  # brackets and all
    assert "changed Qwen3Model.forward [language_sp]" in result.output
    found = json.loads(invoke("upgrade", MODEL, "--to", release, "--json").output)
    (model,) = found["models"]
    assert (found["verdict"], model["model"], model["verdict"]) == (10, MODEL, 10)
    site = model["sites"][0]
    assert (site["symbol"], site["passes"], site["file"]) == (SLICED.symbol, ["language_sp"], f"transformers/{FILE}")
    assert SLICED.new in site["generated_then"] and SLICED.old in site["generated_now"]
    assert {path: path.read_bytes() for path in (models / MODEL).iterdir()} == before


def test_the_other_models_are_generated_and_the_refusal_is_reported_at_the_end(tmp_path: Path):
    with pytest.raises(PatchgenError, match=r"(?s)1 of 3 models.*nonsense:.*no model 'nonsense'"):
        invoke("generate", MODEL, "nonsense", "llama", "--output", str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {MODEL, "llama"}


def test_the_command_that_reviews_a_new_model_shows_it(tmp_path: Path):
    where = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
    output = invoke("generate", MODEL, "--output", str(tmp_path)).output
    assert f"git diff --no-index /dev/null {tmp_path / MODEL}" in output.replace("\n", "")
    subprocess.run(["git", "init", "-q"], **where)
    output = invoke("generate", "llama", "--output", str(tmp_path)).output
    command = next(line for line in output.splitlines() if "review:" in line).partition("review:")[2].strip()
    assert command.startswith("git add -N ")
    shown = subprocess.run(command, shell=True, **where).stdout
    assert "+class LlamaForCausalLM" in shown
    subprocess.run(["git", "add", "llama"], **where)
    (tmp_path / "llama" / "modeling_llama.diff").unlink()
    output = invoke("generate", "llama", "--output", str(tmp_path)).output
    assert f"review: git diff {tmp_path / 'llama'}" in output


def test_the_list_says_which_releases_a_file_was_proven_with(models: Path):
    path = models / MODEL / f"modeling_{MODEL}.py"
    record = {"status": "proven", "sha256": provenance._sha256(path.read_bytes()), "transformers": ["9.8.0", "9.9.0"]}
    (models / MODEL / "verify.json").write_text(json.dumps(record))
    assert "9.8.0" in invoke("list").output and "9.9.0" in invoke("list").output


def test_a_release_is_found_in_a_folder_and_in_a_wheel_and_nowhere_else(tmp_path: Path):
    folder = planted(tmp_path / "release", [COMMENT])
    for place in (folder, folder / "transformers"):
        found = releases.find(str(place))
        assert found.release.version == wheels.installed_version() and found.folder == folder
        assert COMMENT.new in found.release.read(FILE)
    wheel = tmp_path / "transformers-9.9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("transformers/__init__.py", '__version__ = "9.9.9"\n')
        archive.writestr("transformers/" + FILE, "x = 1\n")
    found = releases.find(str(wheel))
    assert (found.release.version, found.wheel, found.release.read(FILE)) == ("9.9.9", wheel, "x = 1\n")
    wrong = {"none.whl": "There is no wheel", "none": "There is no folder", "": "contains no transformers"}
    for name, message in wrong.items():
        with pytest.raises(UpstreamNotFound, match=message):
            releases.find(str(tmp_path / name))


def test_the_commit_message_names_what_moved_and_what_did_not():
    file = f"transformers/{FILE}"
    site = Site("model", "changed", file, "Qwen3Model.forward", ("language_sp",), REVIEW, "a site of language_sp")
    helper = Site("helper", "changed", "transformers/masking_utils.py", "create_causal_mask", (), REVIEW, "the way")
    found = Upgrade("5.1", "5.2", (ModelUpgrade(MODEL, "5.1", "5.2", REVIEW, "review", (site, helper)),))
    message = commit_message(found, {MODEL: "proven"}, ["Other.forward"], {"other": "a pass misses\nits site"})
    assert message.splitlines()[0] == "Generated from transformers 5.2: qwen3"
    for words in (
        "- Qwen3Model.forward changed (language_sp)",
        "masking_utils.py",
        "Other.forward",
        "- other: a pass misses",
        "Each is proven",
    ):
        assert words in message
    assert max(map(len, message.splitlines())) <= 72


def test_the_commit_message_says_which_models_are_proven():
    found = Upgrade("5.1", "5.2", tuple(ModelUpgrade(name, "5.1", "5.2", REVIEW, "", ()) for name in ("a", "b")))
    message = " ".join(commit_message(found, {"a": "proven", "b": "generated"}, [], {}).split())
    assert "a: proven equal to the release's own class" in message and "as before: b (generated)." in message
    assert "Each is proven" not in message


def proof_of(folder: Path, status: str, releases_of: list[str]) -> dict:
    """What the prover writes beside a model, as far as an upgrade reads it."""
    (file,) = folder.glob("modeling_*.py")
    record = {"status": status, "reason": "", "sha256": digest(file)}
    record |= {"transformers": releases_of}
    record |= {
        "made_with": code_sets.made_with(
            {"patchgen.runtime.ops:"}, {"transformers": wheels.installed_version(), "torch": "2.13.0"}
        )
    }
    (folder / "verify.json").write_text(code_sets.dumps(record, indent=2))
    return record


def test_a_model_that_was_moved_without_a_proof_is_not_called_proven(models: Path):
    version = wheels.installed_version()
    proof_of(models / MODEL, "generated", [])
    found = Upgrade(version, version, (ModelUpgrade(MODEL, version, version, REVIEW, "", ()),))
    told: list[str] = []
    result = applying.move(
        found, version, models, reviewed=[], python=Path(sys.executable), jobs=1, report=told.append
    )
    assert result.moved == {MODEL: "generated"} and told[-1].endswith("already moved, generated")


COMPOSITE, PART = "internvl", "qwen2"


@pytest.fixture
def composite(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a generated model that builds another, which is beside it; an earlier move left a different one."""
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    for name in (COMPOSITE, PART):
        provenance.write(pipeline.generate(upstream.load(name)), models / name)
    left = applying._staging(wheels.installed_version(), models) / PART
    left.mkdir(parents=True)
    (left / f"modeling_{PART}.py").write_text("of an earlier move\n")
    return models / COMPOSITE


def upgrade_of(*names: str) -> Upgrade:
    version = wheels.installed_version()
    return Upgrade(version, version, tuple(ModelUpgrade(name, version, version, REVIEW, "", ()) for name in names))


def moved(found: Upgrade, root: Path) -> tuple[applying.MoveResult, list[str]]:
    told: list[str] = []
    to = wheels.installed_version()
    result = applying.move(found, to, root, reviewed=[], python=Path(sys.executable), jobs=2, report=told.append)
    return result, told


def test_the_proof_of_a_model_that_builds_another_is_current_with_that_one(composite: Path):
    proof_of(composite, "proven", [])
    result, told = moved(upgrade_of(COMPOSITE), composite.parent)
    assert result.moved == {COMPOSITE: "proven"} and told[-1].endswith("already moved, proven")


def test_a_model_that_builds_another_is_proven_after_it_and_with_what_is_then_beside_it(
    composite: Path, monkeypatch: pytest.MonkeyPatch
):
    part = composite.parent / PART / f"modeling_{PART}.py"
    final = part.read_bytes()
    earlier = {**json.loads((part.parent / "provenance.json").read_text())}
    part.write_text("of an earlier release\n")
    earlier["generated_sha256"] = provenance._sha256(part.read_bytes())
    (part.parent / "provenance.json").write_text(json.dumps(earlier))
    proven: list[str] = []

    def prove(_python: Path, folder: Path, *_: object) -> None:
        proven.append(folder.name)
        proof_of(folder, "proven", [])

    monkeypatch.setattr(applying, "prove", prove)
    result, told = moved(upgrade_of(COMPOSITE, PART), composite.parent)
    assert result.moved == {COMPOSITE: "proven", PART: "proven"}, told
    assert proven == [PART, COMPOSITE] and part.read_bytes() == final
    assert json.loads((composite / "verify.json").read_text())["sha256"] == digest(
        composite / f"modeling_{COMPOSITE}.py"
    )
    assert all("already moved" in line for line in moved(upgrade_of(COMPOSITE, PART), composite.parent)[1][2:])


def test_a_committed_model_that_builds_another_is_proven_with_the_one_beside_it(
    composite: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(applying, "prove", lambda _python, folder, *_: proof_of(folder, "proven", ["1.2.3"]))
    is_proven, _ = prove_against(COMPOSITE, wheels.installed_version(), composite.parent)
    assert is_proven


def test_a_model_that_cannot_be_generated_is_held_back_and_the_others_move(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    proof_of(models / MODEL, "proven", [])
    generate = pipeline.generate

    def refuse(source: upstream.Upstream, **options: object) -> pipeline.Generated:
        if source.model == "llama":
            raise PatchgenError("a pass misses its site")
        return generate(source, **options)

    provenance.write(generate(upstream.load("llama")), models / "llama")
    monkeypatch.setattr(pipeline, "generate", refuse)
    result, told = moved(upgrade_of("llama", "nowhere", MODEL), models)
    assert result.moved == {MODEL: "proven"} and result.held_back["llama"] == "a pass misses its site"
    assert "there is no provenance.json" in result.held_back["nowhere"]
    assert len([line for line in told if "not moved: " in line]) == 2


def test_two_models_are_compared_in_two_processes(models: Path, monkeypatch: pytest.MonkeyPatch):
    processes: list[int] = []

    class Pool(ThreadPoolExecutor):
        def __init__(self, count: int, *_: object) -> None:
            processes.append(count)
            super().__init__(count)

    provenance.write(pipeline.generate(upstream.load("llama")), models / "llama")
    monkeypatch.setattr(upgrade, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(
        upgrade, "compare_model", lambda model, *_: ModelUpgrade(model, "5.1", "5.2", REVIEW, "review", ())
    )
    for names in ([MODEL, "llama"], [MODEL]):
        assert [found.model for found in upgrade.compare(names, wheels.installed_version()).models] == names
    assert processes == [2]


@pytest.mark.parametrize(
    ("status", "listed_by_prover"), [("proven", True), ("proven, eager only", True), ("generated", False)]
)
def test_a_release_is_listed_as_the_prover_lists_it(
    status: str, listed_by_prover: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    version = wheels.installed_version()
    proof_of(models / MODEL, "proven", ["1.2.3"] if listed_by_prover else ["1.2.3", version])

    def prove(_python: Path, folder: Path, *_: object) -> None:
        proof_of(folder, status, [version] if listed_by_prover else [])

    monkeypatch.setattr(applying, "prove", prove)
    assert prove_against(MODEL, version, models) == (status == "proven", status)
    listed = json.loads((models / MODEL / "verify.json").read_text())["transformers"]
    assert listed == (["1.2.3", version] if listed_by_prover else ["1.2.3"])


@pytest.mark.parametrize(
    ("last_file", "reason"),
    [
        (
            "/site/transformers/models/llama/modeling_llama.py",
            r"upstream's own code fails \(llama/modeling_llama.py, line 8\): ",
        ),
        ("/site/generated/modeling_llama.py", "it cannot be proven: "),
    ],
)
def test_a_traceback_that_ends_in_upstreams_model_is_told_as_its_own(tmp_path: Path, last_file: str, reason: str):
    prover = tmp_path / "python"
    frames = f'  File "/verify.py", line 3, in prove\n    step()\n  File "{last_file}", line 8, in forward\n    outputs.first\n'
    traceback = f"Traceback (most recent call last):\n{frames}AttributeError: no first\n"
    prover.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{traceback}END\nexit 1\n", encoding="utf-8")
    prover.chmod(0o755)
    with pytest.raises(PatchgenError, match=reason + "AttributeError: no first"):
        applying.prove(prover, tmp_path, jobs=1)


def test_a_release_whose_prover_ends_without_a_proof_is_no_longer_listed(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    version = wheels.installed_version()
    proof_of(models / MODEL, "proven", ["1.2.3", version])

    def refused(*_: object) -> None:
        raise PatchgenError("it cannot be proven")

    monkeypatch.setattr(applying, "prove", refused)
    with pytest.raises(PatchgenError, match="it cannot be proven"):
        prove_against(MODEL, version, models)
    assert json.loads((models / MODEL / "verify.json").read_text())["transformers"] == ["1.2.3"]


@pytest.mark.slow
def test_a_model_moves_with_its_proof_and_a_second_run_has_nothing_to_do(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch")
    monkeypatch.setenv("PATCHGEN_CACHE", str(tmp_path / "cache"))
    release = str(planted(tmp_path / "release", [COMMENT]))
    result = invoke("upgrade", "--to", release, "--apply")
    assert result.exit_code == 0 and "proven, 3 files written" in result.output
    assert f"Generated from transformers {wheels.installed_version()}: {MODEL}" in result.output
    assert COMMENT.new in (models / MODEL / f"modeling_{MODEL}.py").read_text()
    assert json.loads((models / MODEL / "verify.json").read_text())["status"] == "proven"
    assert "already moved, proven" in invoke("upgrade", "--to", release, "--apply").output
    is_proven, outcome = prove_against(MODEL, release, models, Path(sys.executable))
    assert is_proven and outcome.startswith("proven")
