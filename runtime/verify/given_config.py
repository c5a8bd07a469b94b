"""Values that a user gives the small config of one generated model: `small_config.json` beside its file.

    patchgen verify my_moe --set num_key_value_heads=4 --set text_config.hidden_size=96
    patchgen verify my_moe --config checkpoint/config.json

    {"config": {...}, "set": {"num_key_value_heads": 4, "text_config": {"hidden_size": 96}}}

`config` is the content of a `config.json`, which is made small as the config of a run is (`shrink.py`); without it the small
config is derived from the defaults of the class. The values of `set` stay as they are in what `verify` compares, in one process and
on ranks. The small form of a run's config takes their sizes alone: its options are the run's own.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from patchgen.runtime.checkpoint.quantised import without_quantisation
from patchgen.runtime.verify import shrink
from patchgen.runtime.verify.small_config import REFUSALS, VARIANTS, SmallConfig, SmallConfigError, small_config

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FILE_NAME = "small_config.json"


@dataclass(frozen=True)
class GivenConfig:
    """What `small_config.json` holds; empty: small configs are derived from their classes alone."""

    config: Mapping[str, Any] = field(default_factory=dict)
    exact: Mapping[str, Any] = field(default_factory=dict)

    def small_config(self, config_class: type[PreTrainedConfig], *, variant: str = "base") -> SmallConfig:
        """As `small_config.small_config`, from the given values.

        Raises:
            SmallConfigError: the class refuses them.
        """
        exact = copy.deepcopy(dict(self.exact))  # some classes fill dictionaries in that they are given
        if not self.config:
            return small_config(config_class, variant=variant, exact=exact)
        named = self.config.get("model_type", config_class.model_type)
        try:
            if named != config_class.model_type:
                raise ValueError(f"the config given is of model_type {named!r}, not {config_class.model_type!r}")
            config = config_class.from_dict(without_quantisation(copy.deepcopy(dict(self.config))))
        except REFUSALS as error:
            raise SmallConfigError(config_class, self.config, error) from error
        return shrink.shrink(config, VARIANTS[variant], exact=exact)

    def shrink(self, config: PreTrainedConfig) -> SmallConfig:
        """The small form of a run's config, as `shrink.shrink`, with the sizes among the values of `exact`: whole numbers, and
        lists of them, in place of such. Any other value would be an option that the run does not have."""
        return shrink.shrink(config, exact=_sizes(self.exact, config))


def _sizes(values: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in values.items():
        own = getattr(config, name, None)
        if name in config.sub_configs:
            if own is not None:
                kept[name] = _sizes(value, own)
        elif _is_size(value) and _is_size(own):
            kept[name] = copy.copy(value)
    return kept


def _is_size(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and bool(value) and all(type(item) is int for item in value))


def read(directory: Path) -> GivenConfig:
    """The values given for the model that was generated into a folder."""
    path = directory / FILE_NAME
    if not path.is_file():
        return GivenConfig()
    text = path.read_text(encoding="utf-8")
    try:
        content = json.loads(text)
    except ValueError:
        content = None
    parts: dict[str, Any] = content if isinstance(content, dict) else {"": content}
    if not {*parts} <= {"config", "set"} or not all(isinstance(values, dict) for values in parts.values()):
        raise ValueError(
            f'{path}: expected {{"config": {{...}}, "set": {{...}}}}, found {text.strip()[:200]}. To fix: delete it.'
        )
    return GivenConfig(parts.get("config", {}), parts.get("set", {}))


def of_class(generated_class: type) -> GivenConfig:
    """The values given for the model whose generated file defines a class."""
    return read(Path(inspect.getfile(generated_class)).parent)


def write(directory: Path, config: Path | None, settings: Sequence[str]) -> Path:
    """Writes the values of `--config` and `--set` and returns the file's path; those that it has for other fields are kept.

    Args:
        config: a `config.json`; None: that of an earlier call, or the defaults of the class.
        settings: `field=value`, the value in YAML; `part.field=value` for a sub-config.

    Raises:
        ValueError: a setting is not of that form, or the file is no JSON object.
    """
    before = read(directory)
    content: dict[str, Any] = {
        name: copy.deepcopy(dict(value)) for name, value in (("config", before.config), ("set", before.exact)) if value
    }
    if config is not None:
        values = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError(f"{config}: expected a config.json with an object, found {type(values).__name__}.")
        content["config"] = values
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator or not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"--set {setting}: expected field=value, as in --set num_key_value_heads=4.")
        place = content.setdefault("set", {})
        *parts, last = name.split(".")
        for part in parts:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise ValueError(f"--set {setting}: {part} has the value {place!r}, and no fields.")
        try:
            place[last] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ValueError(f"--set {setting}: the value is no YAML: {' '.join(str(error).split())}") from error
    path = directory / FILE_NAME
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return path
