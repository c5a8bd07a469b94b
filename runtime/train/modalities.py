"""Which modalities a model can tell apart in one row: tried, before any rank starts, with small images, videos and sounds.

A packed row holds documents that know nothing of each other. Upstream's forward puts the features of all images of a row
where the tokens of images are, and those of all videos where the tokens of videos are. Where both have the same token, a
row with an image and a video fails, or is wrong:

    image  video      one row of documents of both, in turn, against each document alone (`verify/training_checks.py`)
    image  audio
    video  audio      equal: they may share a row    anything else: the packer keeps them apart
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from patchgen.runtime import attention
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.document_rows import Separated
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.verify.media import MediaMaker
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.training_checks import Comparison
from patchgen.runtime.verify.training_inputs import Documents
from patchgen.runtime.verify.training_path import cpu_attention, single_rank

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Pair = tuple[str, str]


def kept_apart(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    attention_name: Names,
    separates_documents: Separated = False,
) -> tuple[Pair, ...]:
    """The pairs of modalities of which a row may not hold both.

    Args:
        upstream_class: what is compared with; the generated class itself where there is none.
        config: a small one.
        attention_name: of the run.
        separates_documents: whether a run computes documents in rows of their own.
    """
    taken = MediaMaker.taken_by(generated_class)
    pairs: list[Pair] = [(min(pair), max(pair)) for pair in itertools.combinations(taken, 2)]
    if not pairs:
        return ()
    attention.register()
    comparison = Comparison(upstream_class, generated_class, config, media=False)
    builder = SampleBuilder(comparison.reference)
    if separates_documents:
        comparison = comparison.with_separate_documents(separates_documents)
    comparison.compared_attention = cpu_attention(
        attention_name, comparison.choose(comparison.config, {}), comparison.config
    )
    with single_rank() as state:
        comparison.state = state
        return tuple(sorted(pair for pair in pairs if not _is_told_apart(pair, builder, comparison)))


def _is_told_apart(pair: Pair, builder: SampleBuilder, comparison: Comparison) -> bool:
    """Whether a row of documents of both, in turn, computes what each of them computes alone."""
    if not builder.layouts.keys() >= set(pair):
        return False  # no input of it could be made, so nothing is known
    known = len(comparison.failures)
    try:
        samples = [builder.sample([3, builder.maker.item(kind, number), 4]) for number in (0, 1) for kind in pair]
        rows = tuple(dict(builder.case("alone", [sample]).batch) for sample in samples)
        documents = Documents(rows, dict(builder.case("together", samples).batch))
        comparison.documents(" and ".join(pair), documents, documents.packed(comparison.positions))
    except Exception:  # upstream's forward or ours: whatever it raises, such a row cannot be trained
        return False
    return len(comparison.failures) == known


def with_apart(recipe: Recipe, pairs: Sequence[Pair]) -> Recipe:
    """The recipe whose rows hold no pair of modalities that the model cannot tell apart.

    Raises:
        RecipeError: the recipe wants such rows.
    """
    needed = {tuple(sorted(pair)) for pair in pairs}
    sections = {name: getattr(recipe, name) for name in ("data", "eval_data") if getattr(recipe, name) is not None}
    for name, data in sections.items():
        wanted = data.separate_modalities
        if wanted is not None and (lacking := sorted(needed - set(wanted))):
            told = " and ".join(" and ".join(pair) for pair in lacking)
            raise RecipeError(
                f"{name}.separate_modalities = {[list(pair) for pair in wanted]}: '{recipe.model.source}' cannot tell {told} "
                "apart in one row. Leave it out."
            )
        sections[name] = replace(data, separate_modalities=tuple(sorted(needed | set(wanted or ()))))
    return replace(recipe, **sections) if needed else recipe
