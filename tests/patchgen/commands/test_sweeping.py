"""Types that a sweep is asked for by name and that it cannot take are refused before any row is made."""

from __future__ import annotations

import pytest

from patchgen.commands import sweeping
from patchgen.errors import ConfigError


def on_ranks(kind: str, output, family: str = "text") -> int:
    return sweeping.sweep_ranks(family, [kind], 2, 1, 2, output, fresh=False)


def in_one_process(kind: str, output, family: str = "text") -> int:
    return sweeping.sweep(family, 1, None, [kind], output, fresh=False)


@pytest.mark.parametrize("start", [on_ranks, in_one_process])
def test_a_type_that_does_not_exist_is_named_and_leaves_no_row(start, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"--only qwen3_mo: transformers .* has no such type \(nearest: qwen3_moe.*patchgen verify --code FOLDER",
    ):
        start("qwen3_mo", tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("start", [on_ranks, in_one_process])
def test_a_type_of_the_other_kind_says_how_it_is_swept(start, tmp_path):
    with pytest.raises(
        ConfigError,
        match="--only qwen3_vl: transformers .* has no causal head of that type, but .*give --family media",
    ):
        start("qwen3_vl", tmp_path)
    with pytest.raises(ConfigError, match="no head with media of that type, but .*omit --family media"):
        start("qwen3_moe", tmp_path, "vision")
    assert not list(tmp_path.iterdir())
