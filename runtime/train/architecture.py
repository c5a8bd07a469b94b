"""An architecture that transformers does not know: the recipe names its code, and every process registers its classes.

    model:
      source: my_checkpoint                # its config.json says model_type: mine
      code: my_architecture                # the folder that `patchgen generate mine --source my_architecture` read

    my_architecture/configuration_mine.py  --generate-->  generated/mine/configuration_mine.py   AutoConfig
    my_architecture/modeling_mine.py       --generate-->  generated/mine/modeling_mine.py        auto classes of models
    my_architecture/processing_mine.py     -------------------------------------------------->   AutoProcessor, ...

Configuration and models are those of the generated folder, processors and tokenizers those of the code. Which generated
model belongs to the code is decided by the hash of the modeling file that it was made from.
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

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.models.auto.auto_factory import _LazyAutoMapping

CODE_OF_DATA = ("processing_*.py", "tokenization_*.py", "image_processing_*.py", "video_processing_*.py")
CODE_OF_DATA += ("feature_extraction_*.py",)
"""How upstream calls the files whose classes prepare data."""


@dataclass(frozen=True)
class Architecture:
    """The classes of a recipe's own code, registered in this process."""

    folder: Path
    generated: registry.GeneratedModel
    heads: tuple[type[PreTrainedModel], ...]
    root: Path | None = None  # model.generated, whose other models go before those of the installation

    @property
    def names(self) -> str:
        """The model types that it registers."""
        return ", ".join(config.model_type for head in self.heads for config in _own_configs(head.config_class))

    def head(self, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
        """The generated head of a config: the one that it names, else the first that takes its class."""
        taking = [head for head in self.heads if head.config_class is type(config)]
        named = [head for head in taking if head.__name__ in (config.architectures or ())]
        return next(iter(named or taking), None) or (_head_in(self.root, config) if self.root else None)


@dataclass(frozen=True)
class GeneratedFolder:
    """The generated models of a project that has no code of its own: they go before those of the installation."""

    root: Path

    def head(self, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
        """The generated head of a config, if there is one in the folder."""
        return _head_in(self.root, config)


def _head_in(root: Path, config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    try:
        return registry.find_head(config, directory=root)
    except registry.UnknownModelError:
        return None


Heads = Architecture | GeneratedFolder | None
"""What a recipe brings of its own: the heads that go before those of the installation."""


def register(model: ModelConfig) -> Heads:
    """Registers in this process what `model.code` names, once; None where a recipe names neither code nor a folder.

    Raises:
        RecipeError: there is no such folder or module, no generated model was made from it, or it cannot be imported.
    """
    if model.trust_remote_code:
        if model.code is not None:
            raise RecipeError(
                f"model.code = '{model.code}' and model.trust_remote_code both say where code comes from: leave one out."
            )
        folder, module, key = _folder_of_source(model.source), None, "model.trust_remote_code"
    elif model.code is not None:
        folder, module = _find(model.code)
        key = f"model.code = '{model.code}'"
    elif model.generated is not None:
        project.know(_folder_of_models(model.generated))
        return GeneratedFolder(Path(model.generated))
    else:
        return None
    return _register(key, folder, module, model.generated)


def prepare(recipe: Recipe) -> Heads:
    """Registers in this process what a recipe brings of its own: its code, and the rules of its inputs.

    Raises:
        RecipeError: code that cannot be registered, or a rule beside another of the same input.
    """
    found = register(recipe.model)
    try:
        batch_fields.declare(recipe.inputs, "inputs")
    except ValueError as error:
        raise RecipeError(str(error)) from error
    return found


_GENERATED: dict[type, registry.GeneratedModel] = {}
"""Heads of what recipes named -> the generated model, which knows the file that it was made from."""


def generated_of(head: type[PreTrainedModel]) -> registry.GeneratedModel:
    """The generated model that a head belongs to; of code that was registered with the file that it was made from."""
    return _GENERATED.get(head) or registry.read_model(file_of(head).parent)


def file_of(head: type[PreTrainedModel]) -> Path:
    """The file that a head stands in."""
    file = sys.modules[head.__module__].__file__
    assert file is not None, "a head is read from a file"
    return Path(file)


@functools.lru_cache(maxsize=8)
def _register(key: str, folder: Path, module: str | None, root: str | None) -> Architecture:
    if module is not None:
        _imported(key, lambda: importlib.import_module(module), module)
    generated = _generated_from(key, folder, Path(root) if root is not None else None)
    loaded = _imported(key, generated.load, generated.file)
    heads = tuple(getattr(loaded, name) for name in generated.heads)
    found = Architecture(folder, generated, heads, Path(root) if root is not None else None)
    _GENERATED.update(dict.fromkeys(found.heads, generated))
    project.know(generated.directory.parent)
    _register_models(key, found, loaded)
    _register_processing(key, found, module)
    return found


def import_path(model: ModelConfig) -> str | None:
    """The folder from which ranks import the module of `model.code`; None where they find it without being told."""
    if model.code is None or Path(model.code).is_dir():
        return None
    folder, module = _find(model.code)
    assert module is not None, "it names no folder, so it names a module"
    place = folder.parents[module.count(".")] if (folder / "__init__.py").is_file() else folder
    known = [*site.getsitepackages(), site.getusersitepackages()]
    return None if str(place) in known else str(place)


# ---------------------------------------------------------------------------------------------- finding it


def _find(code: str) -> tuple[Path, str | None]:
    """The folder that `model.code` names, and the module that it is imported as; None: it was named as a folder."""
    folder = Path(code)
    if folder.is_dir():
        return folder.resolve(), None
    try:
        spec = importlib.util.find_spec(code) if all(part.isidentifier() for part in code.split(".")) else None
    except ModuleNotFoundError:
        spec = None
    locations = list(spec.submodule_search_locations or ()) if spec is not None else []
    if spec is None or not (spec.origin or locations):
        places = ", ".join(dict.fromkeys(place or "." for place in sys.path))
        raise RecipeError(
            f"model.code = '{code}' is neither a folder ({folder.absolute()}) nor a module that can be imported (looked in "
            f"{places}). Name the folder with configuration_*.py and modeling_*.py."
        )
    place = Path(spec.origin).parent if spec.origin else Path(locations[0])
    return place.resolve(), code


def _folder_of_source(source: str) -> Path:
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


def _generated_from(key: str, folder: Path, root: Path | None) -> registry.GeneratedModel:
    """The generated model in `folder`, or the one among those of `root` that was made from the modeling file there."""
    if (folder / "provenance.json").is_file():
        return registry.read_model(folder)
    sources = sorted(folder.glob("modeling_*.py"))
    if not sources:
        raise RecipeError(
            f"{key}: {folder} holds neither modeling_*.py nor the provenance.json of a generated model; it holds "
            f"{', '.join(sorted(path.name for path in folder.iterdir())[:8]) or 'nothing'}."
        )
    place = registry.installed_directory() if root is None else _folder_of_models(str(root))
    older = []
    for generated in registry.generated_models(place):
        record = json.loads((generated.directory / "provenance.json").read_text(encoding="utf-8"))
        source = generated.made_from(folder)
        if source is not None:
            _require_same_files(key, folder, generated, record["other_sha256"])
            return replace(generated, source=source)
        older += [
            file for file in sources if record["upstream"]["version"] is None and generated.file.name == file.name
        ]
    name = next(iter(older or sources)).stem.removeprefix("modeling_")
    told = "was made from another version of" if older else "was made from"
    raise RecipeError(
        f"{key}: {'the' if older else 'no'} generated model in {place.resolve()} {told} "
        f"{', '.join(map(str, older or sources))}. Make it with `{_command(name, folder, root)}`."
    )


def _folder_of_models(said: str) -> Path:
    if not Path(said).is_dir():
        raise RecipeError(f"model.generated = '{said}' is not a folder ({Path(said).absolute()}).")
    return Path(said)


def _require_same_files(key: str, folder: Path, generated: registry.GeneratedModel, copied: dict[str, str]) -> None:
    """Refuses a generated model whose copies of files of the code are not what stands there now."""
    for name, digest in copied.items():
        if name.endswith(".py") and (folder / name).is_file() and registry.digest(folder / name) != digest:
            command = _command(generated.name, folder, generated.directory.parent)
            raise RecipeError(
                f"{key}: {folder / name} has changed since {generated.directory} was generated, which has a copy of it. "
                f"Make it anew with `{command}`."
            )


def _command(name: str, folder: Path, root: Path | None) -> str:
    return f"patchgen generate {name} --source {folder}" + (f" --output {root}" if root is not None else "")


def _imported(key: str, load: Callable[[], ModuleType], what: Path | str) -> ModuleType:
    try:
        return load()
    except ReleaseMismatch as error:
        raise RecipeError(f"{key}: {error}") from error
    except Exception as error:  # the user's code may raise anything
        raise RecipeError(f"{key}: {what} cannot be imported: {type(error).__name__}: {error}") from error


# ------------------------------------------------------------------------------------------- registering it


def _register_models(key: str, found: Architecture, module: ModuleType) -> None:
    """Configurations of the code's own, the heads that generate, and the first class that runs each configuration."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    classes = [getattr(module, name) for name in found.generated.classes]
    configs = dict.fromkeys(config for head in found.heads for config in _own_configs(head.config_class))
    for config in configs:
        if not config.model_type:
            raise RecipeError(f"{key}: {config.__name__} has no model_type, which is how a config.json names it.")
        AutoConfig.register(config.model_type, config, exist_ok=True)
        runs = [one for one in classes if one.config_class is config and one.forward is not nn.Module.forward]
        inner = next((one for one in runs if one not in found.heads), None)
        outer = next((one for one in runs if one in found.heads and one.can_generate()), None)
        for auto, one in ((AutoModel, inner), (AutoModelForCausalLM, outer)):
            if one is not None:
                auto.register(config, one, exist_ok=True)


def _own_configs(config: object) -> Iterator[type[PreTrainedConfig]]:
    """A configuration class and those of its parts, but for transformers' own."""
    from transformers import PreTrainedConfig

    if not (isinstance(config, type) and issubclass(config, PreTrainedConfig)):
        return  # AutoConfig: whatever the checkpoint says
    if not config.__module__.startswith("transformers."):
        yield config
    # transformers' classproperty is a dict of the class, which its type does not say.
    for part in (config.sub_configs or {}).values():  # pyright: ignore[reportAttributeAccessIssue]
        yield from _own_configs(part)


def _register_processing(key: str, found: Architecture, module: str | None) -> None:
    """Processors, tokenizers and their like of the code, for the first head's configuration.

    A checkpoint names its processor, which is then found by that name. Of two of a kind the code itself must register
    one, in the `__init__.py` of a module: nothing else says which belongs to the configuration.
    """
    config = found.heads[0].config_class
    assert config is not None, "a generated head names its configuration"
    by_kind: dict[type | None, list[type]] = {}  # None: of no kind
    for file in dict.fromkeys(file for pattern in CODE_OF_DATA for file in sorted(found.folder.glob(pattern))):
        load = functools.partial(registry.import_file, file)
        if module is not None and (found.folder / "__init__.py").is_file():
            load = functools.partial(importlib.import_module, f"{module}.{file.stem}")
        loaded = _imported(key, load, file)
        for one in vars(loaded).values():
            if isinstance(one, type) and one.__module__ == loaded.__name__:
                kind = next((kind for kind in _kinds() if issubclass(one, kind)), None)
                by_kind.setdefault(kind, []).append(one)
    for kind, (known, register_one) in _kinds().items():
        classes = by_kind.get(kind, [])
        if len(classes) > 1 and not any(one in _registered(known) for one in classes):
            names = ", ".join(one.__name__ for one in classes)
            raise RecipeError(
                f"{key}: {names} of {found.folder} are of one kind, and nothing says which belongs to "
                f"{config.__name__}. Name a module whose __init__.py registers it."
            )
        if len(classes) == 1:
            register_one(config, classes[0])


@functools.cache
def _kinds() -> dict[type, tuple[_LazyAutoMapping, Callable[[type, type], None]]]:
    """What prepares data, the narrower kind first: its base, the mapping of its auto class, how it gets there."""
    import transformers
    from transformers.image_processing_backends import PilBackend, TorchvisionBackend
    from transformers.models.auto import (
        feature_extraction_auto,
        image_processing_auto,
        processing_auto,
        tokenization_auto,
        video_processing_auto,
    )
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    def image(config: type, one: type) -> None:
        needed = {"pil": PilBackend, "torchvision": TorchvisionBackend}
        own = [
            name for name, backend in needed.items() if issubclass(one, backend)
        ] or needed  # of neither: needs none
        image_processing_auto.AutoImageProcessor.register(
            config, image_processor_classes=dict.fromkeys(own, one), exist_ok=True
        )

    return {
        transformers.ProcessorMixin: (
            processing_auto.PROCESSOR_MAPPING,
            functools.partial(processing_auto.AutoProcessor.register, exist_ok=True),
        ),
        PreTrainedTokenizerBase: (
            tokenization_auto.TOKENIZER_MAPPING,
            functools.partial(tokenization_auto.AutoTokenizer.register, exist_ok=True),
        ),
        transformers.BaseVideoProcessor: (
            video_processing_auto.VIDEO_PROCESSOR_MAPPING,
            functools.partial(video_processing_auto.AutoVideoProcessor.register, exist_ok=True),
        ),
        transformers.BaseImageProcessor: (image_processing_auto.IMAGE_PROCESSOR_MAPPING, image),
        transformers.FeatureExtractionMixin: (
            feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING,
            functools.partial(feature_extraction_auto.AutoFeatureExtractor.register, exist_ok=True),
        ),
    }


def _registered(mapping: _LazyAutoMapping) -> set[type]:
    """The classes that somebody has added to one of transformers' mappings."""
    added = mapping._extra_content.values()
    return {one for value in added for one in (value.values() if isinstance(value, dict) else [value])}
