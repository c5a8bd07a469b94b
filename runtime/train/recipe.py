"""A recipe: everything that defines a training run, as frozen, validated dataclasses.

    recipe = load(Path("recipes/qwen3_moe_toy.yaml"), {"parallel.ep": "2"})      # YAML and --set
    recipe = Recipe(model=ModelConfig(source="qwen3_moe"), data=DataConfig(...))  # or the same in Python
    print(to_yaml(recipe))                                                        # with every default

An unknown key is refused with the nearest known one; a value out of range is refused with the range.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from patchgen.runtime import project
from patchgen.runtime.data import DataConfig
from patchgen.runtime.data.config import BUILTIN, format_of_name
from patchgen.runtime.parallel.batch_fields import FieldRule
from patchgen.runtime.train.sections import (
    STRICT,
    CheckpointConfig,
    Fp8Config,
    KernelsConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    ParallelSection,
    RouterBiasConfig,
    TrainConfig,
)


class RecipeError(ValueError):
    """A recipe that cannot be used: an unknown key, a value of the wrong type or out of range, a contradiction."""


@dataclass(frozen=True, config=STRICT)
class Recipe:
    """A complete recipe.

    Attributes:
        model: what is trained.
        data: what it is trained on.
        parallel: how ranks share the work.
        kernels: which implementation serves each seam.
        objective: the training objective.
        optim: the optimizer.
        train: the loop.
        checkpoint: what is saved.
        log: what is recorded.
        lora: null, or the adapters that are trained instead of the whole model.
        teacher: null, or the model that the objective learns from; it has the keys of `model`.
        eval_data: null, or the data of evaluations, read once unless its `epochs` is set.
        inputs: name -> packing rule, for model inputs of a custom processor or transform that have no built-in rule.
        name: of the run; by default that of the recipe's file.
    """

    model: ModelConfig
    data: DataConfig
    parallel: ParallelSection = Field(default_factory=ParallelSection)
    kernels: KernelsConfig = Field(default_factory=KernelsConfig)
    objective: ObjectiveConfig = Field(default_factory=ObjectiveConfig)
    optim: OptimConfig = Field(default_factory=OptimConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)
    lora: LoraConfig | None = None
    teacher: ModelConfig | None = None
    eval_data: DataConfig | None = None
    inputs: dict[str, FieldRule] = Field(default_factory=dict)
    name: str = "run"

    def __post_init__(self) -> None:
        optim, train = self.optim, self.train
        phases = ("warmup_steps", "decay_steps") if optim.schedule == "wsd" else ("warmup_steps",)
        if sum(getattr(optim, name) for name in phases) > train.steps:
            raise ValueError(
                f"{' and '.join(f'optim.{name}={getattr(optim, name)}' for name in phases)} are more than "
                f"train.steps={train.steps}. To fix: lower them, or raise train.steps."
            )
        if optim.schedule == "wsd" and not optim.decay_steps:
            raise ValueError(
                "optim.schedule 'wsd' needs optim.decay_steps: at 0 it never decays. To fix: set it, or use 'constant'."
            )
        if optim.decay_steps and optim.schedule != "wsd":
            raise ValueError(f"optim.decay_steps is for schedule 'wsd'; '{optim.schedule}' would ignore it.")
        if optim.name != "muon":
            for name in ("muon_lr", "momentum", "muon_experts", "muon_by_head"):
                if getattr(optim, name) != getattr(OptimConfig, name):
                    raise ValueError(f"optim.{name} is for optimizer 'muon'; '{optim.name}' would ignore it.")
        if train.profile_start != TrainConfig.profile_start and not train.profile_steps:
            raise ValueError("train.profile_start is set, but train.profile_steps is 0: nothing would be profiled.")
        if train.profile_steps and train.profile_start > train.steps:
            raise ValueError(
                f"train.profile_start={train.profile_start} is after the last of train.steps={train.steps}: nothing would be "
                "profiled. To fix: start the profile earlier, or set train.profile_steps to 0."
            )
        if train.fp8 != Fp8Config() and train.precision is None:
            raise ValueError("train.fp8 is set, but train.precision is not fp8: it would have no effect.")
        if train.router_bias != RouterBiasConfig() and train.router_balance != "bias":
            raise ValueError(
                "train.router_bias is set, but train.router_balance is not bias: it would have no effect. To fix: set "
                "train.router_balance: bias, or remove it."
            )
        if train.router_balance == "bias" and self.lora is not None:
            raise ValueError(
                "train.router_balance: bias moves a tensor of the model, and with lora only adapters are saved. To fix: remove "
                "one of them."
            )
        if train.eval_every and self.eval_data is None:
            raise ValueError("train.eval_every is set, but there is no section eval_data to read from.")
        for name, value in (("train.patience", train.patience), ("checkpoint.keep_best", self.checkpoint.keep_best)):
            if value and not train.eval_every:
                raise ValueError(
                    f"{name} asks for evaluations during the run. To fix: set train.eval_every, and eval_data."
                )
        if train.prompts and self.eval_data is None:
            raise ValueError(
                "train.prompts are continued at evaluations. To fix: add a section eval_data, or remove them."
            )
        if train.prompts and train.cuda_graph:
            raise ValueError(
                "train.prompts have other shapes than a step, which train.cuda_graph replays. To fix: remove one of them."
            )
        if self.checkpoint.export == "best" and not self.checkpoint.keep_best:
            raise ValueError(
                "checkpoint.export: best needs the best step's checkpoint. To fix: set checkpoint.keep_best: true."
            )

    @property
    def evaluation_data(self) -> DataConfig | None:
        """`eval_data`, read once unless it sets `epochs`: a second pass over a small set would count some samples twice."""
        if self.eval_data is None or self.eval_data.epochs is not None:
            return self.eval_data
        return dataclasses.replace(self.eval_data, epochs=1)

    def without_evaluation(self) -> Recipe:
        """The recipe for some steps alone: no evaluation, and nothing that follows from one."""
        train = dataclasses.replace(self.train, eval_every=0, patience=0, prompts=())
        export = bool(self.checkpoint.export)
        checkpoint = dataclasses.replace(self.checkpoint, keep_best=False, export=export)
        return dataclasses.replace(self, eval_data=None, train=train, checkpoint=checkpoint)

    @property
    def has_media(self) -> bool:
        """Whether the run trains or evaluates on multimodal data."""
        return any(data is not None and data.kind == "multimodal" for data in (self.data, self.eval_data))

    @property
    def directory(self) -> Path:
        """The folder of the run."""
        return Path(self.log.directory or f"runs/{self.name}")


def reads_hub(recipe: Recipe) -> bool:
    """Whether a model or data of the recipe may be on the Hub: they are neither here nor a type or set that needs no files."""
    from transformers import CONFIG_MAPPING

    models = [one.source for one in (recipe.model, recipe.teacher) if one is not None]
    sources = [source for data in (recipe.data, recipe.eval_data) if data is not None for source in data.sources]
    return any(name not in CONFIG_MAPPING and not Path(name).expanduser().exists() for name in models) or any(
        not source.path.startswith(BUILTIN)
        and source.format in ("auto", "datasets")
        and format_of_name(Path(source.path)) is None
        and not Path(source.path).expanduser().exists()
        for source in sources
    )


# --------------------------------------------------------------------------------------------- reading


def load(path: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a YAML file.

    Args:
        overrides: dotted key -> value; strings are read as YAML, so "2" is a number and "null" is None.

    Raises:
        RecipeError: with every problem that was found, one per line.
    """
    if not path.is_file():
        near = sorted(str(other) for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
        raise RecipeError(f"There is no recipe {path}." + (f" In that folder: {', '.join(near)}." if near else ""))
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeyLoader) or {}
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is not a text in UTF-8: {error.reason} at byte {error.start}. To fix: save it in UTF-8."
        ) from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        names = ", ".join(field.name for field in dataclasses.fields(Recipe))
        raise RecipeError(f"{path} must contain sections ({names}), not a {type(values).__name__}.")
    values.setdefault("name", path.stem)
    for key, value in (overrides or {}).items():
        try:
            set_at(values, key, _parse(key, value) if isinstance(value, str) else value)
        except LookupError as error:
            raise RecipeError(f"--set {key}: {error.args[0]}") from error
    if isinstance(model := values.get("model"), dict) and not model.keys() & {"code", "trust_remote_code"}:
        try:
            values["model"] = project.model_settings() | model
        except ValueError as error:
            raise RecipeError(str(error)) from error
    return from_dict(values, where=str(path))


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicated keys, of which a plain loader silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and not key.tag.endswith(":merge")]
        for index, key in enumerate(keys):
            if key.value in {other.value for other in keys[:index]}:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key.value}' is duplicated", key.start_mark
                )
        return super().construct_mapping(node, deep)


