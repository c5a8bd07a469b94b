"""How many ranks each kind of parallelism gets, and where they lie. Imports no torch: `patchgen mesh` only draws.

print(mesh_text(world=8, sp=2, ep=4))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelConfig:
    """The sizes of the two views of the same ranks.

    Dense parameters live on `dp_replicate x dp_shard x sp`; experts on `dp_replicate x ep_shard x ep`, where
    `ep_shard = dp_shard * sp / ep`. The last dimension is the contiguous one. For 8 ranks with `sp=2, ep=4`:

        rank          0   1   2   3   4   5   6   7
        dense view
          sequence    [ batch 0 ] [ batch 1 ] [ batch 2 ] [ batch 3 ]      dp_shard 4
          sp          0   1   0   1   0   1   0   1
          parameters  [ ----------- one shard each ----------- ]           dp_shard * sp = 8 shards
        expert view
          ep          0   1   2   3   0   1   2   3                        4 groups of experts
          ep_shard    [     0     ]   [     1     ]                        2 shards of each expert

    An SP group holds one batch, each rank a slice of the sequence. An EP group exchanges tokens; it may span SP ranks,
    for a rank owns the tokens of its slice and no others.

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
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"ParallelConfig.{name} must be a whole number of at least 1, not {value!r}.")
        if (self.dp_shard * self.sp) % self.ep:
            raise ValueError(
                f"ep={self.ep} does not divide dp_shard * sp = {self.dp_shard} * {self.sp} = "
                f"{self.dp_shard * self.sp}: the experts' groups must tile the ranks of one replica. Choose ep from "
                f"{_divisors(self.dp_shard * self.sp)}."
            )

    @property
    def world(self) -> int:
        """All ranks: `dp_replicate * dp_shard * sp`."""
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
        """The configuration of `world` ranks, `dp_shard` taking what the others leave.

        Raises:
            ValueError: the sizes do not multiply to `world`.
        """
        if world < 1 or dp_replicate < 1 or sp < 1 or world % (dp_replicate * sp):
            raise ValueError(
                f"dp_replicate={dp_replicate} times sp={sp} does not divide the {world} ranks. "
                f"dp_replicate * sp must be one of {_divisors(world)}."
            )
        return cls(dp_replicate=dp_replicate, dp_shard=world // (dp_replicate * sp), sp=sp, ep=ep)

    def require_world(self, world: int) -> None:
        """Raises unless the sizes multiply to the number of ranks that were launched."""
        if self.world != world:
            raise ValueError(
                f"dp_replicate * dp_shard * sp = {self.dp_replicate} * {self.dp_shard} * {self.sp} = {self.world}, "
                f"but {world} ranks are running. Change one of the three, or launch {self.world} ranks."
            )

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank lies in both views."""
        replica, within = divmod(rank, self.num_shards)
        return {
            "dp_replicate": replica,
            "dp_shard": within // self.sp,
            "sp": within % self.sp,
            "ep_shard": within // self.ep,
            "ep": within % self.ep,
        }

    def groups(self, dimension: str) -> list[list[int]]:
        """The groups of ranks that differ in `dimension` only, in the view it belongs to."""
        view = ("dp_replicate", "ep_shard", "ep") if dimension.startswith("ep") else ("dp_replicate", "dp_shard", "sp")
        others = [name for name in view if name != dimension]
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            place = self.coordinates(rank)
            found.setdefault(tuple(place[name] for name in others), []).append(rank)
        return list(found.values())


def mesh_text(world: int, *, dp_replicate: int = 1, sp: int = 1, ep: int = 1) -> str:
    """The rank map of `world` ranks as text: what `patchgen mesh` prints."""
    return draw(ParallelConfig.for_world(world, dp_replicate=dp_replicate, sp=sp, ep=ep))


def draw(config: ParallelConfig, columns: int = 16) -> str:
    """Both views as a table with a column per rank (`columns` ranks a row), then the groups of each collective."""
    lines = [
        f"{config.world} ranks",
        f"  dense parameters  dp_replicate {config.dp_replicate} x dp_shard {config.dp_shard} x sp {config.sp}"
        f"    ({config.num_shards} shards, {config.num_batches} batches per micro-step)",
        f"  experts           dp_replicate {config.dp_replicate} x ep_shard {config.ep_shard} x ep {config.ep}"
        f"    (1/{config.ep} of the experts per rank, each in {config.ep_shard} shards)",
    ]
    for start in range(0, config.world, columns):
        ranks = range(start, min(start + columns, config.world))
        places = {rank: config.coordinates(rank) for rank in ranks}

        def row(label: str, value: Callable[[int], int], ranks: Iterable[int] = ranks) -> str:
            return f"  {label:<14}" + "".join(f"{value(rank):>4}" for rank in ranks)

        lines += [
            "",
            row("rank", lambda rank: rank),
            row("batch", lambda rank: rank // config.sp),
            *(
                row(name, lambda rank, name=name, places=places: places[rank][name])
                for name in ("dp_replicate", "dp_shard", "sp", "ep_shard", "ep")
            ),
        ]
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
            shown = " ".join("[" + " ".join(map(str, group)) + "]" for group in groups[:8])
            more = f" and {len(groups) - 8} more" if len(groups) > 8 else ""
            lines.append(f"  {dimension} groups ({purpose}): {shown}{more}")
    return "\n".join(lines).rstrip()


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
