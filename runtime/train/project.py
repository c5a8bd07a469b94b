"""What a project says once for all of its recipes and commands, in its pyproject.toml:

[tool.patchgen]
code = "my_architecture"
generated = "generated"
"""

from __future__ import annotations

import tomllib
from pathlib import Path


def code(folder: Path) -> dict[str, str]:
    """`code` and `generated` of the project in `folder`, which are `model.code` and `model.generated` of its recipes.

    Raises:
        ValueError: the file is not TOML, or its section says something else.
    """
    file = folder / "pyproject.toml"
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {}) if file.is_file() else {}
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file.absolute()} is not TOML: {error}") from error
    found = said.get("patchgen", {})
    if not (found.keys() <= {"code", "generated"} and all(isinstance(value, str) for value in found.values())):
        raise ValueError(f"{file.absolute()}: [tool.patchgen] takes the texts code and generated, not {found}.")
    return found
