"""The code that proofs depend on, in their records: which functions each ran, and a hash of what these are.

    "made_with": {"prover": "5a38d707be39e063", "code": "8c21e07d", "transformers": "5.24.0", "torch": "2.13.0"}
    "code": {
      "functions": {"runtime.attention": "attention_function choose Recorded. ...", ...},     # once for all proofs of the file
      "sets": {"8c21e07d": "1f3c..."}                                        # which of them, a bit each
    }

In memory `made_with["code"]` is the set itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen.runtime.verify import source_units

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import MadeWith

MADE_WITH, CODE, PROVER = "made_with", "code", "prover"
RELEASES = ("transformers", "torch")
_PACKAGE = "patchgen."


def made_with(code: Iterable[str], releases: Mapping[str, str]) -> MadeWith:
    """The `made_with` of a proof that ran these functions (`executed_code.functions`) with these releases, now."""
    functions = frozenset(code)
    return {
        "prover": _hash_of(functions),
        "code": functions,
        "transformers": releases["transformers"],
        "torch": releases["torch"],
    }


def is_current(made: Mapping[str, Any] | None) -> bool:
    """Whether what a proof ran is the same in the sources of now."""
    return made is not None and isinstance(made.get(CODE), frozenset) and made.get(PROVER) == _hash_of(made[CODE])


@cache
def _hash_of(functions: frozenset[str]) -> str:
    return source_units.hash_of(functions)


# ---------------------------------------------------------------------------------------------------- files


def dumps(record: Mapping[str, Any], *, indent: int) -> str:
    """A record as JSON, its sets of functions in a table of their own."""
    sets = {id_of(made[CODE]): made[CODE] for made in _all_made_with(record) if isinstance(made.get(CODE), frozenset)}
    names = sorted(frozenset[str]().union(*sets.values()))
    by_module: dict[str, list[str]] = {}
    for name in names:
        module, _, function = name.removeprefix(_PACKAGE).partition(":")
        by_module.setdefault(module, []).append(function or ".")
    places = {name: place for place, name in enumerate(_names_of(by_module))}
    bits = {one: f"{sum(1 << places[name] for name in functions):x}" for one, functions in sorted(sets.items())}
    table = {"functions": {module: " ".join(found) for module, found in by_module.items()}, "sets": bits}
    packed = _replaced(record, lambda code: id_of(code) if isinstance(code, frozenset) else code)
    return json.dumps({**packed, **({CODE: table} if sets else {})}, indent=indent) + "\n"


def loads(text: str) -> Any:
    """The record of `dumps`. A set that the file lacks stays a text: such a proof is never current."""
    record = json.loads(text)
    table = record.pop(CODE, None)
    if table is None:
        return record
    names = _names_of({module: found.split(" ") for module, found in table["functions"].items()})
    sets: dict[str, frozenset[str]] = {}
    for one, digits in table["sets"].items():
        bits = int(digits, 16)
        sets[one] = frozenset(name for place, name in enumerate(names) if bits >> place & 1)
    return _replaced(record, lambda code: sets.get(code, code))


def read(path: Path) -> Any:
    """The record in a file."""
    return loads(path.read_text(encoding="utf-8"))


def id_of(functions: frozenset[str]) -> str:
    """The name of a set in a file."""
    return hashlib.sha256("\n".join(sorted(functions)).encode()).hexdigest()[:8]


def _names_of(by_module: Mapping[str, list[str]]) -> list[str]:
    return [
        f"{_PACKAGE}{module}:{'' if function == '.' else function}"
        for module, found in by_module.items()
        for function in found
    ]


def _all_made_with(value: Any) -> Iterator[Mapping[str, Any]]:
    for name, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        if name == MADE_WITH:
            yield inner
        elif isinstance(inner, Mapping | list):
            yield from _all_made_with(inner)


def _replaced(value: Any, code_of: Any) -> Any:
    """A copy with other values for the `code` of each `made_with`."""
    if isinstance(value, list):
        return [_replaced(one, code_of) for one in value]
    if not isinstance(value, Mapping):
        return value
    copy = {name: _replaced(inner, code_of) for name, inner in value.items() if name != MADE_WITH}
    order = {name: copy.get(name) for name in value}
    if MADE_WITH in value:
        made = value[MADE_WITH]
        order[MADE_WITH] = {**made, CODE: code_of(made[CODE])} if CODE in made else dict(made)
    return order
