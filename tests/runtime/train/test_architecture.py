"""An architecture that transformers does not know: found by what the recipe names, refused in words that say where."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoProcessor
from transformers.models.auto import modeling_auto
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from patchgen import provenance
from patchgen.commands import checkpoints, generation, proof
from patchgen.errors import ConfigError, UpstreamNotFound
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.train import architecture, model, preflight, recipe
from patchgen.runtime.train.recipe import ModelConfig, RecipeError

SOURCE = Path(__file__).parents[2] / "patchgen" / "data" / "lattice_moe"
PROCESSOR = """
from transformers import ProcessorMixin
class LatticeMoeProcessor(ProcessorMixin):
    def __init__(self, **kwargs):
        pass
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `code`, what was generated from it, and a checkpoint's config."""
    place = tmp_path_factory.mktemp("architecture")
    shutil.copytree(SOURCE, place / "code", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "code" / "processing_lattice_moe.py").write_text(PROCESSOR)
    generation.generate(["lattice_moe"], False, None, place / "code", place / "generated", dry_run=False, force=False)
    (place / "start").mkdir()
    config = {
        "model_type": "lattice_moe",
        "architectures": ["LatticeMoeForConditionalGeneration"],
        "num_hidden_layers": 3,
    }
    (place / "start" / "config.json").write_text(json.dumps(config))
    (place / "start" / "processor_config.json").write_text(json.dumps({"processor_class": "LatticeMoeProcessor"}))
    return place


