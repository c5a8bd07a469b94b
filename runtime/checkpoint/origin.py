"""The checkpoint that a model was loaded from: its layout, and a hash by which its folder is recognised."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from patchgen.runtime.checkpoint.layout import Origin


@dataclass(frozen=True)
class LoadedOrigin(Origin):
    """An origin that another folder can be compared with.

    Attributes:
        contents: a hash of all its keys and shapes; "": not known (training states of earlier versions).
    """

    contents: str = ""

    @classmethod
    def of(cls, directory: object, shapes: Mapping[str, Sequence[int]]) -> LoadedOrigin:
        listed = json.dumps(sorted((key, list(shape)) for key, shape in shapes.items()))
        origin = Origin.of(directory, shapes)
        return cls(origin.directory, origin.shapes, hashlib.sha256(listed.encode()).hexdigest()[:32])

    @classmethod
    def from_json(cls, fields: dict) -> LoadedOrigin:
        origin = Origin.from_json(fields)
        return cls(origin.directory, origin.shapes, fields.get("contents", ""))

    def has_tensors_of(self, other: Origin) -> bool:
        """Whether this is the same checkpoint as `other`, by keys and shapes; if not all of them are known, by the first key of
        each pattern."""
        known = other.contents if isinstance(other, LoadedOrigin) else ""
        return self.contents == known if known else self.shapes == other.shapes