def _parse(key: str, text: str) -> Any:
    try:
        return yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"--set {key}: '{text}' is not YAML: {error}\nTo fix: quote text that YAML would read as something "
            f"else, and the argument for the shell: --set '{key}=\"TEXT\"', in a list --set '{key}=[\"TEXT\"]'."
        ) from error


def from_dict(values: Mapping[str, Any], *, where: str = "recipe") -> Recipe:
    """The recipe from nested dicts, as `to_dict` returns them."""
    try:
        recipe = TypeAdapter(Recipe).validate_python(values)
    except ValidationError as error:
        problems = [*map(_explain, error.errors()), *_booleans_for_numbers(values, Recipe)]
        raise RecipeError("\n  ".join([f"{where} has {len(problems)} problem(s):", *problems])) from error
    if problems := list(_booleans_as_numbers(values, recipe)):
        raise RecipeError("\n  ".join([f"{where} has {len(problems)} problem(s):", *problems]))
    return recipe


def _booleans_for_numbers(value: Any, kind: Any, path: str = "") -> Iterator[str]:
    """The problems that `_booleans_as_numbers` finds, in values that pydantic refuses as a whole: it validates each key alone.

    Args:
        kind: the annotation of `value`.
    """
    section, origin = section_type(kind), typing.get_origin(kind)
    if section is None:
        try:
            validated = TypeAdapter(kind).validate_python(value)
        except ValidationError:
            return  # among pydantic's own problems
        yield from _booleans_as_numbers(value, validated, path)
        return
    inner: Iterable[tuple[Any, Any, Any]] = ()  # key or index, value, annotation
    if isinstance(value, list | tuple) and origin in (tuple, list):
        inner = ((index, item, section) for index, item in enumerate(value))
    elif isinstance(value, Mapping) and origin is dict:
        inner = ((key, item, section) for key, item in value.items())
    elif isinstance(value, Mapping):
        kinds = typing.get_type_hints(section, include_extras=True)
        inner = ((key, item, kinds[key]) for key, item in value.items() if key in kinds)
    for key, item, annotation in inner:
        yield from _booleans_for_numbers(item, annotation, f"{path}.{key}" if path else str(key))


