"""The operator on the configuration file: another default of an annotated field (a bool, a float or an activation's name)."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from patchgen.mutation.edits import Mutant
from patchgen.upstream import Upstream

NAME = "default in the configuration"
SUFFIX = "_changed"
Default = bool | float | str
ACTIVATIONS = {"silu": "gelu_pytorch_tanh", "gelu_pytorch_tanh": "silu", "gelu": "relu", "relu": "gelu"}


@dataclass(frozen=True)
class Configuration:
    """The configuration module beside a modeling file: the last part of its dotted name, and its text."""

    module: str
    text: str

    @classmethod
    def of(cls, origin: Upstream) -> Configuration | None:
        """None if upstream's file has no configuration beside it."""
        path = PurePosixPath(origin.path.removeprefix("transformers/"))
        name = path.name.replace("modeling_", "configuration_", 1)
        text = origin.release.read(str(path.with_name(name))) if origin.release is not None else None
        return cls(name.removesuffix(".py"), text) if text else None

    def mutants(self, modeling: str) -> Iterator[Callable[[], Mutant]]:
        """Mutants whose modeling file imports a configuration with one changed default."""
        imported = f"from .{self.module} import"
        if imported not in modeling:
            return
        changed_import = modeling.replace(imported, f"from .{self.module}{SUFFIX} import")
        tree = ast.parse(self.text)
        for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
            for field in owner.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.value, ast.Constant):
                    for other in _others(field.value.value):
                        yield lambda owner=owner, field=field, other=other: self._mutant(
                            changed_import, owner, field, other
                        )

    def _mutant(self, modeling: str, owner: ast.ClassDef, field: ast.AnnAssign, other: Default) -> Mutant:
        changed = copy.deepcopy(field)
        changed.value = ast.Constant(other)
        lines = self.text.splitlines(keepends=True)
        lines[field.lineno - 1 : field.end_lineno] = [f"{' ' * field.col_offset}{ast.unparse(changed)}\n"]
        where = f"{owner.name} line {field.lineno} of the configuration"
        change = f"{ast.unparse(field)} -> {other!r}"
        return Mutant(NAME, where, change, modeling, False, {f"{self.module}{SUFFIX}": "".join(lines)})


def _others(value: object) -> Iterator[Default]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, float):
        yield value * 1.5 + 0.01
    elif isinstance(value, str) and value in ACTIVATIONS:
        yield ACTIVATIONS[value]
