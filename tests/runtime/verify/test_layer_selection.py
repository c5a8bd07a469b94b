"""One layer of each kind is kept, and only the lists with an entry per layer follow."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from patchgen.runtime.verify.layer_selection import fields_per_layer, lists_of_length, select_layers

KINDS = st.sampled_from(["full", "linear", "conv"])


@given(st.lists(st.tuples(KINDS, st.booleans(), st.booleans()), min_size=2, max_size=40), st.integers(1, 6))
def test_selected_layers_show_each_kind_once_and_in_order(layers, min_layers):
    attention, is_moe, is_listed = (list(column) for column in zip(*layers, strict=True))
    values = {
        "layer_types": attention,
        "mlp_layer_types": ["sparse" if moe else "dense" for moe in is_moe],
        "special_layers": [layer for layer, listed in enumerate(is_listed) if listed],
    }
    selection = select_layers(values, len(layers), min_layers)
    kinds = [layers[layer] for layer in selection.kept]
    assert set(kinds) == set(layers)
    assert list(selection.kept) == sorted(selection.kept)
    assert len(selection.kept) == max(len(set(layers)), min_layers)
    small = selection.overrides
    listed = set(small.get("special_layers", []))
    assert [
        (small["layer_types"][i], small["mlp_layer_types"][i] == "sparse", i in listed) for i in range(len(kinds))
    ] == kinds


def test_lists_that_are_not_per_layer_stay_as_they_are():
    values = {"kinds": ["a", "b", "b"], "multipliers": [1.0, 2.0, 3.0]}
    selection = select_layers(values, 3, 1, per_layer_names=("kinds",))
    assert (selection.kept, selection.overrides) == ((0, 1), {"kinds": ["a", "b"]})
    assert select_layers(values, 3, 1).kept == (0, 1, 2)  # by their length both are


def test_layer_numbers_and_token_ids_are_no_lists_per_layer():
    values = {"eos_token_id": [5, 6, 7], "mlp_only_layers": [0, 1, 2], "sizes": [4, 4, 4], "other": [1, 2], "n": 3}
    assert lists_of_length(values, 3) == ("sizes",)


class Rebuilt:
    """A config class with a field `x` that is told how to answer."""

    def __init__(
        self, values: Mapping[str, Any], *, follows: bool = False, keeps: bool = False, refuses: bool = False
    ):
        self.values, self.follows, self.keeps, self.refuses = values, follows, keeps, refuses

    def __call__(self, changes: Mapping[str, Any], without: Collection[str]) -> Mapping[str, Any] | None:
        if "x" in changes:
            return None if self.refuses else {**self.values, **changes}
        assert changes == {"layers": self.values["layers"] + 1} and "x" in without, "asked without the list itself"
        derived = [*self.values["x"], self.values["x"][-1]] if self.follows else self.values["x"]
        return {**changes, "x": derived if self.follows or self.keeps else None}


@pytest.mark.parametrize(
    ("value", "declared_layers", "answers", "is_per_layer"),
    [
        ([1, 1, 1], 9, {"follows": True}, True),
        ([1, 1, 1], 9, {"keeps": True}, False),
        ([1, 1, 1], 3, {"keeps": True}, True),  # the length of the class's own default: it shows nothing
        ([1, 1, 1], 9, {}, True),  # only a config sets it: by its length
        (["a"], 9, {}, True),  # the kind of the only layer
        ([1], 9, {}, False),  # the only number: of anything
        ([1], 9, {"refuses": True}, True),  # which the class refuses to be two
        ([1], 9, {"follows": True}, True),
        ([1], 9, {"keeps": True, "refuses": True}, False),
    ],
)
def test_a_class_shows_which_lists_have_an_entry_per_layer(value, declared_layers, answers, is_per_layer):
    values = {"layers": len(value), "x": value}
    found = fields_per_layer(values, "layers", declared_layers, Rebuilt(values, **answers))
    assert found == (("x",) if is_per_layer else ())


def test_a_class_that_refuses_one_layer_more_shows_nothing():
    values = {"layers": 2, "x": ["a", "b"]}
    assert fields_per_layer(values, "layers", 9, lambda changes, without: None) == ("x",)