def _booleans_as_numbers(value: Any, validated: Any, path: str = "") -> Iterator[str]:
    """The problems of keys with `true` or `false` where a number is expected: pydantic takes them as 1 and 0.

    Args:
        validated: what pydantic made of `value`.
    """
    if isinstance(value, Mapping):
        for key, inner in value.items():
            inner_validated = validated.get(key) if isinstance(validated, Mapping) else getattr(validated, key)
            yield from _booleans_as_numbers(inner, inner_validated, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for index, pair in enumerate(zip(value, validated, strict=True)):
            yield from _booleans_as_numbers(*pair, f"{path}.{index}")
    elif isinstance(value, bool) and isinstance(validated, int | float) and not isinstance(validated, bool):
        yield f"{path}: input should be a valid number, not {value}."


def parse_overrides(assignments: list[str]) -> dict[str, str]:
    """Dotted key -> text, from the `key=value` arguments of `--set`."""
    overrides = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise RecipeError(f"--set takes key=value, for example parallel.ep=2, not '{assignment}'.")
        overrides[key.strip()] = value
    return overrides


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """Nested dicts of plain values, every default included."""
    return TypeAdapter(Recipe).dump_python(recipe, mode="json")


def to_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, every default included; `load` reads it back."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False)


YAML_MESSAGES = {
    "tuple_type": "input should be a list",
    "dataclass_type": "input should be a mapping of keys to values",
    "dict_type": "input should be a mapping of keys to values",
}
"""Type of a pydantic error -> its message in terms of YAML, where pydantic's own names Python types."""


def _explain(problem: Mapping[str, Any]) -> str:
    """One of pydantic's errors as a sentence: where, what is wrong, what to write instead."""
    path = [str(part) for part in problem["loc"]]
    where = ".".join(path) or "the recipe"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        keys = dict(all_keys())
        parent = _parent(path, keys)
        siblings = [key.rpartition(".")[2] for key in keys if key.rpartition(".")[0] == parent]
        elsewhere = [key for key in keys if key.rpartition(".")[2] == path[-1]]
        nearest = difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.75) or elsewhere[:1]
        nearest = nearest or difflib.get_close_matches(path[-1], siblings, n=1, cutoff=0.5)
        hint = f" Did you mean {nearest[0]}?" if nearest else f" Known keys: {', '.join(siblings)}."
        return f"{where}: no such key.{hint}"
    if problem["type"] in ("missing", "missing_argument"):
        return f"{where}: required."
    if problem["type"] == "value_error":
        return f"{where}: {problem['ctx']['error']}" if path else str(problem["ctx"]["error"])
    message = YAML_MESSAGES.get(problem["type"]) or problem["msg"][0].lower() + problem["msg"][1:]
    keys = dict(all_keys())
    parent = _parent(path, keys)
    accepting = [
        key
        for key, kind in keys.items()
        if key.rpartition(".")[0] == parent and problem["input"] in typing.get_args(kind)
    ]
    return f"{where}: {message}, not {problem['input']!r}." + (f" {accepting[0]} takes it." if accepting else "")


