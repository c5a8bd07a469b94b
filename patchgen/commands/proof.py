"""verify and mesh. The only commands that load the runtime are here and in `sweeping`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from patchgen import provenance
from patchgen.commands import models_page, support_matrix
from patchgen.errors import ConfigError, UpstreamNotFound
from patchgen.runtime.verify import records
from patchgen.runtime.verify.committed_models import IN_ONE_PROCESS, Committed, named
from patchgen.runtime.verify.layout import Layout


def verify(
    models: list[str], layout: Layout | None, *, every: bool, directory: Path | None, head: str | None, outdated: bool
) -> int:
    """Proves models in one process, or on ranks against upstream's class on one; 0 if all are proven.

    Prints a table each, writes `verify.json` or `verify_ranks.json` beside each file; with `every` also the pages, which
    tell of all models. With a directory, that file alone is proven, and nothing is written outside of it.
    """
    names = _names(models, every=every, directory=directory)
    if outdated:
        how = layout.name if layout else IN_ONE_PROCESS
        names = [name for name in names if not records.proof_holds(name, how)]

    from patchgen.runtime import registry

    proven = _prove_on_ranks(names, layout, directory, head) if layout else _prove(names, directory, head)
    try:
        failed = [is_proven for is_proven in proven if not is_proven]
    except registry.UnknownModelError as error:
        raise UpstreamNotFound(str(error)) from error
    if every:
        models_page.write()
        support_matrix.write()
    return 1 if failed else 0


def _prove(names: list[str], directory: Path | None, head: str | None) -> Iterator[bool]:
    """For each model, once its proof is written, whether it is proven."""
    from patchgen.runtime.compatibility import ReleaseMismatch
    from patchgen.runtime.verify import report
    from patchgen.runtime.verify.small_config import SmallConfigError
    from patchgen.runtime.verify.verify_model import NoUpstreamError, verify_model

    key = records.present_key()
    for name in names:
        try:
            proof = verify_model(name, directory=directory, head=head)
        except (NoUpstreamError, ReleaseMismatch, SmallConfigError) as error:
            raise ConfigError(f"'{name}' cannot be proven: {error}") from error
        report.print_proof(proof)
        report.write_proof(proof, directory or Committed(name).folder, records.made_with(key["prover"], key))
        yield proof.is_proven


def _prove_on_ranks(names: list[str], layout: Layout, directory: Path | None, head: str | None) -> Iterator[bool]:
    """The same on gloo processes."""
    from patchgen.runtime.verify import media_ranks, rank_report
    from patchgen.runtime.verify.ranks import RankPool

    key = records.present_key()
    with contextlib.closing(RankPool(layout.ranks)) as pool:
        for name in names:
            subject = media_ranks.find(directory.resolve() if directory else name)
            results = media_ranks.verify_on_ranks(
                subject.directory, pool, sp=layout.sp, ep=layout.ep, fsdp=layout.fsdp, head=head
            )
            rank_report.print_results(name, layout.name, results)
            made_with = records.made_with(key["rank_prover"], key)
            rank_report.write_results(subject.file, layout.name, results, made_with)
            yield bool(results) and not any(one.reason for one in results)


def _names(models: list[str], *, every: bool, directory: Path | None) -> list[str]:
    """The models that a command is about; with a directory, the one in it."""
    if directory is None:
        return named(models, every=every)
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
