"""Custom architectures, unknown to transformers: the recipe names their code, and every process registers their classes.

    model:
      source: my_checkpoint                # its config.json says model_type: mine
      code: my_architecture                # the folder that `patchgen generate mine --source my_architecture` read

    my_architecture/configuration_mine.py  --generate-->  generated/mine/configuration_mine.py   AutoConfig
    my_architecture/modeling_mine.py       --generate-->  generated/mine/modeling_mine.py        auto classes of models
    my_architecture/processing_mine.py     -------------------------------------------------->   AutoProcessor, ...

Configuration and models come from the generated folder, processors and tokenizers from the code folder. The generated model
that belongs to the code is found by the hash of the modeling file it was generated from.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import site
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from torch import nn

from patchgen.runtime import project, registry
from patchgen.runtime.compatibility import ReleaseMismatch
from patchgen.runtime.parallel import batch_fields
from patchgen.runtime.train.recipe import ModelConfig, Recipe, RecipeError
from patchgen.runtime.verify.verdict import one_line_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _LazyAutoMapping

PROCESSING_FILES = ("processing_*.py", "tokenization_*.py", "image_processing_*.py", "video_processing_*.py")
PROCESSING_FILES += ("feature_extraction_*.py",)
"""Upstream's names for the files whose classes prepare data."""