def _parent(path: list[str], keys: Collection[str]) -> str:
    """The section that a key is in, written as in `all_keys`."""
    parts: list[str] = []
    for part in path[:-1]:
        is_dict_key = any(key.startswith(".".join([*parts, "NAME", ""])) for key in keys)
        parts.append("NAME" if is_dict_key else "0" if part.isdigit() else part)
    return ".".join(parts)


# ------------------------------------------------------------------------------------- reading the types


def all_keys() -> Iterator[tuple[str, Any]]:
    """Every dotted key of a recipe with its annotation; `0` stands for any list index, `NAME` for any dict key."""

    def walk(kind: type, prefix: str) -> Iterator[tuple[str, Any]]:
        for name, annotation in typing.get_type_hints(kind, include_extras=True).items():
            yield prefix + name, annotation
            inner = section_type(annotation)
            if inner is not None:
                index = {tuple: ".0", list: ".0", dict: ".NAME"}.get(typing.get_origin(annotation), "")
                yield from walk(inner, f"{prefix}{name}{index}.")

    yield from walk(Recipe, "")


# ----------------------------------------------------------------------------------------- nested values and types


def flatten(values: Mapping[str, Any] | Mapping[int, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value of nested dicts and lists, with keys as `--set` takes them."""
    flattened = {}
    for key, value in values.items():
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        is_nested = isinstance(inner, dict) and inner
        flattened |= flatten(inner, f"{prefix}{key}.") if is_nested else {f"{prefix}{key}": value}
    return flattened


def changed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted key -> value of what a recipe, as `to_dict` gives it, sets to something else than the default. A section that is not
    there by default is named even if it has defaults only."""
    return flatten(TypeAdapter(Recipe).dump_python(from_dict(values), mode="json", exclude_defaults=True))


def section_type(kind: Any) -> type | None:
    """The dataclass in an annotation: alone, optional, or in a tuple, list or dict."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType, tuple, list, dict):
        return next(filter(None, map(section_type, typing.get_args(kind))), None)
    return None


def set_at(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets `values["a"]["b"] = value` for the key `a.b`; numbers are list indices; missing containers are created.

    Raises:
        LookupError: there is no such key or index; the message says what is there.
    """
    *parents, last = key.split(".")
    inner: Any = values
    for part, following in zip(parents, [*parents[1:], last], strict=False):
        empty: Any = [] if following.isdigit() else {}
        if isinstance(inner, list):
            _require_index(inner, part)
            if int(part) == len(inner):
                inner.append(empty)
            inner = inner[int(part)]
        elif isinstance(inner, dict):
            if inner.get(part) is None:
                inner[part] = empty
            inner = inner[part]
        else:
            raise LookupError(f"the value above '{part}' is {inner!r}, which has no keys.")
    if isinstance(inner, list):
        _require_index(inner, last)
        inner[int(last) : int(last) + 1] = [value]
    elif isinstance(inner, dict):
        inner[last] = value
    else:
        raise LookupError(f"the value above '{last}' is {inner!r}, which has no keys.")


def _require_index(values: list, part: str) -> None:
    if not part.isdigit() or int(part) > len(values):
        raise LookupError(f"'{part}' is not an index of a list of length {len(values)}; {len(values)} appends to it.")
