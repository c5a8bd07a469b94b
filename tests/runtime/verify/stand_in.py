"""A stand-in for a generated model: upstream's own modeling file, made standalone the way the generator makes it."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

RELATIVE_IMPORT = re.compile(r"^(\s*)from (\.+)([\w.]*) import", flags=re.MULTILINE)


def upstream_head(model_type: str) -> type:
    """Upstream's causal head of a model type."""
    return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def write_stand_in(
    directory: Path,
    model_type: str,
    *,
    head: str | None = None,
    edits: tuple[tuple[str, str], ...] = (),
    has_checkpoint_mapping: bool = True,
) -> Path:
    """Writes `modeling_<model>.py` and `provenance.json` into `directory / model`, and returns that folder.

    Args:
        head: name of the head class; default: the causal head of `model_type`.
        edits: (old, new) pairs, each found exactly once in the source: a planted defect.
        has_checkpoint_mapping: whether the file registers upstream's checkpoint conversions, as generated files do.
    """
    head_class = upstream_head(model_type) if head is None else None
    module_name = head_class.__module__ if head_class else f"transformers.models.{model_type}.modeling_{model_type}"
    module = importlib.import_module(module_name)
    head = head or head_class.__name__
    source = absolute_imports(inspect.getsource(module), module_name)
    for old, new in edits:
        assert source.count(old) == 1, f"{source.count(old)} places match {old!r} in {module_name}"
        source = source.replace(old, new)
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, transformers.PreTrainedModel)
        and value.__module__ == module_name
    ]
    model = module_name.rpartition(".modeling_")[2]
    folder = directory / model
    folder.mkdir(parents=True)
    footer = "\nfrom patchgen.runtime import ops\n"
    if has_checkpoint_mapping:
        footer += f"\nops.register_checkpoint_mapping({', '.join(names)})\n"
    (folder / f"modeling_{model}.py").write_text(source + footer)
    provenance = {
        "model": model,
        "upstream": {"version": transformers.__version__, "module": module_name, "sha256": ""},
        "model_types": [model_type],
        "heads": [head],
        "classes": names,
    }
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return folder


def absolute_imports(source: str, module_name: str) -> str:
    """Relative imports of the module `module_name`, made absolute."""

    def absolute(match: re.Match) -> str:
        indent, dots, rest = match.groups()
        package = ".".join(module_name.split(".")[: -len(dots)])
        return f"{indent}from {package}{'.' + rest if rest else ''} import"

    return RELATIVE_IMPORT.sub(absolute, source)
