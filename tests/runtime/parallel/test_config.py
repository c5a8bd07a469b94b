"""The sizes of the meshes, and the rank map drawn from them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from patchgen.runtime.parallel import ParallelConfig, mesh_text


def test_dp_shard_is_what_the_other_sizes_leave():
    config = ParallelConfig.for_world(16, dp_replicate=2, sp=2, ep=4)
    assert (config.dp_shard, config.num_shards, config.ep_shard, config.num_batches) == (4, 8, 2, 8)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"world": 8, "sp": 3}, r"dp_replicate \* sp = 1 \* 3 = 3 does not divide the number of ranks, 8"),
        ({"world": 8, "dp_replicate": 4, "sp": 4}, r"their product is one of \[1, 2, 4, 8\]"),
        ({"world": 8, "ep": 3}, r"ep=3 does not divide the 8 ranks of one replica \(dp_shard \* sp = 8 \* 1\)"),
        ({"world": 8, "dp_replicate": 2, "ep": 8}, r"choose ep from \[1, 2, 4\]"),
        ({"world": 8, "ep": 0}, "ep must be an integer of at least 1, found 0"),
        ({"world": 8, "dp_replicate": 0}, "dp_replicate must be an integer of at least 1, found 0"),
    ],
)
def test_invalid_sizes_are_named(sizes, message):
    with pytest.raises(ValueError, match=message):
        ParallelConfig.for_world(**sizes)


def test_a_configuration_for_another_number_of_ranks_is_refused():
    with pytest.raises(ValueError, match=r"1 \* 4 \* 2 = 8, but 6 ranks are running"):
        ParallelConfig(dp_shard=4, sp=2).require_world(6)


def test_groups_are_those_of_the_docstring():
    config = ParallelConfig.for_world(8, sp=2, ep=4)
    assert config.groups("sp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert config.groups("ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert config.groups("ep_shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert config.groups("dp_shard") == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize("dimension", ["dp_replicate", "dp_shard", "sp", "ep", "ep_shard"])
def test_groups_of_a_dimension_tile_the_ranks(dimension):
    config = ParallelConfig(dp_replicate=2, dp_shard=4, sp=2, ep=4)
    groups = config.groups(dimension)
    assert sorted(rank for group in groups for rank in group) == list(range(config.world))
    assert {len(group) for group in groups} == {getattr(config, dimension)}


def test_the_map_shows_every_rank_and_the_groups():
    text = mesh_text(16, ep=4, sp=2)
    assert "16 ranks" in text
    assert "ep groups (share the experts; tokens are exchanged): [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["ep", *(str(rank % 4) for rank in range(16))] in rows
    assert ["sp", *(str(rank % 2) for rank in range(16))] in rows


def test_drawing_loads_no_torch():
    code = "import sys; from patchgen.runtime.parallel import mesh_text; mesh_text(4); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
