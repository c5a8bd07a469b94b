"""How many ranks each kind of parallelism gets, and the map of ranks. Imports no torch: `patchgen mesh` only draws.

print(mesh_text(world=8, sp=2, ep=4))
"""

from __future__ import annotations

from dataclasses import dataclass

DENSE_DIMENSIONS = ("dp_replicate", "dp_shard", "sp")
EXPERT_DIMENSIONS = ("dp_replicate", "ep_shard", "ep")
_COLUMNS = 16  # ranks per line of the map


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of both meshes over the same ranks.

    Dense parameters live on `dp_replicate x dp_shard x sp`; experts on `dp_replicate x ep_shard x ep`, where
    `ep_shard = dp_shard * sp / ep`. The last dimension varies fastest. For 8 ranks with `sp=2, ep=4`:

        rank          0   1   2   3   4   5   6   7
        dense mesh
          sequence    [ batch 0 ] [ batch 1 ] [ batch 2 ] [ batch 3 ]      dp_shard 4
          sp          0   1   0   1   0   1   0   1
          parameters  [ ----------- one shard each ----------- ]           dp_shard * sp = 8 shards
        expert mesh
          ep          0   1   2   3   0   1   2   3                        4 groups of experts
          ep_shard    [     0     ]   [     1     ]                        2 shards of each expert

    The ranks of an SP group share one batch, each with a slice of the sequence. An EP group exchanges tokens; it may span
    SP ranks, because each rank routes only the tokens of its slice.

    Attributes:
        dp_replicate: copies of the model (HSDP).
        dp_shard: shards over different batches.
        sp: ranks that share one sequence (Ulysses).
        ep: groups of experts.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    sp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "sp", "ep"):
            _require_size(name, getattr(self, name))
        if self.num_shards % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide the {self.num_shards} ranks of one replica (dp_shard * sp = {self.dp_shard} * "
                f"{self.sp}), so they cannot be grouped into EP groups of equal size. To fix: choose ep from "
                f"{_divisors(self.num_shards)}."
            )

    @property
    def world(self) -> int:
        """The number of ranks: `dp_replicate * dp_shard * sp`."""
        return self.dp_replicate * self.dp_shard * self.sp

    @property
    def num_batches(self) -> int:
        """Different batches per micro-step: `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard

    @property
    def num_shards(self) -> int:
        """Shards of a dense parameter: `dp_shard * sp`."""
        return self.dp_shard * self.sp

    @property
    def ep_shard(self) -> int:
        """Shards of one expert: `dp_shard * sp / ep`."""
        return self.num_shards // self.ep

    @classmethod
    def for_world(cls, world: int, *, dp_replicate: int = 1, sp: int = 1, ep: int = 1) -> ParallelConfig:
        """The configuration of `world` ranks, with `dp_shard = world / (dp_replicate * sp)`.

        Raises:
            ValueError: a size below 1, or sizes that do not divide `world`.
        """
        for name, size in (("world", world), ("dp_replicate", dp_replicate), ("sp", sp)):
            _require_size(name, size)
        if world % (dp_replicate * sp):
            raise ValueError(
                f"dp_replicate * sp = {dp_replicate} * {sp} = {dp_replicate * sp} does not divide the number of ranks, {world}. "
                f"To fix: choose dp_replicate and sp so that their product is one of {_divisors(world)}; dp_shard is the rest."
            )
        return cls(dp_replicate=dp_replicate, dp_shard=world // (dp_replicate * sp), sp=sp, ep=ep)

    def require_world(self, world: int) -> None:
        """Raises ValueError unless the sizes multiply to the number of launched ranks."""
        if self.world != world:
            raise ValueError(
                f"dp_replicate * dp_shard * sp = {self.dp_replicate} * {self.dp_shard} * {self.sp} = {self.world}, "
                f"but {world} ranks are running. To fix: change one of the three sizes, or launch {self.world} ranks."
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank in both meshes."""
        replica, shard = divmod(rank, self.num_shards)
        return {
            "dp_replicate": replica,
            "dp_shard": shard // self.sp,
            "sp": shard % self.sp,
            "ep_shard": shard // self.ep,
            "ep": shard % self.ep,
        }

    def groups(self, dimension: str) -> list[list[int]]:
        """The groups of ranks that differ only in `dimension`, in the mesh that has it."""
        mesh = next(mesh for mesh in (DENSE_DIMENSIONS, EXPERT_DIMENSIONS) if dimension in mesh)
        other_dimensions = [name for name in mesh if name != dimension]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            coordinates = self.coordinates(rank)
            groups.setdefault(tuple(coordinates[name] for name in other_dimensions), []).append(rank)
        return list(groups.values())


def mesh_text(world: int, *, dp_replicate: int = 1, sp: int = 1, ep: int = 1) -> str:
    """The rank map of `world` ranks as text: what `patchgen mesh` prints."""
    return draw(ParallelConfig.for_world(world, dp_replicate=dp_replicate, sp=sp, ep=ep))


def draw(config: ParallelConfig) -> str:
    """Both meshes as a table with a column per rank, then the groups of several ranks of sp, ep, ep_shard and dp_replicate."""
    lines = [
        f"{config.world} ranks",
        f"  dense parameters  dp_replicate {config.dp_replicate} x dp_shard {config.dp_shard} x sp {config.sp}"
        f"    ({config.num_shards} shards, {config.num_batches} batches per micro-step)",
        f"  experts           dp_replicate {config.dp_replicate} x ep_shard {config.ep_shard} x ep {config.ep}"
        f"    (1/{config.ep} of the experts per rank, each in {config.ep_shard} shards)",
    ]
    for start in range(0, config.world, _COLUMNS):
        ranks = range(start, min(start + _COLUMNS, config.world))
        columns = [{"rank": rank, "batch": rank // config.sp, **config.coordinates(rank)} for rank in ranks]
        lines.append("")
        lines += [f"  {label:<14}" + "".join(f"{column[label]:>4}" for column in columns) for label in columns[0]]
    purposes = {
        "sp": "share a sequence; attention exchanges heads",
        "ep": "share the experts; tokens are exchanged",
        "ep_shard": "hold shards of the same experts; their gradients are reduced",
        "dp_replicate": "hold the same shards; their gradients are summed",
    }
    lines.append("")
    for dimension, purpose in purposes.items():
        groups = config.groups(dimension)
        if len(groups[0]) > 1:
            listed = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups[:8])
            more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
            lines.append(f"  {dimension} groups ({purpose}): {listed}{more}")
    return "\n".join(lines).rstrip()


def _require_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"The parallel size {name} must be an integer of at least 1, found {value!r}.")


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
