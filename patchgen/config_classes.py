"""Configuration classes of transformers and of users, read as text."""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from patchgen.source import parse


@dataclass(frozen=True)
class SubConfig:
    """A sub-config as upstream declares it: its class ("AutoConfig" if any may be used) and its default model type."""

    config_class: str
    model_type: str | None = None


@dataclass(frozen=True)
class ConfigClass:
    """A configuration class of upstream: its `model_type` and its sub-configs."""

    name: str
    model_type: str | None
    sub_configs: dict[str, SubConfig] = field(default_factory=dict[str, SubConfig])


def read_configs(
    text: str, path: str, known: Mapping[str, ConfigClass] = MappingProxyType({})
) -> dict[str, ConfigClass]:
    """The configuration classes of a `configuration_*.py`, by name, with what they inherit of each other and of `known` ones;
    raises SourceSyntaxError."""
    configs: dict[str, ConfigClass] = {}
    statements = parse(text, path).statements
    imported = [alias for node in statements if isinstance(node, ast.ImportFrom) for alias in node.names]
    aliases = {alias.asname: alias.name for alias in imported}
    for node in (node for node in statements if isinstance(node, ast.ClassDef)):
        values: dict[str, ast.expr] = {}
        for statement in node.body:
            match statement:
                case ast.Assign([ast.Name(name), *_], value) | ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                    values[name] = value
        names = list(map(ast.unparse, node.bases))
        bases = [configs.get(n) or known.get(aliases.get(n, n).rpartition(".")[2]) for n in names]
        base = next(filter(None, bases), ConfigClass("", None))
        model_type = values.get("model_type")
        sub_configs = dict(base.sub_configs)
        for table in ("sub_configs", "sub_configs_defaults"):  # older and newer releases
            sub_configs |= _sub_configs(values.get(table))
        kind = text_of(model_type) if isinstance(model_type, ast.Constant) else base.model_type
        configs[node.name] = ConfigClass(node.name, kind, sub_configs)
    return configs


def _sub_configs(table: ast.expr | None) -> dict[str, SubConfig]:
    """Reads `{"text_config": TextConfig, "vision_config": SubConfigSpec(config_class=AutoConfig, model_type="x")}`."""
    sub_configs: dict[str, SubConfig] = {}
    for key, value in zip(table.keys, table.values, strict=True) if isinstance(table, ast.Dict) else ():
        if (name := text_of(key)) is None:
            continue
        stated = {"config_class": value}
        if isinstance(value, ast.Call):
            given = {keyword.arg: keyword.value for keyword in value.keywords}
            stated = dict(zip(("config_class",), value.args, strict=False)) | given
        config_class = stated.get("config_class")
        class_name = "AutoConfig" if config_class is None else ast.unparse(config_class)
        sub_configs[name] = SubConfig(class_name, text_of(stated.get("model_type")))
    return sub_configs


def text_of(node: ast.expr | None) -> str | None:
    """The string that an expression is; None for any other."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
