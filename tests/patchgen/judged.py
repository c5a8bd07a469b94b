"""A changed source held against the proof: refused by the generator, told by what `patchgen verify` says of the file, or equal.

judged(case)                                     # the proof in one process, with what it observes
judged(case, pool=two_ranks)                     # then two ranks, if one process says nothing
assert judged(case).kind in (REFUSED, TOLD)      # otherwise the change is silent
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence

import torch
from changed_sources import SourceChange
from generation_cases import default_config, edited, load

from patchgen import pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.runtime import registry
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.verify import mutants_on_ranks, told
from patchgen.runtime.verify.changed_modules import changed_module
from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.layout import Layout
from patchgen.runtime.verify.model_pair import build_model, config_class_of
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media
from patchgen.runtime.verify.mutants import (
    EQUAL,
    NOT_RUN,
    REFUSED,
    TOLD,
    WRONG,
    Verdict,
    head_of,
    one_line,
    refusing_pass,
)
from patchgen.runtime.verify.ranks import RankPool
from patchgen.runtime.verify.small_config import small_config
from patchgen.upstream import Upstream

BASE = ("base",)


def judged(
    case: SourceChange,
    *,
    pool: RankPool | None = None,
    layouts: Sequence[Layout] = mutants_on_ranks.LAYOUTS,
    variants: Iterable[str] = BASE,
    implementations: Collection[str] = (),
) -> Verdict:
    """The verdict on a change; `by` is the refusing pass, or which part of the proof tells it.

    Args:
        pool: two ranks, asked if nothing tells the change in one process.
        variants: of the config; each takes seconds.
        implementations: those of seams that the proof compares beside those of a run.
    """
    origin = edited(load(case.model), *case.edits)
    try:
        generated = pipeline.generate(origin, default_config(case.model))
    except PatchgenError as error:
        return Verdict(REFUSED, one_line(error), refusing_pass(str(error)))
    head = head_of(generated, origin)
    with changed_module(origin.module, origin.text, {}) as module:
        try:
            changed = getattr(module.load(), head)
            _upstream_step(changed)
        except Exception as error:  # changed code may raise anything
            return Verdict(NOT_RUN, one_line(error))
        folder = module.folder / "generated"
        provenance.write(generated, folder, force=True)
        try:
            generated_class = getattr(registry.read_model(folder).load(), head)
            found = told.findings(changed, generated_class, variants=tuple(variants), implementations=implementations)
        except Exception as error:  # of the generated file alone: upstream's has run
            reraise_machine_failure(error)
            return Verdict(TOLD, one_line(error), told.PROOF)
    if found != told.Findings() and (tells := told.beyond(found, usual(case.model, tuple(variants)))):
        return Verdict(TOLD, tells.words, tells.by)
    if pool is None:
        return Verdict(EQUAL, files=generated.files)
    subject = mutants_on_ranks.Subject(origin.module, head, origin.text, {}, dict(generated.files))
    on_ranks = mutants_on_ranks.verdict(pool, subject, layouts)
    if on_ranks.kind in (WRONG, REFUSED):
        return Verdict(TOLD, on_ranks.detail, told.TWO_RANKS)
    return on_ranks


@functools.cache
def usual(model: str, variants: tuple[str, ...] = BASE) -> told.Findings:
    """What the proof says of the unchanged file."""
    origin: Upstream = load(model)
    generated = pipeline.generate(origin, default_config(model))
    head = head_of(generated, origin)
    with changed_module(origin.module, origin.text, {}) as module:
        provenance.write(generated, module.folder / "generated", force=True)
        generated_class = getattr(registry.read_model(module.folder / "generated").load(), head)
        return told.findings(getattr(module.load(), head), generated_class, variants=variants)


def _upstream_step(upstream_class: type) -> None:
    """A step of the changed class itself: a change that raises there is none."""
    torch.manual_seed(0)
    model = build_model(upstream_class, small_config(config_class_of(upstream_class)).config)
    cases = media_cases(model).cases if takes_media(upstream_class) else text_cases(model.config, upstream_class)
    train_step(model, cases[0])
