"""How ranks share the work of a proof.

Layout(4, sp=2, fsdp=True)      0 1 | 2 3     each pair shares a sequence; parameters are sharded over all four
"""

from __future__ import annotations

from dataclasses import dataclass

from patchgen.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Ranks in groups of `sp` that share a sequence, of `ep` that share the experts.

    Raises:
        ConfigError: `sp` or `ep` does not divide `ranks`, or experts would be divided without FSDP2.
    """

    ranks: int
    sp: int = 1
    ep: int = 1
    fsdp: bool = False

    def __post_init__(self) -> None:
        for option, size, shared in (("--sp", self.sp, "a sequence"), ("--ep", self.ep, "the experts")):
            if self.ranks % size:
                raise ConfigError(
                    f"{option} {size} does not divide --ranks {self.ranks}: the ranks that share {shared} form equal groups."
                )
        if self.ep > 1 and not self.fsdp:
            raise ConfigError(f"--ep {self.ep} needs FSDP2, which divides experts over ranks. To fix: add --fsdp.")

    @property
    def name(self) -> str:
        """The name in records: `4 ranks, sp 2, FSDP`."""
        shared = f"sp {self.sp}, ep {self.ep}" if self.ep > 1 else f"sp {self.sp}"
        return f"{self.ranks} ranks, {shared}, {'FSDP' if self.fsdp else 'whole parameters'}"


TWO_RANKS = {"fsdp2": Layout(2, fsdp=True), "ep2": Layout(2, ep=2, fsdp=True), "sp2": Layout(2, sp=2, fsdp=True)}
"""The layouts that "proven" depends on, by their keys in records."""
