"""Where upstream sources come from: the installed transformers, another release's wheel, or a file on disk.

transformers is never imported: its files are read as text and as `ast`.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import difflib
import functools
import hashlib
import importlib.util
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from patchgen.errors import ConfigError, SourceSyntaxError, UpstreamNotFound
from patchgen.source import parse
from patchgen.wheels import cached_wheel, installed_version

AUTO_CLASS_MAPPINGS = {
    "AutoModel": "MODEL_MAPPING_NAMES",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "AutoModelForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "AutoModelForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "AutoModelForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "AutoModelForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
# The head classes that a training run starts from, in the order in which a model type is looked up; others are made when
# they are asked for.
WHOLE_MODELS, *HEAD_MAPPINGS = list(AUTO_CLASS_MAPPINGS.values())[:4]
AUTO_FILES = ("auto_mappings", "configuration_auto", "modeling_auto")


@dataclass(frozen=True)
class SubConfig:
    """What upstream says of a sub-config: its class ("AutoConfig" if any will do) and the default model type."""

    config_class: str
    model_type: str | None = None


@dataclass(frozen=True)
class ConfigClass:
    """A configuration class of upstream: its `model_type` and its sub-configs."""

    name: str
    model_type: str | None
    sub_configs: dict[str, SubConfig] = field(default_factory=dict[str, SubConfig])


@dataclass(frozen=True)
class Upstream:
    """One upstream modeling file and what stands beside it."""

    model: str  # the name by which generated files go: a model type or the stem of a file
    text: str
    origin: str  # shown to people: "transformers 5.23.0" or a path
    version: str | None  # the transformers release; None for a file on disk that belongs to none
    module: str  # import path of the file
    path: str  # inside the release, or the name of the file
    given: str | None = None  # for a file on disk: where it is, as the user said it
    configs: dict[str, ConfigClass] = field(default_factory=dict[str, ConfigClass])
    heads: tuple[str, ...] = ()  # classes of this file that upstream's auto maps list as heads (`_heads`)
    release: Release | None = None
    # of a file on disk: the modules that it imports beside it
    siblings: dict[str, str] = field(default_factory=dict[str, str])
    config_file: str | None = None  # the config of a file on disk: as the user said it, or found beside the file

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.module.rpartition(".")[0]

    def base_of(self, level: int) -> list[str]:
        """The package that a relative import of so many dots starts from, in parts; empty if it lies beyond the outermost.

        A file on disk that reaches beyond its folder was written for its place in transformers.
        """
        beyond = level > 1 and self.given is not None and not self.module.startswith("transformers.")
        return _above(f"transformers.models.{self.model}" if beyond else self.package, level)

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def auto_model(self, auto_class: str, model_type: str | None) -> str | None:
        """The class that `auto_class.from_config` builds for a model type, as upstream's auto maps say."""
        if self.release is None or model_type is None or auto_class not in AUTO_CLASS_MAPPINGS:
            return None
        return self.release.auto_map(AUTO_CLASS_MAPPINGS[auto_class]).get(model_type)

    def model_of(self, model_type: str | None) -> str | None:
        """The name by which the generated file of another model type goes: that of its modeling file."""
        path = self.release.file_of(model_type) if self.release is not None and model_type else None
        return path and path.rpartition("/")[2].removeprefix("modeling_").removesuffix(".py")


