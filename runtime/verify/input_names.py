"""The inputs of a head that need a packing rule (`parallel/batch_fields.py`): outputs of its processors and tensors of its cases.

Processors are parsed, not imported: many need packages that are not installed. Outputs that the head's forward does not take
are ignored.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import transformers

from patchgen.runtime.parallel.batch_fields import RULES

MODELS = Path(transformers.__file__).parent / "models"
MAPPING = re.compile(r"(PROCESSOR|FEATURE_EXTRACTOR)_MAPPING_NAMES$")
"""The tables of transformers' auto classes that name processors, and their parts, by model type. They are parsed because, when
imported, they lack classes whose packages are not installed."""
OUTPUT_NAMES = "model_input_names"
"""The attribute with which processors declare their outputs."""


def inputs_without_rule(head: type, model_type: str, proven_inputs: Iterable[str]) -> list[str]:
    """The inputs of a head without a packing rule.

    Args:
        head: a generated class; loading it (`registry.GeneratedModel.load`) has registered its own rules.
        proven_inputs: the names of tensors in the cases of its proof; flags of a whole batch are not packed.
    """
    parameters = inspect.signature(head.forward).parameters
    return sorted(
        name for name in {*processor_outputs(model_type), *proven_inputs} if name in parameters and name not in RULES
    )


def processor_outputs(model_type: str) -> frozenset[str]:
    """The outputs that the processors of a model type declare."""
    return frozenset(output for name in _processors().get(model_type, ()) for output in _declared_outputs(name))


@functools.cache
def _processors() -> dict[str, set[str]]:
    """The names of the processors of each model type."""
    names_by_type: dict[str, set[str]] = {}
    for file in (MODELS / "auto").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and MAPPING.search(ast.unparse(node.targets[0])):
                for kind, value in _entries(node.value):
                    names_by_type.setdefault(kind, set()).update(_constants(value))
    return names_by_type


def _entries(table: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """The keys and values of `{"a": b}` or `OrderedDict([("a", b)])`."""
    for node in ast.walk(table):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
        else:
            pairs = [node.elts] if isinstance(node, ast.Tuple) and len(node.elts) == 2 else []
        constant_keys = ((key, value) for key, value in pairs if isinstance(key, ast.Constant))
        yield from ((key.value, value) for key, value in constant_keys if isinstance(key.value, str))


def _constants(node: ast.AST) -> Iterator[str]:
    return (c.value for c in ast.walk(node) if isinstance(c, ast.Constant) and isinstance(c.value, str))


@functools.cache
def _declared_outputs(name: str) -> frozenset[str]:
    """The outputs that a processor class, or the classes that it extends, declare."""
    file = _files().get(name)
    if file is None:
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    node = next(statement for statement in tree.body if isinstance(statement, ast.ClassDef) and statement.name == name)
    inherited = (_declared_outputs(base.id) for base in node.bases if isinstance(base, ast.Name) and base.id != name)
    return frozenset(_own_outputs(node)).union(*inherited)


def _own_outputs(node: ast.ClassDef) -> Iterator[str]:
    for statement in node.body:
        names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
        if OUTPUT_NAMES in (*names, getattr(statement, "name", None)):
            yield from _constants(statement)


@functools.cache
def _files() -> dict[str, Path]:
    """The file of each processor class of the installed release."""
    files = [*MODELS.glob("*/*processing_*.py"), *MODELS.glob("*/feature_extraction_*.py")]
    return {
        name: file
        for file in sorted(files)
        if not file.name.startswith("modular_")
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
