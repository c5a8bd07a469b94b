"""The generated models there are, and how transformers' auto classes come to build them.

    from patchgen.runtime import registry

    registry.register_all()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B")     # the generated class
    model = registry.build_model(config)                                    # or without the auto classes

Nothing about a model is typed here: `provenance.json` beside each generated file says what it came from, and which
auto class serves a generated class follows from transformers' own mappings, by class name:

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

from patchgen.runtime.compatibility import ReleaseMismatch

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
    """What a model was made from is a file that is not there, or not the one that it was made from any more."""


@dataclass(frozen=True)
class GeneratedModel:
    """One generated model: its folder, what `provenance.json` says of it, and where the file lies that it was made from.

    Attributes:
        upstream_sha256: of the text that it was made from.
        source: the file that it was made from, where that is one of the user's own and its folder was named.
        parts: where it builds models of other generated files: `Class.attribute`.
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

    @property
    def file(self) -> Path:
        """The generated modeling file."""
        return self.directory / f"modeling_{self.name}.py"

    @property
    def is_own(self) -> bool:
        """Whether it was made from a file of the user's own, and not from a module of an installed package."""
        return self.upstream_module.startswith(f"{PACKAGE}.")

    def made_from(self, folder: Path) -> Path | None:
        """The file in a folder whose text is what this model was made from."""
        return next(
            (file for file in sorted(folder.glob("modeling_*.py")) if digest(file) == self.upstream_sha256), None
        )

    def upstream(self) -> ModuleType:
        """The module that it was made from.

        A file of the user's own is imported beside the generated one: the configuration classes of both are the same.

        Raises:
            NoUpstreamError: its folder was not named, or the file has changed since.
        """
        if not self.is_own:
            return importlib.import_module(self.upstream_module)
        name = f"{self.upstream_module.rpartition('.')[2]}.py"
        if self.source is None:
            raise NoUpstreamError(
                f"'{self.name}' was made from a file {name} of no installed package, and nothing says where it lies, so there "
                "is no upstream class to compare with. Name its folder: --code FOLDER, or code in [tool.patchgen] of "
                "pyproject.toml."
            )
        if not self.source.is_file() or digest(self.source) != self.upstream_sha256:
            raise NoUpstreamError(
                f"{self.source} is not the file that '{self.name}' in {self.directory} was made from. Make it anew with "
                f"`patchgen generate {self.name} --source {self.source.parent} --output {self.directory.parent}`."
            )
        return _import_beside(self.source, self.load())

    def load(self) -> ModuleType:
        """The imported generated module, in `sys.modules` (transformers looks for a class's source there).

        The rules that its heads have for inputs of their own hold in this process from here on.
        """
        if self.directory.parent == installed_directory():
            module = importlib.import_module(f"{PACKAGE}.{self.name}.{self.file.stem}")
        elif self.file.is_file():
            module = import_file(self.file)
        else:
            raise FileNotFoundError(
                f"{self.file} does not exist, but provenance.json is beside it. Run `make regen MODEL={self.name}`."
            )
        for head in (getattr(module, name) for name in self.heads):
            _declare_inputs(head)
        return module


def _declare_inputs(head: type) -> None:
    """The rules of `input_rules`, whose examples are for proofs alone, and of what its features are computed from."""
    from patchgen.runtime.parallel import batch_fields

    given = getattr(head, "input_rules", {})
    if given:
        rules = {name: {key: one for key, one in rule.items() if key != "example"} for name, rule in given.items()}
        batch_fields.declare(rules, f"{head.__name__}.input_rules")
    batch_fields.infer_item_fields(head)


LOCAL_PACKAGE = "patchgen_generated_"


def digest(file: Path) -> str:
    """A hash of a file's text, as `patchgen generate` records it."""
    return hashlib.sha256(file.read_text(encoding="utf-8").encode()).hexdigest()


