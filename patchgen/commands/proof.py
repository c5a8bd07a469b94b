"""verify and mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen import executed_code, provenance
from patchgen.commands import checkpoints, file_errors, models_page, support_matrix
from patchgen.commands.console import console
from patchgen.errors import ConfigError, UpstreamNotFound
from patchgen.runtime.verify import code_sets, records
from patchgen.runtime.verify.committed_models import IN_ONE_PROCESS, named_models
from patchgen.runtime.verify.layout import Layout

if TYPE_CHECKING:
    from patchgen.runtime.registry import GeneratedModel


def verify(
    models: list[str],
    layout: Layout | None,
    *,
    every: bool,
    directory: Path | None,
    head: str | None,
    outdated: bool,
    code: str | None,
    generated_folder: str | None,
    config: Path | None = None,
    settings: Sequence[str] = (),
) -> int:
    """Proves models in one process and on two ranks, or in one layout of ranks, against upstream's class; 0 if all are proven.

    Prints a table and writes `verify.json` or `verify_ranks.json` for each; with `every` also the pages over all models.
    With a directory, only its file is proven, and nothing is written elsewhere. A model that was generated from a user's
    file is compared with that file, which `code` or the project names. `config` and `settings` are kept as the values of the
    model's small config, for this proof and for later ones.
    """
    subjects = _subjects(models, every=every, directory=directory, code=code, generated_folder=generated_folder)
    if config is not None or settings:
        _keep_given_values(subjects, head, config, settings)
    if outdated:
        layout_name = layout.name if layout else IN_ONE_PROCESS
        subjects = [subject for subject in subjects if not records.proof_holds(subject.name, layout_name)]
    proven = list(_prove_on_ranks(subjects, layout, head) if layout else _prove(subjects, head))
    if every:
        models_page.write()
        support_matrix.write()
    return 0 if all(proven) else 1


def _keep_given_values(
    subjects: list[GeneratedModel], head: str | None, config: Path | None, settings: Sequence[str]
) -> None:
    """Writes `--config` and `--set` beside the one model that is proven."""
    from patchgen.runtime.verify import given_config

    if len(subjects) != 1:
        raise ConfigError(
            f"--config and --set are values for the small config of one model, and {len(subjects)} are proven. To fix: name one."
        )
    (subject,) = subjects
    if not subject.is_from_user_file:
        raise ConfigError(
            f"--config and --set are for files of your own, and '{subject.name}' is upstream's. To fix: leave them out."
        )
    with _refusals_of(subject), file_errors.told(subject, head):
        config_class = getattr(subject.upstream(), head or subject.heads[0]).config_class
    path = subject.directory / given_config.FILE_NAME
    before = path.read_text(encoding="utf-8") if path.is_file() else None
    try:
        given_config.write(subject.directory, config, settings)
        with _refusals_of(subject):
            given_config.read(subject.directory).small_config(config_class)
    except BaseException as error:
        path.unlink(missing_ok=True) if before is None else path.write_text(before, encoding="utf-8")
        if isinstance(error, (OSError, ValueError)):
            raise ConfigError(str(error)) from error
        raise
    console.print(f"small config: values from {path}, also for later proofs and runs; delete it to derive them again")


@contextlib.contextmanager
def _refusals_of(subject: GeneratedModel) -> Generator[None, None, None]:
    """Raises the reasons why a model cannot be proven as errors of the command, with its name."""
    from patchgen.runtime import registry
    from patchgen.runtime.compatibility import ReleaseMismatch
    from patchgen.runtime.verify.small_config import SmallConfigError

    try:
        yield
    except registry.UnknownModelError as error:
        raise UpstreamNotFound(str(error)) from error
    except (registry.NoUpstreamError, ReleaseMismatch, SmallConfigError) as error:
        raise ConfigError(f"{subject.name} cannot be proven: {error}") from error


def _prove(subjects: list[GeneratedModel], head: str | None) -> Iterator[bool]:
    """Whether each model is proven, once its proof is written."""
    from patchgen.runtime.verify import proof_table, report, two_ranks
    from patchgen.runtime.verify.ranks import CaseFailed
    from patchgen.runtime.verify.verify_model import verify_model

    releases = records.current_key()
    for subject in subjects:
        with _refusals_of(subject), file_errors.told(subject, head):
            proof = verify_model(subject, head=head)
        try:
            proof = two_ranks.complete(proof, subject)
        except CaseFailed as failure:
            console.print(
                f"error: {subject.name} could not be compared on two processes of this machine, and its record stays as it was: "
                f"{failure.first_error} To fix: free memory or processors, and verify it again.",
                soft_wrap=True,
                markup=False,
            )
            yield False
            continue
        proof_table.print_proof(proof)
        code = executed_code.functions()
        made_on_ranks_with = code_sets.made_with(code | proof.code_on_ranks, releases)
        report.write_proof(
            proof, subject.directory, code_sets.made_with(code, releases), made_on_ranks_with=made_on_ranks_with
        )
        yield proof.is_proven


def _prove_on_ranks(subjects: list[GeneratedModel], layout: Layout, head: str | None) -> Iterator[bool]:
    """Whether each model is proven on gloo ranks, once the result is written."""
    from patchgen.runtime.verify import media_ranks, rank_report, report
    from patchgen.runtime.verify.ranks import RankPool

    for subject in subjects:
        with contextlib.closing(RankPool(layout.ranks)) as pool:
            with _refusals_of(subject):
                subject.upstream()  # a missing source fails here, not on every rank
                training = report.read_training(subject.directory, subject.file, head or subject.heads[0])
                results = media_ranks.verify_on_ranks(
                    subject,
                    pool,
                    sp=layout.sp,
                    ep=layout.ep,
                    fsdp=layout.fsdp,
                    head=head,
                    separates=training["separates_documents"] if training is not None else False,
                )
            rank_report.print_results(subject.name, layout.name, results)
            made_with = code_sets.made_with(executed_code.functions() | pool.functions(), records.current_key())
            rank_report.write_results(subject.file, layout.name, results, made_with)
            yield bool(results) and not any(result.reason for result in results)


def _subjects(
    models: list[str], *, every: bool, directory: Path | None, code: str | None, generated_folder: str | None
) -> list[GeneratedModel]:
    """The models to prove: the one in the directory, the one generated from the registered code, or the named or committed ones."""
    if directory is not None:
        return [_in_directory(models, directory, code, every=every)]
    architecture = checkpoints.register(code, generated_folder)
    if (
        architecture is not None
        and not every
        and set(models) <= {architecture.generated.name, *architecture.generated.model_types}
    ):
        return [architecture.generated]
    root = Path(generated_folder) if generated_folder is not None else provenance.generated_root()
    subjects = [_generated_model(name, root) for name in named_models(models, every=every)]
    return [
        architecture.generated if architecture is not None and subject.name == architecture.generated.name else subject
        for subject in subjects
    ]


def _generated_model(name: str, root: Path) -> GeneratedModel:
    """The model of that name in a folder, or else in this installation."""
    from patchgen.runtime import registry

    with contextlib.suppress(registry.UnknownModelError):
        return registry.find_model(name, root)
    try:
        return registry.find_model(name)
    except registry.UnknownModelError as error:
        raise UpstreamNotFound(str(error)) from error


def _in_directory(models: list[str], directory: Path, code: str | None, *, every: bool) -> GeneratedModel:
    record = provenance.read(directory)  # a wrong folder fails before torch is loaded
    if every or len(models) > 1:
        requested = "--all" if every else f"{len(models)} models"
        raise ConfigError(
            f"--directory {directory} is one model and cannot be combined with {requested}. To fix: name one, or none."
        )
    if models and models[0] not in (record["model"], *record["model_types"]):
        raise ConfigError(
            f"--directory {directory} contains '{record['model']}', but '{models[0]}' was named. To fix: omit the name, or give "
            f"the folder of '{models[0]}'."
        )

    from patchgen.runtime import project, registry

    model = registry.read_model(directory.resolve())
    code = code or project.model_settings().get("code")
    architecture = (
        checkpoints.register(code, str(directory.parent)) if model.is_from_user_file and code is not None else None
    )
    return model if architecture is None else replace(model, source=model.find_source(architecture.folder))


def mesh(world_size: int, *, dp_replicate: int, sp: int, ep: int) -> None:
    """Prints the rank map of a layout.

    Raises:
        ConfigError: a size is below 1, or the sizes do not divide `world_size`.
    """
    from patchgen.runtime.parallel.config import mesh_text

    try:
        print(mesh_text(world_size, dp_replicate=dp_replicate, sp=sp, ep=ep))
    except ValueError as error:
        raise ConfigError(str(error)) from error