@pytest.fixture(autouse=True)
def process(monkeypatch):
    """A process that has registered nothing yet."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    for mapping in (CONFIG_MAPPING, PROCESSOR_MAPPING, IMAGE_PROCESSOR_MAPPING, modeling_auto.MODEL_MAPPING, causal):
        monkeypatch.setattr(mapping, "_extra_content", {})
    architecture._register.cache_clear()
    yield
    architecture._register.cache_clear()


def named(made: Path, **changes: object) -> ModelConfig:
    values = {"source": str(made / "start"), "code": str(made / "code"), "generated": str(made / "generated")}
    return ModelConfig(**values | changes)


def test_configuration_model_and_processor_are_registered(made):
    config = model.read_config(named(made, overrides={"num_experts": 6}))
    assert (config.model_type, config.num_hidden_layers, config.num_experts) == ("lattice_moe", 3, 6)
    built = model.build_on_meta(recipe.from_dict({"model": vars(named(made)), "data": {}}))
    assert [*built.get_parallel_plan().expert_parameters], "the generated class, with its experts stacked"
    assert type(AutoModelForCausalLM.from_config(config)) is type(built)
    assert (
        type(AutoProcessor.from_pretrained(made / "start", trust_remote_code=False)).__name__ == "LatticeMoeProcessor"
    )
    defaults = model.read_config(named(made, source="lattice_moe"))
    assert defaults.num_hidden_layers == 2, "its model type is one that the recipe can name"


def test_the_folder_that_was_generated_is_code_as_well(made):
    config = model.read_config(named(made, code=str(made / "generated" / "lattice_moe"), generated=None))
    assert config.num_hidden_layers == 3


def test_a_module_is_imported_by_its_name_and_ranks_are_told_where_from(made, tmp_path, monkeypatch):
    package = tmp_path / "my_project" / "my_models"
    shutil.copytree(made / "code", package)
    (package / "__init__.py").write_text("import os\nos.environ['WAS_IMPORTED'] = 'yes'\n")
    monkeypatch.delenv("WAS_IMPORTED", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    wanted = named(made, code="my_project.my_models")
    assert architecture.import_path(wanted) == str(tmp_path)
    assert architecture.import_path(named(made)) is None, "a folder is found by its path"
    assert model.read_config(wanted).model_type == "lattice_moe"
    assert (
        sys.modules["my_project.my_models.processing_lattice_moe"].LatticeMoeProcessor
        in PROCESSOR_MAPPING._extra_content.values()
    )
    with pytest.raises(
        RecipeError, match=r"'my_projects.x' is neither a folder \(.*\) nor a module .*looked in .*Name the folder"
    ):
        model.read_config(named(made, code="my_projects.x"))


@pytest.mark.parametrize(
    ("code", "files"),
    [
        ("one", ["one.py"]),
        ("outer.inner", ["outer/__init__.py", "outer/inner.py"]),
        ("outer.inner", ["outer/__init__.py", "outer/inner/__init__.py"]),
        ("outer.inner", ["outer/inner/modeling_mine.py"]),
        ("outer.inner", ["outer/inner.py"]),
    ],
)
def test_ranks_import_files_packages_and_namespaces_from_their_root(code, files, tmp_path, monkeypatch):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outer", raising=False)
    assert architecture.import_path(ModelConfig(source="mine", code=code)) == str(tmp_path)
    sys.modules.pop("outer", None)


def test_a_project_names_it_once(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("pyproject.toml").write_text(f'[tool.patchgen]\ncode = "{made}/code"\ngenerated = "{made}/generated"\n')
    Path("mine.yaml").write_text(f"model: {{source: {made}/start}}\ndata: {{}}\n")
    found = recipe.load(Path("mine.yaml"))
    assert (found.model.code, found.model.generated) == (f"{made}/code", f"{made}/generated")
    assert model.read_config(found.model).num_hidden_layers == 3
    assert recipe.load(Path("mine.yaml"), {"model.code": "null"}).model.generated is None, (
        "what a recipe says goes first"
    )
    Path("pyproject.toml").write_text("[tool.patchgen]\ncodes = 1\n")
    with pytest.raises(
        RecipeError, match=r"pyproject.toml: .tool.patchgen. takes the strings generated, configs, code and .*not"
    ):
        recipe.load(Path("mine.yaml"))


def test_code_of_a_checkpoint_runs_when_the_recipe_says_so(made, tmp_path):
    folder, mark = tmp_path / "downloaded", tmp_path / "ran"
    shutil.copytree(made / "start", folder)
    shutil.copytree(made / "code", folder, dirs_exist_ok=True)
    with (folder / "processing_lattice_moe.py").open("a") as file:
        file.write(f"\nfrom pathlib import Path\nPath({str(mark)!r}).touch()\n")
    config = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "configuration_lattice_moe.LatticeMoeConfig"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto}))
    brought = named(made, source=str(folder), code=None, generated=None)
    with pytest.raises(RecipeError, match=r"needs custom code .auto_map., which only runs if the recipe allows it"):
        model.read_config(brought)
    assert not mark.exists()
    model.read_config(named(made, source=str(folder)))  # the folder that the recipe names, not the downloaded one
    assert not mark.exists()
    assert model.read_config(named(made, source=str(folder), code=None, trust_remote_code=True)).auto_map == auto
    assert mark.exists()
    with pytest.raises(RecipeError, match="both say where code comes from"):
        model.read_config(named(made, trust_remote_code=True))


def test_without_code_the_model_type_is_named(made):
    with pytest.raises(
        RecipeError, match=r"says model_type 'lattice_moe', which transformers .* does not know, and no code"
    ):
        model.read_config(named(made, code=None, generated=None))


CHANGES = {
    "modeling_lattice_moe.py": r"the generated model in .*generated was made from another version of .*modeling_lattice_moe",
    "configuration_lattice_moe.py": r"configuration_lattice_moe.py has changed since .*generated/lattice_moe was generated",
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_that_was_changed_since_is_generated_anew(name, made, tmp_path):
    shutil.copytree(made / "code", tmp_path / "code")
    with (tmp_path / "code" / name).open("a") as file:
        file.write("\nCHANGED = 1\n")
    with pytest.raises(RecipeError, match=CHANGES[name] + r".*patchgen generate lattice_moe --source .*code --output"):
        model.read_config(named(made, code=str(tmp_path / "code")))


def test_what_cannot_be_registered_is_told_with_its_place(made, tmp_path):
    with pytest.raises(
        RecipeError, match=r"no generated model in .*generated_models was made from .*modeling_lattice_moe"
    ):
        model.read_config(named(made, generated=None))
    with pytest.raises(RecipeError, match=r"has neither modeling_\*.py nor .*; it contains config.json"):
        model.read_config(named(made, code=str(made / "start")))
    shutil.copytree(made / "code", tmp_path / "code")
    (tmp_path / "code" / "processing_lattice_moe.py").write_text("import nothing_of_this_name")
    with pytest.raises(
        RecipeError, match=r"processing_lattice_moe.py cannot be imported: ModuleNotFoundError: No module"
    ):
        model.read_config(named(made, code=str(tmp_path / "code")))
    (tmp_path / "code" / "processing_lattice_moe.py").write_text(PROCESSOR + PROCESSOR.replace("MoeP", "P"))
    architecture._register.cache_clear()
    with pytest.raises(RecipeError, match=r"LatticeMoeProcessor, LatticeProcessor of .* are of the same kind"):
        model.read_config(named(made, code=str(tmp_path / "code")))


def test_checkpoints_are_converted_with_code_that_the_command_names(made, tmp_path):
    built = model.build_on_meta(recipe.from_dict({"model": vars(named(made)), "data": {}}))
    type(built)(built.config).save_pretrained(tmp_path / "in")
    own = {"code": str(made / "code"), "generated": str(made / "generated")}
    checkpoints.convert(tmp_path / "in", tmp_path / "out", layout="stacked", dtype=None, **own)
    del CONFIG_MAPPING._extra_content["lattice_moe"]
    with pytest.raises(ConfigError, match="name your own code with --code FOLDER"):
        checkpoints.convert(tmp_path / "in", tmp_path / "again", layout=None, dtype=None, code=None, generated=None)


def test_it_is_proven_against_the_users_file_before_it_trains(made, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(made / "generated", tmp_path / "generated", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "generated" / "lattice_moe" / "modeling_lattice_moe.py"
    file.write_text(file.read_text().replace("output + self.shared_expert(hidden_states)", "output"))
    values = {"model": vars(named(made, generated=str(tmp_path / "generated"))), "data": {}}
    found = preflight.examine(recipe.from_dict(values))
    assert "'logits' differs" in found.refusal, "compared with itself it would agree"


def test_inputs_have_the_rules_of_the_model_and_of_the_recipe(made, monkeypatch):
    monkeypatch.setattr(batch_fields, "RULES", dict(batch_fields.RULES))
    batch_fields.RULES.pop("pixel_spacing", None)
    values = {"model": vars(named(made)), "data": {}}
    architecture.prepare(recipe.from_dict(values | {"inputs": {"heights": {"pack_dim": -1, "pad_scale": 1}}}))
    assert batch_fields.rule_of("pixel_spacing") == batch_fields.FieldRule(0), "from the class"
    assert batch_fields.rule_of("heights") == batch_fields.FieldRule(-1, pad_scale=1), "from the recipe"
    with pytest.raises(RecipeError, match=r"inputs: pixel_spacing already has the rule FieldRule\(pack_dim=0"):
        architecture.prepare(recipe.from_dict(values | {"inputs": {"pixel_spacing": {"pack_dim": 1}}}))
    with pytest.raises(RecipeError, match="inputs.heights.pack_dim"):
        recipe.from_dict(values | {"inputs": {"heights": {}}})
    with pytest.raises(RecipeError, match=r"inputs.heights.packdim.*no such key"):
        recipe.from_dict(values | {"inputs": {"heights": {"pack_dim": 0, "packdim": 1}}})
    with pytest.raises(RecipeError, match=r"sliced: true needs a pad_scale"):
        recipe.from_dict(values | {"inputs": {"heights": {"pack_dim": 0, "sliced": True}}})
    read = recipe.from_dict(values | {"inputs": {"heights": {"pack_dim": -1}}})
    assert recipe.from_dict(recipe.to_dict(read)).inputs == read.inputs


def test_verify_finds_the_model_of_the_project_or_of_the_command(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nothing = {"every": False, "directory": None, "code": None, "generated_folder": None}
    with pytest.raises(UpstreamNotFound, match="No model was named"):
        proof._subjects([], **nothing)
    own = {"code": str(made / "code"), "generated_folder": str(made / "generated")}
    directory = made / "generated" / "lattice_moe"
    (found,) = proof._subjects([], **nothing | own)
    assert found.source == made / "code" / "modeling_lattice_moe.py"
    assert proof._subjects([], **nothing | {"directory": directory})[0].source is None
    assert proof._subjects([], **nothing | {"directory": directory, "code": own["code"]}) == [found]
    Path("pyproject.toml").write_text(
        f'[tool.patchgen]\ncode = "{own["code"]}"\ngenerated = "{own["generated_folder"]}"\n'
    )
    assert proof._subjects([], **nothing) == proof._subjects(["lattice_moe"], **nothing) == [found]
    assert proof._subjects([], **nothing | {"directory": directory}) == [found]
    assert [one.name for one in proof._subjects(["llama"], **nothing)] == ["llama"]
    with pytest.raises(UpstreamNotFound, match="no generated model 'latice_moe'"):
        proof._subjects(["latice_moe"], **nothing)


def test_the_models_of_a_project_go_before_those_of_the_installation(tmp_path):
    """Without code of its own: a recipe trains what the project generated, and ours where it generated nothing."""
    installed = provenance.generated_root() / "llama"
    shutil.copytree(installed, tmp_path / "generated" / "llama")
    wanted = ModelConfig(source="llama", generated=str(tmp_path / "generated"))
    head = model.find_head(model.read_config(wanted), architecture.register(wanted))
    assert Path(sys.modules[head.__module__].__file__).parent == tmp_path / "generated" / "llama"
    assert architecture.generated_model_of(head).directory == tmp_path / "generated" / "llama"
    other = ModelConfig(source="qwen3", generated=str(tmp_path / "generated"))
    head = model.find_head(model.read_config(other), architecture.register(other))
    assert head.__module__.startswith("patchgen.generated_models.qwen3.")
    with pytest.raises(RecipeError, match=r"model.generated = '.*nowhere' is not a folder"):
        architecture.register(ModelConfig(source="llama", generated=str(tmp_path / "nowhere")))