def _import_beside(file: Path, generated: ModuleType) -> ModuleType:
    """The module of the file that a generated one was made from, in the package of the generated one.

    What both import from their neighbours is one module, with one set of classes; what was not generated along comes from
    the file's own folder.
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
            raise ImportError(f"{file} is no file of Python's, to import it by the name {name}.")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def import_file(file: Path) -> ModuleType:
    """The module of a generated file outside this installation, under a name that follows from its place."""
    location = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:12]
    package = f"{LOCAL_PACKAGE}{location}"  # the folder as a package: the file may import from its neighbours
    know_packages({package: [str(file.parent.resolve())]})
    if "." in file.stem:  # of a model type like kosmos-2.5: no name of a module
        importlib.import_module(package)
        return _import_as(f"{package}.{file.stem.replace('.', '_')}", file)
    return importlib.import_module(f"{package}.{file.stem}")


def local_packages() -> dict[str, list[str]]:
    """The folders that this process imports as packages, by their names: what another one needs to unpickle their classes."""
    return {
        name: list(module.__path__)
        for name, module in sys.modules.items()
        if name.startswith(LOCAL_PACKAGE) and "." not in name
    }


def know_packages(packages: Mapping[str, Sequence[str]]) -> None:
    """Makes folders importable as packages, as `local_packages` gives them."""
    for name, places in packages.items():
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = list(places)


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
        raise FileNotFoundError(f"{directory} holds no generated model: there is no provenance.json.")
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
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{record} is not JSON: {error}. Run `make regen MODEL={directory.name}`.") from error
    except KeyError as error:
        raise ValueError(f"{record} lacks the field {error}. Run `make regen MODEL={directory.name}`.") from error


def generated_models(directory: Path | None = None) -> tuple[GeneratedModel, ...]:
    """The generated models below `directory` (default: those of this installation), by name."""
    root = directory or installed_directory()
    if not root.is_dir():
        raise FileNotFoundError(f"{root} does not exist: there are no generated models. Run `make regen-all`.")
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
    """
    return find_head(config, directory=directory)._from_config(config, **kwargs)


def find_head(config: PreTrainedConfig, *, directory: Path | None = None) -> type[PreTrainedModel]:
    """The generated head whose config class is that of `config`: the first language model in `provenance.json`, else the
    first of the others that were asked for by name."""
    from patchgen.runtime.verify.head_kinds import kind_of

    models = generated_models(directory)
    package = type(config).__module__.rpartition(".")[0]
    for model in models:
        # Imported only where it can be the one: a config class stands beside its modeling file, or names its type.
        if config.model_type not in model.model_types and model.upstream_module.rpartition(".")[0] != package:
            continue
        module = model.load()
        for head in sorted(model.heads, key=lambda name: kind_of(name) is not None):
            if getattr(module, head).config_class is type(config):
                return getattr(module, head)
    what = f"No generated model takes a {type(config).__name__} (model type '{config.model_type}')."
    raise UnknownModelError(_unknown(what, config.model_type, models))


def register_all(directory: Path | None = None) -> tuple[GeneratedModel, ...]:
    """Makes transformers' auto classes build the generated classes, in this process; returns the models.

    `from_config` and `from_pretrained` of the auto classes in `AUTO_CLASSES` are served, for each config that upstream
    serves with a class of the same name. A model of another transformers release than the installed one is left out,
    and named in one warning.

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
                # the mapping's own register: that of the auto class refuses heads of a composite's text config
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
    """The auto mappings, with config class, in which upstream has a class of this name."""
    import transformers
    from transformers.models.auto import modeling_auto

    for auto_class in AUTO_CLASSES:
        mapping = getattr(modeling_auto, auto_class)._model_mapping
        for model_type, served in mapping._model_mapping.items():
            if class_name in ((served,) if isinstance(served, str) else served):
                yield mapping, transformers.CONFIG_MAPPING[model_type]


def _unknown(what: str, name: str, models: tuple[GeneratedModel, ...]) -> str:
    known = {alias: model.name for model in models for alias in (model.name, *model.model_types)}
    nearest = dict.fromkeys(known[alias] for alias in difflib.get_close_matches(name, known, n=3, cutoff=0.4))
    there_are = ", ".join(nearest) or ", ".join(model.name for model in models) or "none at all"
    return f"{what} Nearest of those that exist: {there_are}.\nGenerate it with `make regen MODEL={name}`."