class Release:
    """The files of one transformers release, whose package is a folder or lies in a wheel."""

    def __init__(self, root: Path | zipfile.Path, version: str) -> None:
        self.version, self.origin = version, f"transformers {version}"
        self._root = root

    def read(self, path: str) -> str | None:
        """The text of `path` inside the package, or None."""
        file = self._root / path
        return file.read_text(encoding="utf-8") if file.is_file() else None

    @functools.cached_property
    def modeling_files(self) -> dict[str, str]:
        """`directory -> path` of every `models/*/modeling_<directory>.py`."""
        pattern = re.compile(r"models/([^/]+)/modeling_\1\.py")
        return {match[1]: path for path in self.all_modeling_files if (match := pattern.fullmatch(path))}

    @functools.cached_property
    def all_modeling_files(self) -> tuple[str, ...]:
        """Every `models/**/modeling_*.py`."""
        if isinstance(self._root, zipfile.Path):
            paths = (name.removeprefix("transformers/") for name in self._root.root.namelist())
        else:
            paths = (path.relative_to(self._root).as_posix() for path in self._root.glob("models/**/modeling_*.py"))
        return tuple(sorted(path for path in paths if re.fullmatch(r"models/(.*/)?modeling_[^/]+\.py", path)))

    @functools.cached_property
    def _auto_maps(self) -> dict[str, dict[str, str]]:
        maps: dict[str, dict[str, str]] = {}
        for name in AUTO_FILES:
            for table, pairs in _tables(self.read(f"models/auto/{name}.py") or ""):
                maps.setdefault(table, {}).update(pairs)
        return maps

    def auto_map(self, name: str) -> dict[str, str]:
        """What one of upstream's `..._MAPPING_NAMES` lists itself, not what it takes over from another table by
        `*list(OTHER.items())`: model type -> class name (the first one where there are several)."""
        return self._auto_maps.get(name, {})

    def file_of(self, model: str) -> str | None:
        """The modeling file of a model type: that of its folder, else the one that defines a class it maps to.

        data2vec-text -> models/data2vec/modeling_data2vec_text.py
        """
        special = self.auto_map("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model)
        for candidate in (model, special, (special or model).replace("-", "_")):
            if candidate in self.modeling_files:
                return self.modeling_files[candidate]
        # A type with a configuration of its own and another model's classes, or a file that is not named like its folder.
        classes = [self.auto_map(mapping).get(model) for mapping in (*HEAD_MAPPINGS, WHOLE_MODELS)]
        defining = {path for name in classes if name for path in self._defining.get(name, ())}
        paths = (*self.modeling_files.values(), *self.all_modeling_files)
        return next((path for path in paths if path in defining), None)

    def defines(self, class_name: str, besides: str) -> bool:
        """Whether a modeling file other than `besides` (its path in the release) defines a class of that name."""
        return any(not besides.endswith(path) for path in self._defining.get(class_name, ()))

    @functools.cached_property
    def _defining(self) -> dict[str, list[str]]:
        """Class -> the modeling files that define it."""
        files_of_class: dict[str, list[str]] = {}
        for path in self.all_modeling_files:
            for name in re.findall(r"\nclass (\w+)\(", self.read(path) or ""):
                files_of_class.setdefault(name, []).append(path)
        return files_of_class

    def known_models(self) -> list[str]:
        return sorted({*self.modeling_files, *self.auto_map("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")})


@functools.lru_cache(maxsize=8)
def open_release(version: str | None = None) -> Release:
    """The installed release, or the one of `version` (from the cache of wheels, else downloaded into it).

    Raises:
        UpstreamNotFound: with the version and the places that were looked at.
    """
    present = installed_version()
    wanted = present if version is None else version
    if wanted is None:
        raise UpstreamNotFound(
            "transformers is not installed here. Install it (`pip install transformers==5.23.0`), name a release with "
            "--transformers VERSION, or a file with --source PATH."
        )
    spec = importlib.util.find_spec("transformers")
    if wanted == present and spec is not None and spec.origin is not None:
        return Release(Path(spec.origin).parent, wanted)
    wheel = cached_wheel(wanted)
    try:
        return Release(zipfile.Path(wheel, "transformers/"), wanted)
    except zipfile.BadZipFile as error:
        raise UpstreamNotFound(
            f"{wheel} should be the wheel of transformers {wanted} and is not a zip file ({error}). Delete it; "
            "the next run downloads it again."
        ) from error


def load(model: str, version: str | None = None, source: Path | None = None, config: Path | None = None) -> Upstream:
    """The upstream source of a model.

    Args:
        model: a model type ("qwen3_moe", "gemma3_text") or a folder of `transformers/models`.
        version: a transformers release; None for the installed one.
        source: a modeling file, or a folder with one, on disk. It belongs to no release.
        config: the file with its `CONFIG`; by default `patchgen_<model>.py` beside it, if there is one.

    Raises:
        ConfigError: both a release and a source were named, or a config without a source.
        SourceSyntaxError: the file on disk is not UTF-8.
        UpstreamNotFound: unknown model (with the three nearest names), missing file, wheel out of reach.
    """
    if source is not None and version is not None:
        raise ConfigError(
            f"--transformers {version} and --source {source} contradict each other: a file on disk is read as it is. "
            "Give one of them."
        )
    if source is not None:
        return _load_from_disk(model, Path(source), config)
    if config is not None:
        raise ConfigError(
            f"--config {config} is for a file on disk, which --source names. {model} has a config by its name."
        )
    return load_from(open_release(version), model)


def load_from(release: Release, model: str) -> Upstream:
    """The upstream source of a model in a release; raises as `load` does."""
    path = release.file_of(model)
    if path is None:
        nearest = difflib.get_close_matches(model, release.known_models(), n=3, cutoff=0.3)
        raise UpstreamNotFound(
            f"{release.origin} has no model '{model}'. Nearest: {', '.join(nearest) or 'none'}. "
            f"Looked for models/{model}/modeling_{model}.py and in the auto maps."
        )
    return load_file(release, path, model=model)


def load_file(release: Release, path: str, model: str | None = None) -> Upstream:
    """A modeling file of a release by its path, for example `models/llama/modeling_llama.py`."""
    text = release.read(path)
    if text is None:
        raise UpstreamNotFound(f"{release.origin} has no file {path}.")
    model = model or path.rpartition("/")[2].removeprefix("modeling_").removesuffix(".py")
    configs = read_configs(release.read(path.replace("modeling_", "configuration_", 1)) or "", path)
    return Upstream(
        model=model,
        text=text,
        origin=release.origin,
        version=release.version,
        module="transformers." + path.removesuffix(".py").replace("/", "."),
        path=f"transformers/{path}",
        configs=configs,
        heads=_heads(release, model, configs, text),
        release=release,
    )


def _heads(release: Release, model: str, configs: dict[str, ConfigClass], text: str) -> tuple[str, ...]:
    """The heads in a file that the auto maps name for a model type, or, for a folder, for any type configured in it."""
    model_types = [model, *(config.model_type for config in configs.values() if config.model_type)]
    for wanted in ([model], model_types):
        heads = [release.auto_map(mapping).get(kind) for mapping in HEAD_MAPPINGS for kind in wanted]
        here = [head for head in dict.fromkeys(heads) if head and re.search(rf"^class {head}\b", text, re.MULTILINE)]
        if here:
            return tuple(here)
    return ()


def name_of(source: Path) -> str:
    """The model that a modeling file on disk is called after: `modeling_x.py`, alone in its folder or named, is x.

    Raises:
        UpstreamNotFound: there is no such file.
    """
    return _modeling_file(None, Path(source)).stem.removeprefix("modeling_")


def _modeling_file(model: str | None, source: Path) -> Path:
    if source.is_dir():
        modeling_files = sorted(source.glob("modeling_*.py"))
        preferred = [file for file in modeling_files if file.stem == f"modeling_{model}"]
        if not preferred and len(modeling_files) != 1:
            names = ", ".join(file.name for file in modeling_files) or "none"
            raise UpstreamNotFound(
                f"{source} should hold modeling_{model or 'NAME'}.py or a single modeling_*.py; found: {names}. "
                "Name the file itself with --source."
            )
        source = (preferred or modeling_files)[0]
    if not source.is_file():
        raise UpstreamNotFound(f"There is no file {source} (given as --source).")
    return source


def _load_from_disk(model: str, source: Path, config: Path | None) -> Upstream:
    given = str(source)
    source = _modeling_file(model, source)
    given_config, config = config is not None, config or source.with_name(f"patchgen_{model}.py")
    text = _read_source(source)
    parts = source.resolve().with_suffix("").parts
    inside = [i for i, part in enumerate(parts) if part == "transformers" and "models" in parts[i:]]
    configuration = source.with_name(source.name.replace("modeling_", "configuration_", 1))
    configs = read_configs(_read_source(configuration), str(configuration)) if configuration.is_file() else {}
    module = ".".join(parts[inside[-1] :]) if inside else f"patchgen.generated_models.{model}.{source.stem}"
    return Upstream(
        model=model,
        text=text,
        origin=source.name,
        version=None,
        module=module,
        path=source.name,
        given=given,
        configs=configs,
        siblings={} if inside else _siblings(source, text, model),
        config_file=str(config) if given_config or config.is_file() else None,
    )


def _read_source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SourceSyntaxError(
            f"{path}: byte {error.start} is not UTF-8 ({error.reason}). Save the file as UTF-8."
        ) from error


def _above(package: str, level: int) -> list[str]:
    """What a relative import of so many dots in a package starts from, in parts; empty beyond the outermost."""
    parts = package.split(".")
    return parts[: max(len(parts) + 1 - level, 0)]


def absolute_module(node: ast.ImportFrom, base: list[str]) -> str:
    """The absolute name of what a relative import imports from, which starts from the package `base`."""
    return ".".join([*base, *filter(None, [node.module])])


def _moved(text: str, model: str, path: Path) -> str:
    """The text of a file that is copied elsewhere: its imports from beyond its folder become absolute ones of transformers.

    Raises:
        SourceSyntaxError: an import reaches beyond transformers.
    """
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text  # nothing reads it: as it is
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level > 1]
    lines = text.encode().splitlines(keepends=True)  # of bytes, as ast counts lines and columns
    for node in sorted(imports, key=lambda node: (node.lineno, node.col_offset), reverse=True):
        base, place = _above(f"transformers.models.{model}", node.level), node.lineno - 1
        if not base:
            raise SourceSyntaxError(f"{path}, line {node.lineno}: `{ast.unparse(node)}` starts beyond transformers.")
        above, rest = lines[place][: node.col_offset], b"".join([lines[place][node.col_offset :], *lines[place + 1 :]])
        named = f"from {absolute_module(node, base)} import".encode()
        lines[place:] = [above + re.sub(rb"from\b.*?\bimport\b", named, rest, count=1, flags=re.DOTALL)]
    return b"".join(lines).decode()


