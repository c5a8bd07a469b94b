"""A user's repository: where its models, configs and passes are found, and the errors that a malformed project file gives."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import typer
import yaml
from invoked import record_proof
from typer.testing import CliRunner

from patchgen import model_configs, pipeline, project_code, provenance, upstream
from patchgen.cli import app
from patchgen.errors import ConfigError, PassMismatch
from patchgen.passes import PASSES, all_passes, pass_named
from patchgen.runtime import project
from patchgen.runtime.verify import source_keys

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "add_model.md").read_text(encoding="utf-8")
CONFIG, PASS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
MODEL = "llama"


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that became a project."""
    monkeypatch.chdir(tmp_path)
    run("init")
    return tmp_path


def with_pass(place: Path, text: str = PASS) -> None:
    (place / "passes" / "trace_attention.py").write_text(text)
    (place / "patchgen.toml").write_text('generated = "generated"\npasses = ["passes/trace_attention.py"]\n')


def test_init_writes_a_project_once_and_keeps_what_stands_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path(".gitattributes").write_text("*.bin binary")
    run("init")
    assert Path(".gitattributes").read_text().startswith("*.bin binary\n#")
    assert "generated/**/verify.json linguist-generated" in Path(".gitattributes").read_text()
    assert project.find() == project.Project(tmp_path / "patchgen.toml", "generated", "configs")
    with pytest.raises(ConfigError, match=r"patchgen.toml configures this project already"):
        run("init")
    run("init", "inner")  # a project in another's folder is its own
    assert (tmp_path / "inner" / "patchgen.toml").is_file()
    Path("pyproject.toml").write_text("[tool.patchgen]\n")
    with pytest.raises(ConfigError, match=r"has both patchgen.toml and .tool.patchgen. in pyproject.toml"):
        run("list")


