"""Records keep the functions of their proofs, once for a file, and give them back."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from patchgen.runtime.verify import code_sets

NAMES = st.frozensets(
    st.sampled_from(
        [f"patchgen.{module}:{name}" for module in ("runtime.ops", "kernels.a") for name in ("", "*", "f", "C.m")]
    )
)
RELEASES = {"transformers": "5.24.0", "torch": "2.13.0"}


@given(st.lists(NAMES, max_size=4))
def test_what_is_read_is_what_was_written(sets: list[frozenset[str]]):
    rows = [
        {"name": i, "made_with": {"prover": "x", "code": one}, "ranks": {"sp2": {"made_with": {"code": one}}}}
        for i, one in enumerate(sets)
    ]
    assert code_sets.loads(code_sets.dumps({"key": {}, "rows": rows}, indent=1)) == {"key": {}, "rows": rows}


def test_a_set_is_stored_once():
    ran = frozenset({"patchgen.runtime.ops:", "patchgen.runtime.attention:choose"})
    rows = [{"made_with": code_sets.made_with(ran, RELEASES)} for _ in range(3)]
    record = json.loads(code_sets.dumps({"rows": rows}, indent=1))
    assert record["code"] == {
        "functions": {"runtime.attention": "choose", "runtime.ops": "."},
        "sets": {code_sets.id_of(ran): "3"},
    }
    assert {row["made_with"]["code"] for row in record["rows"]} == {code_sets.id_of(ran)}


def test_only_what_is_known_and_the_same_is_current(tmp_path: Path):
    made = code_sets.made_with({"patchgen.runtime.ops:"}, RELEASES)
    assert code_sets.is_current(made)
    assert not code_sets.is_current(made | {"prover": "older"})
    assert not code_sets.is_current(made | {"code": frozenset({"patchgen.runtime.attention:choose"})})
    assert not code_sets.is_current(None) and not code_sets.is_current({"prover": made["prover"]})
    (tmp_path / "old.json").write_text(json.dumps({"made_with": made | {"code": "not in the file"}}))
    assert not code_sets.is_current(code_sets.read(tmp_path / "old.json")["made_with"])
