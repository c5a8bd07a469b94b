"""verify and mesh. The only commands that load the runtime are here and in `sweeping`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from patchgen import provenance
from patchgen.commands import records, support_matrix
from patchgen.commands.generation import committed
from patchgen.commands.models_page import write_models_page
from patchgen.errors import ConfigError, UpstreamNotFound


def verify(models: list[str], *, every: bool, directory: Path | None, head: str | None, outdated: bool = False) -> int:
    """Proves models, prints a table each, writes `verify.json` beside each file; 0 if all are proven.

    Pages that speak of other models too (docs/models.md, docs/parallel.md, the README) are written with `every` only.
    With a directory, that file alone is proven, and nothing is written outside of it.
    """
    names = _names(models, every=every, directory=directory)
    if outdated:
        names = [name for name in names if not records.proof_holds(name)]

    from patchgen.runtime import registry
    from patchgen.runtime.compatibility import ReleaseMismatch
    from patchgen.runtime.verify import report
    from patchgen.runtime.verify.small_config import SmallConfigError
    from patchgen.runtime.verify.verify_model import NoUpstreamError, verify_model

    key = records.present_key()
    failed = []
    for name in names:
        try:
            proof = verify_model(name, directory=directory, head=head)
        except registry.UnknownModelError as error:
            raise UpstreamNotFound(str(error)) from error
        except (NoUpstreamError, ReleaseMismatch, SmallConfigError) as error:
            raise ConfigError(f"'{name}' cannot be proven: {error}") from error
        report.print_proof(proof)
        folder = directory or provenance.generated_root() / name
        report.write_proof(proof, folder, records.made_with(key["prover"], key))
        if not proof.is_proven:
            failed.append(name)
    if every:
        write_models_page()
        support_matrix.write()
    return 1 if failed else 0


@dataclass(frozen=True)
class Layout:
    """How ranks share the work: in groups of `sp` that share a sequence, of `ep` that share the experts."""

    ranks: int
    sp: int = 1
    ep: int = 1
    fsdp: bool = False

    def __post_init__(self) -> None:
        for option, size, who in (("--sp", self.sp, "a sequence"), ("--ep", self.ep, "the experts")):
            if self.ranks % size:
                raise ConfigError(
                    f"{option} {size} does not divide --ranks {self.ranks}: the ranks that share {who} form whole groups."
                )
        if self.ep > 1 and not self.fsdp:
            raise ConfigError(f"--ep {self.ep} divides experts over ranks, which FSDP2 does: add --fsdp.")

    @property
    def name(self) -> str:
        """How the record calls it: `4 ranks, sp 2, FSDP`."""
        shared = f"sp {self.sp}, ep {self.ep}" if self.ep > 1 else f"sp {self.sp}"
        return f"{self.ranks} ranks, {shared}, {'FSDP' if self.fsdp else 'whole parameters'}"


def verify_on_ranks(
    models: list[str],
    layout: Layout,
    *,
    every: bool,
    directory: Path | None,
    head: str | None,
    outdated: bool = False,
) -> int:
    """Proves models on gloo processes against upstream's class on one; writes `verify_ranks.json`; 0 if all agree.

    Pages are written with `every` only. With a directory, that file alone is proven, and nothing is written outside of it.
    """
    names = _names(models, every=every, directory=directory)
    if outdated:
        names = [name for name in names if not records.proof_holds(name, layout.name)]

    from patchgen.runtime import registry
    from patchgen.runtime.verify import media_ranks, rank_report
    from patchgen.runtime.verify.ranks import RankPool

    key = records.present_key()
    failed = []
    pool = RankPool(layout.ranks)
    try:
        for name in names:
            try:
                subject = media_ranks.find(directory.resolve() if directory else name)
            except registry.UnknownModelError as error:
                raise UpstreamNotFound(str(error)) from error
            results = media_ranks.verify_on_ranks(
                subject.directory, pool, sp=layout.sp, ep=layout.ep, fsdp=layout.fsdp, head=head
            )
            rank_report.print_results(name, layout.name, results)
            made_with = records.made_with(key["rank_prover"], key)
            rank_report.write_results(subject.file, layout.name, results, made_with)
            if not results or any(one.reason for one in results):
                failed.append(name)
    finally:
        pool.close()
    if every:
        write_models_page()
        support_matrix.write()
    return 1 if failed else 0


def _names(models: list[str], *, every: bool, directory: Path | None) -> list[str]:
    """The models that a command is about; with a directory, the one in it."""
    if directory is None:
        names = committed() if every else models
        if not names:
            raise UpstreamNotFound("No model was named. Give model types, or --all for the committed ones.")
        return names
    record = provenance.read(directory)  # a folder that is none is named before torch is loaded
    if every or len(models) > 1:
        raise ConfigError(f"--directory {directory} is one model, and several were named. Name one, or none.")
    if models and models[0] not in (record["model"], *record["model_types"]):
        raise ConfigError(f"--directory {directory} holds '{record['model']}', and '{models[0]}' was named.")
    return models or [record["model"]]


def mesh(world: int, *, dp_replicate: int, sp: int, ep: int) -> None:
    """Prints the rank map of a layout; one that does not multiply is an error that names the numbers."""
    from patchgen.runtime.parallel.config import mesh_text

    try:
        print(mesh_text(world, dp_replicate=dp_replicate, sp=sp, ep=ep))
    except ValueError as error:
        raise ConfigError(str(error)) from error
