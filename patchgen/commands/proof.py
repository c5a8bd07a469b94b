"""verify and mesh. The only commands that load the runtime are here and in `sweeping`."""

from __future__ import annotations

from pathlib import Path

from patchgen import provenance
from patchgen.commands import support_matrix
from patchgen.commands.generation import committed
from patchgen.commands.models_page import write_models_page
from patchgen.errors import ConfigError, UpstreamNotFound


def verify(models: list[str], *, every: bool, directory: Path | None, head: str | None) -> int:
    """Proves models, prints a table each, writes `verify.json` beside each file and docs/models.md; 0 if all are proven."""
    names = committed() if every else models
    if not names:
        raise UpstreamNotFound("No model was named. Give model types, or --all for the committed ones.")
    if directory is not None:
        provenance.read(directory)  # a folder that is none is named before torch is loaded

    from patchgen.runtime import registry
    from patchgen.runtime.compatibility import ReleaseMismatch
    from patchgen.runtime.verify import report
    from patchgen.runtime.verify.small_config import SmallConfigError
    from patchgen.runtime.verify.verify_model import NoUpstreamError, verify_model

    failed = []
    for name in names:
        try:
            proof = verify_model(name, directory=directory, head=head)
        except registry.UnknownModelError as error:
            raise UpstreamNotFound(str(error)) from error
        except (NoUpstreamError, ReleaseMismatch, SmallConfigError) as error:
            raise ConfigError(f"'{name}' cannot be proven: {error}") from error
        report.print_proof(proof)
        report.write_proof(proof, directory or provenance.generated_root() / name)
        if not proof.is_proven:
            failed.append(name)
    if directory is None:
        write_models_page()
        support_matrix.write()
    return 1 if failed else 0


def verify_on_ranks(models: list[str], *, every: bool, head: str | None, ranks: int, sp: int, fsdp: bool) -> int:
    """Proves models on gloo processes against upstream's class on one; writes `verify_ranks.json`; 0 if all agree."""
    names = committed() if every else models
    if not names:
        raise UpstreamNotFound("No model was named. Give model types, or --all for the committed ones.")
    if ranks % sp:
        raise ConfigError(
            f"--sp {sp} does not divide --ranks {ranks}: the ranks that share a sequence form whole groups."
        )

    from patchgen.runtime import registry
    from patchgen.runtime.verify import media_ranks, rank_report
    from patchgen.runtime.verify.ranks import RankPool

    layout = rank_report.layout_name(ranks, sp, fsdp)
    failed = []
    pool = RankPool(ranks)
    for name in names:
        try:
            model = registry.find_model(name)
        except registry.UnknownModelError as error:
            raise UpstreamNotFound(str(error)) from error
        results = media_ranks.verify_on_ranks(name, pool, sp=sp, fsdp=fsdp, head=head)
        rank_report.print_results(name, layout, results)
        rank_report.write_results(model.file, layout, results)
        if not results or any(one.reason for one in results):
            failed.append(name)
    pool.close()
    write_models_page()
    support_matrix.write()
    return 1 if failed else 0


def mesh(world: int, *, dp_replicate: int, sp: int, ep: int) -> None:
    """Prints the rank map of a layout; one that does not multiply is an error that names the numbers."""
    from patchgen.runtime.parallel.config import mesh_text

    try:
        print(mesh_text(world, dp_replicate=dp_replicate, sp=sp, ep=ep))
    except ValueError as error:
        raise ConfigError(str(error)) from error
