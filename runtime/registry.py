"""Finds generated models, and registers them with transformers' auto classes.

    from patchgen.runtime import registry

    registry.register_all()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")     # the generated class
    model = registry.build_model(config)                                    # or without the auto classes

No model is listed here: `provenance.json` next to each generated file says what it came from, and the auto class of a
generated class follows from transformers' own mappings, by class name:

    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["qwen3_moe"] == "Qwen3MoeForCausalLM"
      -> AutoModelForCausalLM: Qwen3MoeConfig -> generated Qwen3MoeForCausalLM
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from patchgen.runtime import mended_upstream
from patchgen.runtime.compatibility import ReleaseMismatch
from patchgen.runtime.mended_upstream import Mend

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _LazyAutoMapping

PACKAGE = "patchgen.generated_models"
AUTO_CLASSES = (
    "AutoModel", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM",
    "AutoModelForSequenceClassification", "AutoModelForTokenClassification", "AutoModelForQuestionAnswering",
    "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq",
)  # fmt: skip


class UnknownModelError(LookupError):
    """No generated model of that name or for that config."""


class NoUpstreamError(ValueError):
    """The file that a model was generated from is unknown, missing or has changed."""


@dataclass(frozen=True)
class GeneratedModel:
    """One generated model: its folder, the content of `provenance.json`, and its source file.

    Attributes:
        upstream_sha256: of the text that it was generated from.
        source: the file that it was generated from, if that is the user's and its folder was named.
        parts: the attributes that are models of other generated files: `Class.attribute`.
        mends: the statements of upstream's code that fail there, and are mended in both for a comparison.
    """

    name: str
    directory: Path
    upstream_module: str
    upstream_sha256: str
    upstream_version: str
    model_types: tuple[str, ...]
    heads: tuple[str, ...]
    classes: tuple[str, ...]
    source: Path | None = None
    parts: tuple[str, ...] = ()
    mends: tuple[Mend, ...] = ()

    @property
    def file(self) -> Path:
        """The generated modeling file."""
        return self.directory / f"modeling_{self.name}.py"

    @property
    def is_from_user_file(self) -> bool:
        """Whether it was generated from a file of the user, not from a module of an installed package."""
        return self.upstream_module.startswith(f"{PACKAGE}.")

    def find_source(self, folder: Path) -> Path | None:
        """The file in a folder that this model was generated from, by its text."""
        return next(
            (file for file in sorted(folder.glob("modeling_*.py")) if digest(file) == self.upstream_sha256), None
        )

    def upstream(self) -> ModuleType:
        """The module that it was generated from, with what its config mends there.

        A user's file is imported into the package of the generated one, so both have the same configuration classes.

        Raises:
            NoUpstreamError: its folder was not named, or the file has changed since.
        """
        if not self.is_from_user_file:
            if self.mends:
                return mended_upstream.mended(self.upstream_module, self.mends)
            return importlib.import_module(self.upstream_module)
        name = f"{self.upstream_module.rpartition('.')[2]}.py"
        if self.source is None:
            raise NoUpstreamError(
                f"'{self.name}' was made from a file {name} that belongs to no installed package and whose folder is unknown, so "
                "there is no upstream class to compare with. Name its folder: --code FOLDER, or code in [tool.patchgen] of "
                "pyproject.toml."
            )
        if not self.source.is_file() or digest(self.source) != self.upstream_sha256:
            raise NoUpstreamError(
                f"{self.source} is not the file that '{self.name}' in {self.directory} was made from. Generate it again with "
                f"`patchgen generate {self.name} --source {self.source.parent} --output {self.directory.parent}`."
            )
        return _import_beside(self.source, self.load())

    def load(self) -> ModuleType:
        """Imports the generated module, in `sys.modules` (transformers looks for a class's source there).

        Also declares its heads' rules for custom inputs in this process.
        """
        if self.directory.parent == installed_directory():
            module = importlib.import_module(f"{PACKAGE}.{self.name}.{self.file.stem}")
        elif self.file.is_file():
            module = import_file(self.file)
        else:
            raise FileNotFoundError(
                f"{self.file} does not exist, but its provenance.json does. Run `patchgen generate {self.name}`."
            )
        for head in (getattr(module, name) for name in self.heads):
            _declare_inputs(head)
        return module


def _declare_inputs(head: type) -> None:
    """Declares the rules of `input_rules`, without the examples for proofs, and of the inputs of media features."""
    from patchgen.runtime.parallel import batch_fields

    if input_rules := getattr(head, "input_rules", {}):
        rules = {name: {k: v for k, v in rule.items() if k != "example"} for name, rule in input_rules.items()}
        batch_fields.declare(rules, f"{head.__name__}.input_rules")
    batch_fields.infer_item_fields(head)


LOCAL_PACKAGE = "patchgen_generated_"


def digest(file: Path) -> str:
    """A hash of a file's text, as `patchgen generate` records it."""
    return hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest()


def _import_beside(file: Path, generated: ModuleType) -> ModuleType:
    """Imports the source file of a generated module, in the package of the generated one.

    Sibling modules that both import are then the same, with one set of classes; siblings that were not generated come from the
    source file's folder.
    """
    package = importlib.import_module(generated.__name__.rpartition(".")[0])
    name = f"{package.__name__}.source_of_{generated.__name__.rpartition('.')[2]}"
    if str(file.parent) not in package.__path__:
        package.__path__.append(str(file.parent))
    return _import_as(name, file)


def _import_as(name: str, file: Path) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise ImportError(f"{file} is not a Python file and cannot be imported as {name}.")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def import_file(file: Path) -> ModuleType:
    """Imports a file outside this installation, under a name derived from its path."""
    location = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    package = f"{LOCAL_PACKAGE}{location}"  # the folder as a package: the file may import its siblings
    add_packages({package: [str(file.parent.resolve())]})
    # By its path: a folder beside it may have its name, and one like kosmos-2.5 is no module's.
    return _import_as(f"{package}.{file.stem.replace('.', '_')}", file)


def local_packages() -> dict[str, list[str]]:
    """Name -> path of the folders that this process imports as packages; workers need them to unpickle classes."""
    return {
        name: list(module.__path__)
        for name, module in sys.modules.items()
        if name.startswith(LOCAL_PACKAGE) and "." not in name
    }


def add_packages(packages: Mapping[str, Sequence[str]]) -> None:
    """Makes folders importable as packages, as `local_packages` returns them."""
    for name, folders in packages.items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = list(folders)


def installed_directory() -> Path:
    """The folder of the generated models that come with this installation."""
    import patchgen

    return Path(patchgen.__file__).parent / "generated_models"


def read_model(directory: Path) -> GeneratedModel:
    """Reads the generated model in `directory`.

    Raises:
        FileNotFoundError: there is no `provenance.json`.
        ValueError: it lacks a field, or is not JSON; the message names it.
    """
    record = directory / "provenance.json"
    if not record.is_file():
        raise FileNotFoundError(f"{directory} contains no generated model: there is no provenance.json.")
    try:
        fields = json.loads(record.read_text())
        return GeneratedModel(
            name=fields["model"],
            directory=directory,
            upstream_module=fields["upstream"]["module"],
            upstream_sha256=fields["upstream"]["sha256"],
            upstream_version=fields["upstream"]["version"],
            model_types=tuple(fields["model_types"]),
            heads=tuple(fields["heads"]),
            classes=tuple(fields["classes"]),
            parts=tuple(part["site"] for part in fields.get("parts", ())),
            mends=mended_upstream.mends_of(fields.get("edits", ())),
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{record} is not JSON: {error}. Run `patchgen generate {directory.name}`.") from error
    except KeyError as error:
        raise ValueError(f"{record} lacks the field {error}. Run `patchgen generate {directory.name}`.") from error


def generated_models(directory: Path | None = None) -> tuple[GeneratedModel, ...]:
    """The generated models below `directory` (default: those of this installation), by name."""
    root = directory or installed_directory()
    if not root.is_dir():
        raise FileNotFoundError(
            f"{root} does not exist: there are no generated models. Run `patchgen generate --all`."
        )
    return tuple(read_model(record.parent) for record in sorted(root.glob("*/provenance.json")))


def find_model(name: str, directory: Path | None = None) -> GeneratedModel:
    """The generated model of that name, or that serves that model type.

    Raises:
        UnknownModelError: there is none; the message names the nearest.
    """
    models = generated_models(directory)
    for model in models:
        if name == model.name or name in model.model_types:
            return model
    raise UnknownModelError(_unknown(f"There is no generated model '{name}'.", name, models))


def build_model(config: PreTrainedConfig, *, directory: Path | None = None, **kwargs: object) -> PreTrainedModel:
    """Builds the generated model of a config, with random weights.

    Args:
        config: a config of one of the generated heads.
        kwargs: for transformers' `_from_config` (`dtype`, `attn_implementation`, ...).

    Raises:
        UnknownModelError: no generated head takes a config of this class; the message names the nearest.
        ValueError: a process group has several ranks, and by the proof of its file the model trains on one.
    """
    from torch import distributed

    from patchgen.runtime import model_calls
    from patchgen.runtime.parallel.sharding import require_layout

    head = find_head(config, directory=directory)
    if distributed.is_available() and distributed.is_initialized():
        require_layout(head, ranks=distributed.get_world_size(), sp=1)
    model = head._from_config(config, **kwargs)
    model_calls.separate_as_proven(model)
    return model


def find_head(config: PreTrainedConfig, *, directory: Path | None = None) -> type[PreTrainedModel]:
    """The generated head whose config class is that of `config`: the first language model in `provenance.json`, else the
    first other head.

    Raises:
        UnknownModelError: there is none.
    """
    from patchgen.runtime.verify.head_kinds import kind_of

    models = generated_models(directory)
    package = type(config).__module__.rpartition(".")[0]
    for model in models:
        # Only imports candidates: the config class is in the package of the modeling file, or has its model type.
        if config.model_type not in model.model_types and model.upstream_module.rpartition(".")[0] != package:
            continue
        module = model.load()
        for head in sorted(model.heads, key=lambda name: kind_of(name) is not None):
            if getattr(module, head).config_class is type(config):
                return getattr(module, head)
    problem = f"No generated model takes a {type(config).__name__} (model type '{config.model_type}')."
    raise UnknownModelError(_unknown(problem, config.model_type, models))


def register_all(directory: Path | None = None) -> tuple[GeneratedModel, ...]:
    """Makes transformers' auto classes build the generated classes, in this process; returns the models.

    This covers `from_config` and `from_pretrained` of the auto classes in `AUTO_CLASSES`, for each config that upstream
    serves with a class of the same name. Models of another transformers release than the installed one are skipped with
    a warning.

    Raises:
        ReleaseMismatch: every model is of another release.
    """
    registered, refused = [], []
    for model in generated_models(directory):
        try:
            module = model.load()
        except ReleaseMismatch as error:
            refused.append(error)
            continue
        registered.append(model)
        for class_name in model.classes:
            for mapping, config_class in _served_configs(class_name):
                # not the auto class's `register`, which refuses heads of a composite's text config
                mapping.register(config_class, getattr(module, class_name), exist_ok=True)
    if refused:
        reasons = "\n".join(map(str, refused))
        if not registered:
            raise ReleaseMismatch(f"No generated model could be registered:\n{reasons}")
        warnings.warn(
            f"{len(refused)} generated model(s) are not registered:\n{reasons}", RuntimeWarning, stacklevel=2
        )
    return tuple(registered)


def _served_configs(class_name: str) -> Iterator[tuple[_LazyAutoMapping, type[PreTrainedConfig]]]:
    """The auto mappings, and config classes, for which upstream has a class of this name."""
    import transformers
    from transformers.models.auto import modeling_auto

    for auto_class in AUTO_CLASSES:
        mapping = getattr(modeling_auto, auto_class)._model_mapping
        for model_type, served in mapping._model_mapping.items():
            if class_name in ((served,) if isinstance(served, str) else served):
                yield mapping, transformers.CONFIG_MAPPING[model_type]


def _unknown(problem: str, name: str, models: tuple[GeneratedModel, ...]) -> str:
    name_by_alias = {alias: model.name for model in models for alias in (model.name, *model.model_types)}
    nearest = dict.fromkeys(
        name_by_alias[alias] for alias in difflib.get_close_matches(name, name_by_alias, n=3, cutoff=0.4)
    )
    existing = ", ".join(nearest) or ", ".join(model.name for model in models) or "none at all"
    return f"{problem} Nearest of those that exist: {existing}.\nGenerate it with `patchgen generate {name}`."
