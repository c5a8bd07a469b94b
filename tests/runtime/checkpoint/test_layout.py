"""The folder of a model's original is known by all keys and shapes; states of earlier versions know one key of each kind."""

from __future__ import annotations

from patchgen.runtime.checkpoint.layout import Origin

KEYS = {f"model.layers.{layer}.w": (2, 3) for layer in (0, 1)}


def test_another_number_of_layers_or_another_shape_of_one_is_another_checkpoint():
    origin = Origin.from_json(Origin.of("there", KEYS).to_json())
    assert origin == Origin.of("there", dict(reversed(KEYS.items())))
    assert Origin.of("elsewhere", KEYS).has_tensors_of(origin)
    for changes in ({"model.layers.2.w": (2, 3)}, {"model.layers.1.w": (3, 2)}):
        assert not Origin.of("there", KEYS | changes).has_tensors_of(origin)


def test_an_origin_saved_by_an_earlier_version_is_compared_by_its_patterns():
    earlier = Origin.from_json({"directory": "there", "shapes": Origin.of("there", KEYS).shapes})
    assert Origin.of("here", KEYS | {"model.layers.2.w": (2, 3)}).has_tensors_of(earlier)
    assert not Origin.of("here", KEYS | {"model.norm": (2,)}).has_tensors_of(earlier)
