"""A class of a file with a proof beside it, in which facts were observed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from patchgen.runtime import compatibility, registry
from patchgen.runtime.verify.observe.facts import LENGTH, STATE, Fact, to_records

OF_LENGTH = Fact(
    LENGTH,
    7,
    "scale = log(n)",
    "a length is an operand of log",
    "it is computed from the length of this rank's tokens",
)
OF_STATE = Fact(STATE, 9, "self.seen = x", "self.seen is kept", "the next step reads it")
CODE = """
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
"""


def record(file: Path, facts: Sequence[Fact], *, sha256: str = "", status: str = "proven", **training: object) -> None:
    """Writes `verify.json` beside a generated file.

    Args:
        sha256: of the bytes that were proven; default: those of the file as it is.
        training: further fields of the record of the training path.
    """
    proof = {
        "status": status,
        "sha256": sha256 or compatibility.digest(file),
        "training": {"observed": to_records(facts)} | training,
    }
    file.with_name("verify.json").write_text(json.dumps(proof))


def recorded(
    folder: Path, facts: Sequence[Fact], *, sha256: str = "", status: str = "proven", **training: object
) -> type:
    """A class of a file in this folder, whose proof observed these facts; the other arguments are those of `record`."""
    folder.mkdir(exist_ok=True)
    file = folder / f"modeling_{folder.name}.py"
    file.write_text(CODE)
    record(file, facts, sha256=sha256, status=status, **training)
    return registry.import_file(file).Model
