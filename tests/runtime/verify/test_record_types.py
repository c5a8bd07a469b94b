"""The types of records say what the files hold: every key and every value of every committed record."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NotRequired, Union, get_args, get_origin, is_typeddict

import pytest

from patchgen import provenance
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.verify import code_sets, record_types
from patchgen.runtime.verify.committed_models import records_folder

ROOT = provenance.generated_root()
FILES = {
    **dict.fromkeys(sorted(ROOT.glob("*/provenance.json")), record_types.Provenance),
    **dict.fromkeys(sorted(ROOT.glob("*/verify.json")), record_types.ProofRecord),
    **dict.fromkeys(sorted(ROOT.glob("*/verify_ranks.json")), record_types.RankProofRecord),
    records_folder() / "coverage.json": record_types.CoverageRecord,
    records_folder() / "heads.json": record_types.HeadsRecord,
}
# Imported by the module for type checkers only.
CHECKED_FOR_TYPES = {"Names": Names, "DocumentSeparation": DocumentSeparation}


def problems(value: object, kind: object, path: str) -> Iterator[str]:
    """Where a value is not what a type says, in the words of its keys."""
    arguments = get_args(kind)
    if is_typeddict(kind):
        yield from _problems_of_keys(value, kind, path)
    elif get_origin(kind) in (Union, types.UnionType):
        if all(any(problems(value, one, path)) for one in arguments):
            yield f"{path} is {value!r}, not {kind}"
    elif get_origin(kind) is Literal:
        if value not in arguments:
            yield f"{path} is {value!r}, not one of {arguments}"
    elif get_origin(kind) is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from problems(item, arguments[0], f"{path}[{number}]")
    elif get_origin(kind) is frozenset and isinstance(value, frozenset):
        for item in value:
            yield from problems(item, arguments[0], f"{path}{{}}")
    elif get_origin(kind) in (dict, Mapping) and isinstance(value, dict):
        for key, item in value.items():
            yield from problems(item, arguments[1], f"{path}[{key}]")
    elif isinstance(kind, str | typing.ForwardRef):  # a type that names itself
        yield from problems(value, CHECKED_FOR_TYPES[getattr(kind, "__forward_arg__", kind)], path)
    elif kind is not object and (get_origin(kind) is not None or type(value) is not kind):
        yield f"{path} is {value!r}, not {kind}"


def _problems_of_keys(value: object, kind: type, path: str) -> Iterator[str]:
    hints = typing.get_type_hints(kind, localns=CHECKED_FOR_TYPES, include_extras=True)
    present = value if isinstance(value, dict) else {}
    yield from (f"{path} has {key!r}, which {kind.__name__} has not" for key in present if key not in hints)
    for key, hint in hints.items():
        is_required = get_origin(hint) is not NotRequired
        if key in present:
            yield from problems(present[key], hint if is_required else get_args(hint)[0], f"{path}.{key}")
        elif is_required:
            yield f"{path} lacks {key!r}, which {kind.__name__} requires"


@pytest.mark.parametrize("path", [pytest.param(path, id="/".join(path.parts[-2:])) for path in FILES])
def test_a_record_has_the_keys_and_values_that_its_type_says(path: Path):
    assert list(problems(code_sets.read(path), FILES[path], path.name)) == []


def test_every_kind_of_record_is_there():
    assert len({*FILES.values()}) == 5 and len(FILES) > 60


def test_every_key_that_may_be_missing_is_in_some_record():
    """Else its type would be of nothing. No committed model has a configuration of its own, was made for named heads, inherits
    from another file, changes its caller's batch, or fails on ranks."""
    elsewhere = {
        ("ProofRecord", "copies"),
        ("Provenance", "asked"),
        ("Provenance", "inherited"),
        ("RankCaseRecord", "failed"),
    }
    elsewhere |= {(kind, "changed_inputs") for kind in ("ProofFacts", "ProofRecord")}
    texts = "".join(path.read_text(encoding="utf-8") for path in FILES)
    for kind in (one for one in vars(record_types).values() if is_typeddict(one)):
        hints = typing.get_type_hints(kind, localns=CHECKED_FOR_TYPES, include_extras=True)
        optional = [key for key, hint in hints.items() if get_origin(hint) is NotRequired]
        missing = {(kind.__name__, key) for key in optional if f'"{key}": ' not in texts}
        assert missing <= elsewhere


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"unheard_of": 1}, "row has 'unheard_of', which HeadRow has not"),
        ({"reason": None}, "row.reason is None, not <class 'str'>"),
        ({"made_with": {}}, "row.made_with lacks 'prover', which RowMadeWith requires"),
    ],
)
def test_what_a_type_does_not_say_is_told(change: dict, told: str):
    record = code_sets.read(records_folder() / "heads.json")
    assert told in list(problems(record["rows"][0] | change, record_types.HeadRow, "row"))
    del record["rows"][0]["head"]
    assert "row lacks 'head', which HeadRow requires" in list(problems(record["rows"][0], record_types.HeadRow, "row"))


def test_a_training_path_may_name_an_attention_for_each_config_and_nothing_else():
    def told(names: object) -> list[str]:
        return list(problems(names, Names, "attention"))

    assert told("eager") == told({"": "eager", "text_config": {"": "patchgen_sdpa"}}) == []
    assert told({"": 1}) and told(["eager"])
