"""Converts the rows of one source to the fields of its kind, by their format (`formats.py`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from patchgen.runtime.data import formats
from patchgen.runtime.data.chat import require_messages
from patchgen.runtime.data.config import Kind, SourceConfig


@dataclass(frozen=True)
class RowMapper:
    """Maps each row of a source to fields; picklable."""

    source: SourceConfig
    kind: Kind

    def __call__(self, where: str, row: dict[str, Any]) -> dict[str, Any]:
        """The fields of a row.

        Raises:
            BadSample: the row matches no format of the kind, or several, or not the one of the source.
        """
        row = formats.rename_columns(where, row, self.source.columns)
        name = self.source.row_format
        if name == "auto":
            name = formats.detect_row_format(where, row, self.kind)
        else:
            formats.require_format(where, row, name)
        if name == "preference":
            row = formats.with_chosen_prompt(row, self.source.columns)
        fields = formats.fields_of(where, row, name, self.kind)
        for column in ("messages", "chosen", "rejected"):
            if self.kind != "text" and isinstance(fields.get(column), list):
                require_messages(where, fields[column])
        return fields

    def fingerprint(self) -> list[Any]:
        """Changes with everything that the fields depend on, except the rows."""
        return ["rows", self.kind, self.source.row_format, dict(sorted(self.source.columns.items()))]