def _siblings(source: Path, text: str, model: str) -> dict[str, str]:
    """The files beside a modeling file that it imports relatively; a generated file takes copies along."""
    files: dict[str, str] = {}
    pending = [text]
    while pending:
        try:
            tree = ast.parse(pending.pop())
        except SyntaxError:
            return files  # the parser of the modeling file reports it with its place
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or node.level != 1:
                continue
            for module in [node.module] if node.module else [alias.name for alias in node.names]:
                file = source.with_name(module.split(".")[0] + ".py")
                if file.is_file() and file.name not in files and file != source:
                    files[file.name] = _moved(_read_source(file), model, file)
                    pending.append(files[file.name])
    return files


def read_configs(text: str, path: str) -> dict[str, ConfigClass]:
    """The configuration classes of a `configuration_*.py`, by name; what a class does not state it has from its base."""
    configs: dict[str, ConfigClass] = {}
    for node in (node for block in parse(text, path) for node in block.statements if isinstance(node, ast.ClassDef)):
        values: dict[str, ast.expr] = {}
        for statement in node.body:
            match statement:
                case ast.Assign([ast.Name(name), *_], value) | ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                    values[name] = value
        base = next((configs[name] for name in map(ast.unparse, node.bases) if name in configs), ConfigClass("", None))
        model_type = values.get("model_type")
        sub_configs = dict(base.sub_configs)
        for table in ("sub_configs", "sub_configs_defaults"):  # the second name since 5.2x
            sub_configs |= _sub_configs(values.get(table))
        configs[node.name] = ConfigClass(
            name=node.name,
            model_type=_text(model_type) if isinstance(model_type, ast.Constant) else base.model_type,
            sub_configs=sub_configs,
        )
    return configs