@dataclass(frozen=True)
class Architecture:
    """The classes of a recipe's custom code, registered in this process."""

    folder: Path
    generated: registry.GeneratedModel
    heads: tuple[type[PreTrainedModel], ...]
    root: Path | None = None  # the folder model.generated; its other models take precedence over the installed ones

    @property
    def model_types(self) -> str:
        """The registered model types, comma-separated."""
        return ", ".join(config.model_type for head in self.heads for config in _custom_configs(head.config_class))

    def head(self, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
        """The generated head of a config: the one named in `config.architectures`, else the first that takes the config's
        class, else one in `root`; None: there is none."""
        accepting = [head for head in self.heads if head.config_class is type(config)]
        named = [head for head in accepting if head.__name__ in (config.architectures or ())]
        return next(iter(named or accepting), None) or (_find_head(self.root, config) if self.root else None)


@dataclass(frozen=True)
class GeneratedFolder:
    """A project's generated models, without custom code; they take precedence over the installed ones."""

    root: Path

    def head(self, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
        """The generated head of a config, or None if the folder has none."""
        return _find_head(self.root, config)


def _find_head(root: Path, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    try:
        return registry.find_head(config, directory=root)
    except registry.UnknownModelError:
        return None


RecipeHeads = Architecture | GeneratedFolder | None
"""Heads that a recipe provides itself; they take precedence over the installed ones."""


def register(model: ModelConfig) -> RecipeHeads:
    """Registers the code that a recipe's model names, once per process; None if it names neither code nor `generated`.

    Raises:
        RecipeError: the folder or module does not exist, no model was generated from it, or it cannot be imported; or the
            recipe sets both `code` and `trust_remote_code`.
    """
    if model.trust_remote_code:
        if model.code is not None:
            raise RecipeError(
                f"model.code = '{model.code}' and model.trust_remote_code both say where code comes from: leave one out."
            )
        folder, module, setting = _source_folder(model.source), None, "model.trust_remote_code"
    elif model.code is not None:
        folder, module = _find_code(model.code)
        setting = f"model.code = '{model.code}'"
    elif model.generated is not None:
        project.add_models(_models_folder(model.generated))
        return GeneratedFolder(Path(model.generated))
    else:
        return None
    return _register(setting, folder, module, model.generated)


def prepare(recipe: Recipe) -> RecipeHeads:
    """Registers a recipe's custom code and the rules of its inputs in this process.

    Raises:
        RecipeError: the code cannot be registered, or an input already has a different rule.
    """
    heads = register(recipe.model)
    try:
        batch_fields.declare(recipe.inputs, "inputs")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return heads


_GENERATED: dict[type, registry.GeneratedModel] = {}
"""Head of a registered architecture -> its generated model, with the source file it was generated from."""


def generated_model_of(head: type[PreTrainedModel]) -> registry.GeneratedModel:
    """The generated model that a head belongs to; its source file is known if it was registered from code."""
    return _GENERATED.get(head) or registry.read_model(file_of(head).parent)


def file_of(head: type[PreTrainedModel]) -> Path:
    """The file that defines a head."""
    file = sys.modules[head.__module__].__file__
    assert file is not None, "a head is imported from a file"
    return Path(file)


@functools.lru_cache(maxsize=8)
def _register(setting: str, folder: Path, module: str | None, root: str | None) -> Architecture:
    if module is not None:
        _import(setting, lambda: importlib.import_module(module), module)
    generated = _generated_from(setting, folder, Path(root) if root is not None else None)
    loaded = _import(setting, generated.load, generated.file)
    heads = tuple(getattr(loaded, name) for name in generated.heads)
    architecture = Architecture(folder, generated, heads, Path(root) if root is not None else None)
    _GENERATED.update(dict.fromkeys(heads, generated))
    project.add_models(generated.directory.parent)
    _register_models(setting, architecture, loaded)
    _register_processing(setting, architecture, module)
    return architecture


def import_path(model: ModelConfig) -> str | None:
    """The folder that ranks need on their path to import the module `model.code`; None: the module is installed, or the recipe
    names none."""
    if model.code is None or Path(model.code).is_dir():
        return None
    import_root = _find_module(model.code)[0].parents[model.code.count(".")]
    site_folders = [*site.getsitepackages(), site.getusersitepackages()]
    return None if str(import_root) in site_folders else str(import_root)


# --------------------------------------------------------------------------------------- finding the code


def _find_code(code: str) -> tuple[Path, str | None]:
    """The folder that `model.code` names, and its module name; None if it was given as a folder."""
    folder = Path(code)
    if folder.is_dir():
        return folder.resolve(), None
    path, is_package = _find_module(code)
    return (path if is_package else path.parent).resolve(), code


def _find_module(code: str) -> tuple[Path, bool]:
    """The file of the module that `model.code` names, or the folder of a package, with or without `__init__.py`; and whether it
    is a package.

    Raises:
        RecipeError: it cannot be imported.
    """
    try:
        spec = importlib.util.find_spec(code) if all(part.isidentifier() for part in code.split(".")) else None
    except ModuleNotFoundError:
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is None or not (spec.origin or locations):
        searched = ", ".join(dict.fromkeys(entry or "." for entry in sys.path))
        raise RecipeError(
            f"model.code = '{code}' is neither a folder ({Path(code).absolute()}) nor a module that can be imported (looked in "
            f"{searched}). Name the folder with configuration_*.py and modeling_*.py."
        )
    return Path(locations[0] if locations else spec.origin or "").absolute(), bool(locations)


def _source_folder(source: str) -> Path:
    """The folder `model.source`, or the code and configs downloaded from the Hub."""
    if Path(source).is_dir():
        return Path(source).resolve()
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=["*.py", "*.json"])).resolve()
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise RecipeError(
            f"model.trust_remote_code: model.source = '{source}' is neither a folder ({Path(source).absolute()}) nor a model on "
            f"the Hub that can be reached, so there is no code to run.\n{error}"
        ) from error


def _generated_from(setting: str, folder: Path, root: Path | None) -> registry.GeneratedModel:
    """The generated model in `folder`, or the one in `root` that was generated from the modeling file in `folder`."""
    if (folder / "provenance.json").is_file():
        return registry.read_model(folder)
    sources = sorted(folder.glob("modeling_*.py"))
    if not sources:
        raise RecipeError(
            f"{setting}: {folder} has neither modeling_*.py nor the provenance.json of a generated model; it contains "
            f"{', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}."
        )
    models_folder = registry.installed_directory() if root is None else _models_folder(str(root))
    outdated = []
    for generated in registry.generated_models(models_folder):
        record = json.loads((generated.directory / "provenance.json").read_text(encoding="utf-8"))
        source = generated.find_source(folder)
        if source is not None:
            _require_same_files(setting, folder, generated, record["other_sha256"])
            return replace(generated, source=source)
        outdated += [
            file for file in sources if record["upstream"]["version"] is None and generated.file.name == file.name
        ]
    name = next(iter(outdated or sources)).stem.removeprefix("modeling_")
    relation = "was made from another version of" if outdated else "was made from"
    raise RecipeError(
        f"{setting}: {'the' if outdated else 'no'} generated model in {models_folder.resolve()} {relation} "
        f"{', '.join(map(str, outdated or sources))}. Make it with `{_generate_command(name, folder, root)}`."
    )


def _models_folder(generated: str) -> Path:
    if not Path(generated).is_dir():
        raise RecipeError(f"model.generated = '{generated}' is not a folder ({Path(generated).absolute()}).")
    return Path(generated)


def _require_same_files(
    setting: str, folder: Path, generated: registry.GeneratedModel, copied: dict[str, str]
) -> None:
    """Refuses a generated model whose copies of the code's files differ from the files now in `folder`."""
    for name, digest in copied.items():
        if name.endswith(".py") and (folder / name).is_file() and registry.digest(folder / name) != digest:
            command = _generate_command(generated.name, folder, generated.directory.parent)
            raise RecipeError(
                f"{setting}: {folder / name} has changed since {generated.directory} was generated, which has a copy of it. "
                f"Generate it again with `{command}`."
            )


def _generate_command(name: str, folder: Path, root: Path | None) -> str:
    return f"patchgen generate {name} --source {folder}" + (f" --output {root}" if root is not None else "")


def _import(setting: str, load: Callable[[], ModuleType], name: Path | str) -> ModuleType:
    try:
        return load()
    except ReleaseMismatch as error:
        raise RecipeError(f"{setting}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"{setting}: {name} cannot be imported: {one_line_error(error)}") from error


# ------------------------------------------------------------------------------------- registering the classes


def _register_models(setting: str, architecture: Architecture, module: ModuleType) -> None:
    """Registers the custom configurations, and for each the first base model and the first generative head that take it."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    classes = [getattr(module, name) for name in architecture.generated.classes]
    configs = dict.fromkeys(config for head in architecture.heads for config in _custom_configs(head.config_class))
    for config in configs:
        if not config.model_type:
            raise RecipeError(f"{setting}: {config.__name__} has no model_type, which is how a config.json names it.")
        AutoConfig.register(config.model_type, config, exist_ok=True)
        runnable = [cls for cls in classes if cls.config_class is config and cls.forward is not nn.Module.forward]
        base = next((cls for cls in runnable if cls not in architecture.heads), None)
        causal = next((cls for cls in runnable if cls in architecture.heads and cls.can_generate()), None)
        for auto, cls in ((AutoModel, base), (AutoModelForCausalLM, causal)):
            if cls is not None:
                auto.register(config, cls, exist_ok=True)


def _custom_configs(config: object) -> Iterator[type[PreTrainedConfig]]:
    """A configuration class and its sub-configurations, without those of transformers itself."""
    from transformers import PreTrainedConfig

    if not (isinstance(config, type) and issubclass(config, PreTrainedConfig)):
        return  # AutoConfig: decided by the checkpoint
    if not config.__module__.startswith("transformers."):
        yield config
    # A classproperty of transformers: a dict on the class, which its type does not show.
    for part in (config.sub_configs or {}).values():  # pyright: ignore[reportAttributeAccessIssue]
        yield from _custom_configs(part)


def _register_processing(setting: str, architecture: Architecture, module: str | None) -> None:
    """Registers the code's processors, tokenizers and similar classes for the configuration of the first head.

    Checkpoints find their processor by its class name. If there are two classes of one kind, the code must register one
    in its package's `__init__.py`: nothing else decides which belongs to the configuration.
    """
    config = architecture.heads[0].config_class
    if config is None:
        raise RecipeError(
            f"{setting}: {architecture.heads[0].__name__}.config_class is None, so nothing says which configuration it is built "
            "from. Write `config_class = MyConfig` in it, or in a class that it inherits from, and generate again."
        )
    by_kind: dict[type | None, list[type]] = {}  # None: no processing class
    for file in dict.fromkeys(
        file for pattern in PROCESSING_FILES for file in sorted(architecture.folder.glob(pattern))
    ):
        load = functools.partial(registry.import_file, file)
        if module is not None and (architecture.folder / "__init__.py").is_file():
            load = functools.partial(importlib.import_module, f"{module}.{file.stem}")
        loaded = _import(setting, load, file)
        for cls in vars(loaded).values():
            if isinstance(cls, type) and cls.__module__ == loaded.__name__:
                kind = next((kind for kind in _processing_kinds() if issubclass(cls, kind)), None)
                by_kind.setdefault(kind, []).append(cls)
    for kind, (mapping, register_class) in _processing_kinds().items():
        classes = by_kind.get(kind, [])
        if len(classes) > 1 and not any(cls in _added_classes(mapping) for cls in classes):
            names = ", ".join(cls.__name__ for cls in classes)
            raise RecipeError(
                f"{setting}: {names} of {architecture.folder} are of the same kind, and nothing says which belongs to "
                f"{config.__name__}. Set model.code to a package whose __init__.py registers it."
            )
        if len(classes) == 1:
            register_class(config, classes[0], exist_ok=True)


@functools.cache
def _processing_kinds() -> dict[type, tuple[_LazyAutoMapping, Callable[..., None]]]:
    """Base class, narrower ones first -> the mapping of its auto class, and the function that adds a class to it."""
    import transformers as hf
    from transformers.image_processing_backends import PilBackend, TorchvisionBackend
    from transformers.models.auto.video_processing_auto import VIDEO_PROCESSOR_MAPPING, AutoVideoProcessor

    def register_image_processor(config: type, cls: type, exist_ok: bool) -> None:
        backends = {"pil": PilBackend, "torchvision": TorchvisionBackend}
        names = [name for name, backend in backends.items() if issubclass(cls, backend)] or backends
        hf.AutoImageProcessor.register(config, image_processor_classes=dict.fromkeys(names, cls), exist_ok=exist_ok)

    return {
        hf.ProcessorMixin: (hf.PROCESSOR_MAPPING, hf.AutoProcessor.register),
        hf.PreTrainedTokenizerBase: (hf.TOKENIZER_MAPPING, hf.AutoTokenizer.register),
        hf.BaseVideoProcessor: (VIDEO_PROCESSOR_MAPPING, AutoVideoProcessor.register),
        hf.BaseImageProcessor: (hf.IMAGE_PROCESSOR_MAPPING, register_image_processor),
        hf.FeatureExtractionMixin: (hf.FEATURE_EXTRACTOR_MAPPING, hf.AutoFeatureExtractor.register),
    }


def _added_classes(mapping: _LazyAutoMapping) -> set[type]:
    """The classes that were added to one of transformers' mappings at run time."""
    added = mapping._extra_content.values()
    return {cls for value in added for cls in (value.values() if isinstance(value, dict) else [value])}