def test_a_project_is_found_from_the_folders_in_it(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text('[tool.patchgen]\ngenerated = "models"\n')
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text('[project]\nname = "says nothing of patchgen"\n')
    monkeypatch.chdir(inner)
    assert provenance.generated_root() == tmp_path / "models"
    assert project.model_settings() == {"generated": str(tmp_path / "models")}
    monkeypatch.chdir(tmp_path)
    assert provenance.generated_root() == Path("models")
    (tmp_path / "pyproject.toml").write_text("[tool.patchgen]\npasses = 'one'\n")
    with pytest.raises(ConfigError, match=r"pyproject.toml: .tool.patchgen. takes .*string list passes, not"):
        run("list")


def test_what_is_generated_goes_into_the_project_and_is_checked_there(place):
    installed = {
        path: path.stat().st_mtime_ns for path in (Path(project_code.__file__).parent / "generated_models").rglob("*")
    }
    assert "wrote generated/llama/modeling_llama.py" in run("generate", MODEL).replace("\n", "")
    assert {path: path.stat().st_mtime_ns for path in installed} == installed
    record = json.loads((place / "generated" / MODEL / "provenance.json").read_text())
    assert record["command"] == f"patchgen generate {MODEL} --transformers {record['upstream']['version']}"
    diff = (place / "generated" / MODEL / f"modeling_{MODEL}.diff").read_text()
    assert f"\n+++ b/generated/{MODEL}/modeling_{MODEL}.py\n" in diff
    assert "have no proof: llama. To fix: patchgen verify llama" in run("check", code=1)
    record_proof(place / "generated" / MODEL)
    assert "1 of 1 generated models are current" in run("check")
    assert MODEL in run("list") and "mixtral" not in run("list")
    path = place / "generated" / MODEL / f"modeling_{MODEL}.py"
    path.write_text(path.read_text() + "# mine\n")
    assert "stale" in run("check", code=1)


def test_a_config_of_the_project_goes_before_that_of_the_package(place):
    assert "wrote configs/llama.py" in run("new", MODEL).replace("\n", "")
    assert model_configs.file_of(MODEL) == Path("configs/llama.py")
    assert model_configs.file_of("mixtral").is_file()
    (place / "configs" / "llama.py").write_text(
        "from patchgen.model_configs import Expect, ModelConfig\n"
        'CONFIG = ModelConfig("llama", expect={"fused_loss": 7})\n'
    )
    with pytest.raises(PassMismatch, match=r"expects 7(.|\n)*correct `expect` in configs/llama.py"):
        pipeline.generate(upstream.load(MODEL))
    (place / "configs" / "llama.py").write_text("CONFIG = 1 / 0\n")
    with pytest.raises(ConfigError, match=r"llama.py cannot be imported: ZeroDivisionError"):
        pipeline.generate(upstream.load(MODEL))


def test_a_pass_of_the_project_runs_is_explained_and_is_part_of_what_check_compares(place):
    with_pass(place)
    run("generate", MODEL)
    text = (place / "generated" / MODEL / f"modeling_{MODEL}.py").read_text()
    assert '    # patchgen: trace_attention\n    @torch.profiler.record_function("LlamaAttention")\n' in text
    assert "trace_attention" in run("list").replace("\n", "")
    assert "a forward gets a decorator" in run("explain", "trace_attention")
    record_proof(place / "generated" / MODEL)
    assert "1 of 1" in run("check")
    with_pass(
        place,
        PASS.replace('function("{site.block}")', 'function("of {site.block}")').replace('"ExampleA', '"of ExampleA'),
    )
    assert "stale" in run("check", code=1)


def test_the_edit_and_the_pass_of_the_page_from_start_to_end(place):
    """docs/add_model.md; `verify` of what comes out is in tests/distributed/test_own_repository.py."""
    assert "wrote configs/olmo2.py" in run("new", "olmo2").replace("\n", "")
    draft = (place / "configs" / "olmo2.py").read_text()
    assert all(line in CONFIG for line in draft.splitlines())
    (place / "configs" / "olmo2.py").write_text(CONFIG)
    run("generate", "olmo2")
    text = (place / "generated" / "olmo2" / "modeling_olmo2.py").read_text()
    assert "# edit Olmo2Model.forward: edit_method: rows longer than the model has positions for" in text
    assert "        if inputs_embeds.shape[1] > self.config.max_position_embeddings:" in text
    with_pass(place)
    (place / "patchgen.toml").write_text((place / "patchgen.toml").read_text() + 'configs = "configs"\n')
    assert "stale" in run("check", code=1)
    run("generate", "olmo2")
    assert (
        '@torch.profiler.record_function("Olmo2Attention")'
        in (place / "generated" / "olmo2" / "modeling_olmo2.py").read_text()
    )
    record_proof(place / "generated" / "olmo2")
    assert "1 of 1" in run("check")


def test_proofs_hold_where_torch_is_not_installed(place, monkeypatch):
    """A workflow that only checks installs no torch; the release that a proof was made with is then not at issue."""
    run("generate", MODEL)
    record_proof(place / "generated" / MODEL, torch="2.13.0")
    here = source_keys.versions()
    for torch, code in (("2.13.0", 0), ("", 0), ("2.12.0", 1)):
        monkeypatch.setattr(source_keys, "versions", lambda torch=torch: here | {"torch": torch})
        assert ("Every recorded proof is current" in run("check", code=code)) == (code == 0)


def test_check_holds_a_pass_to_its_examples(place):
    with_pass(place)
    run("generate", MODEL)
    with_pass(place, PASS.replace('record_function("ExampleAttention")', 'record_function("Another")'))
    assert "example" in (output := run("check", code=1)) and "a forward gets a decorator" in output
    assert '+    @torch.profiler.record_function("Another")' in output


def test_a_pass_runs_before_the_one_that_it_names(place):
    names = [kind.name for kind in PASSES]
    with_pass(place)
    found = [kind.name for kind in all_passes()]
    assert found == [*names[:-1], "trace_attention", "host_sync_lint"]
    with_pass(place, PASS.replace('    name = "trace', '    before = "fused_loss"\n    name = "trace'))
    found = [kind.name for kind in all_passes()]
    assert found.index("trace_attention") + 1 == found.index("fused_loss")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('name = "trace_attention"', 'name = "fused_ops"', "a pass named 'fused_ops' exists already"),
        (
            '    name = "trace',
            '    before = "fused_los"\n    name = "trace',
            "is no earlier pass. Nearest: fused_loss",
        ),
        ('    purpose = "', '    aim = "', "does not define TraceAttention.purpose"),
        ("(SitePass):", ":", "defines no subclass of Pass"),
        ("from patchgen.source import", "from patchgen.sources import", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_a_file_that_holds_no_pass_says_why(place, old, new, message):
    assert old in PASS
    with_pass(place, PASS.replace(old, new, 1))
    with pytest.raises(ConfigError, match=message):
        all_passes()


def test_a_pass_whose_file_is_gone_is_named(place):
    with_pass(place)
    (place / "passes" / "trace_attention.py").unlink()
    with pytest.raises(
        ConfigError, match=r"patchgen.toml: `passes` names passes/trace_attention.py, but there is no file"
    ):
        run("generate", MODEL)


def test_the_way_out_of_a_miss_names_the_file_of_the_pass(place):
    missing = PASS.replace("        editor = E", '        raise Missed("another form")\n        editor = E')
    with_pass(place, missing.replace("Example, R", "Example, Missed, R"))
    with pytest.raises(PassMismatch, match=r"update the pass \(/.*/passes/trace_attention.py\)"):
        pipeline.generate(upstream.load(MODEL))
    assert pass_named("trace_attention") is not None


def test_an_installed_package_is_never_written_into(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "patchgen"
    monkeypatch.setattr(project_code, "__file__", str(package / "project_code.py"))
    for folder in ("generated_models", "model_configs"):
        with pytest.raises(ConfigError, match=r"would be written into the installed package .*patchgen init"):
            project_code.refuse_installed_package(package / folder, "What is generated")
    project_code.refuse_installed_package(tmp_path / "mine", "What is generated")
    package.parent.mkdir()
    (tmp_path / "site-packages" / "pyproject.toml").touch()  # a checkout: its own models are committed there
    project_code.refuse_installed_package(package / "generated_models", "What is generated")


def test_the_hook_runs_check_on_what_it_compares():
    hook = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    assert f"id: {hook['id']}" in (ROOT / "docs" / "own_repository.md").read_text()
    program, command = hook["entry"].split()
    assert program == "patchgen" and command in typer.main.get_command(app).commands
    looked_at = ["generated/llama/modeling_llama.py", "generated/llama/provenance.json", "generated/llama/verify.json"]
    looked_at += ["patchgen.toml", "sub/pyproject.toml", "configs/llama.py", "passes/mine.py"]
    assert all(re.search(hook["files"], path) for path in looked_at)
    assert not any(re.search(hook["files"], path) for path in ("README.md", "recipes/one.yaml", "src/train.py"))


@pytest.mark.parametrize("name", ["check.yml", "newest_release.yml"])
def test_a_workflow_to_copy_names_commands_and_options_that_there_are(name):
    assert f"examples/own_repository/{name}" in (ROOT / "docs" / "own_repository.md").read_text()
    workflow = yaml.safe_load((ROOT / "examples" / "own_repository" / name).read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    lines = [line.strip() for step in steps for line in step.get("run", "").splitlines()]
    calls = [line.partition("||")[0].split()[1:] for line in lines if line.startswith("patchgen ")]
    assert len(calls) == 2
    commands = typer.main.get_command(app).commands
    for command, *options in calls:
        known = {text for parameter in commands[command].params for text in parameter.opts}
        assert {option for option in options if option.startswith("--")} <= known
    assert any("upload-artifact" in step.get("uses", "") for step in steps)