def _sub_configs(table: ast.expr | None) -> dict[str, SubConfig]:
    """Reads `{"text_config": TextConfig, "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="x")}`."""
    sub_configs: dict[str, SubConfig] = {}
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        if (name := _text(key)) is None:
            continue
        stated = {"config_class": value}
        if isinstance(value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            stated = dict(zip(("config_class",), value.args, strict=False)) | given
        config_class, kind = stated.get("config_class"), stated.get("model_type")
        sub_configs[name] = SubConfig(
            "AutoConfig" if config_class is None else ast.unparse(config_class),
            _text(kind),
        )
    return sub_configs


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _tables(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Module-level `NAME = OrderedDict([...])` and `NAME.update({...})` of strings; of several values the first one."""
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(name), *_], value=ast.Call(args=[table, *_])):
                yield name, _pairs(table)
            case ast.Expr(ast.Call(func=ast.Attribute(ast.Name(name), "update"), args=[table, *_])):
                yield name, _pairs(table)


def _pairs(table: ast.expr) -> dict[str, str]:
    pairs: dict[str, str] = {}
    listed = [item.elts for item in getattr(table, "elts", ()) if isinstance(item, ast.Tuple) and len(item.elts) == 2]
    items = zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else listed
    for key, value in items:
        first = value.elts[0] if isinstance(value, ast.Tuple | ast.List) and value.elts else value
        if (name := _text(key)) is not None and (text := _text(first)) is not None:
            pairs[name] = text
    return pairs
