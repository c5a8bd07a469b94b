"""Which modalities a packed row may mix: tested, before any rank starts, with small images, videos and sounds.

Documents of a packed row must not affect each other. Upstream's forward scatters the features of all images of a row to its
image tokens, and those of all videos to its video tokens. If a model uses the same token for both, a row with an image and a
video fails or is wrong:

    image  video      one row of documents of both, alternating, against each document alone (`verify/training_checks.py`)
    image  audio
    video  audio      equal: they may share a row    anything else: the packer separates them
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from patchgen.runtime import attention
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.verify.media import MediaMaker
from patchgen.runtime.verify.media_samples import SampleBuilder
from patchgen.runtime.verify.training_checks import Comparison
from patchgen.runtime.verify.training_inputs import Documents
from patchgen.runtime.verify.training_path import cpu_attention, single_rank

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Pair = tuple[str, str]


def separate_pairs(
    upstream_class: type[PreTrainedModel],
    generated_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    *,
    attention_name: Names,
    separates_documents: DocumentSeparation = False,
) -> tuple[Pair, ...]:
    """The pairs of modalities that must not share a row.

    Args:
        upstream_class: the reference; the generated class itself if there is no upstream class.
        config: a small one of this model.
        attention_name: the attention of the run.
        separates_documents: whether the run computes each document in its own row.
    """
    accepted = MediaMaker.media_arguments(generated_class)
    pairs: list[Pair] = [(min(pair), max(pair)) for pair in itertools.combinations(accepted, 2)]
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
        return tuple(sorted(pair for pair in pairs if not _may_share_row(pair, builder, comparison)))


def _may_share_row(pair: Pair, builder: SampleBuilder, comparison: Comparison) -> bool:
    """Whether a row of alternating documents of both modalities gives the results of each document alone."""
    if not builder.layouts.keys() >= set(pair):
        return False  # no input could be built, so nothing is known
    previous_failures = len(comparison.failures)
    try:
        samples = [builder.sample([3, builder.maker.item(kind, number), 4]) for number in (0, 1) for kind in pair]
        rows = tuple(dict(builder.case("alone", [sample]).batch) for sample in samples)
        documents = Documents(rows, dict(builder.case("together", samples).batch))
        comparison.documents(" and ".join(pair), documents, documents.packed(comparison.positions))
    except Exception as error:  # whatever upstream's forward or ours raises, such a row cannot be trained
        reraise_machine_failure(error)
        return False
    return len(comparison.failures) == previous_failures


def with_separate_pairs(recipe: Recipe, pairs: Sequence[Pair]) -> Recipe:
    """The recipe with these pairs of modalities in separate rows.

    Raises:
        RecipeError: the recipe asks for rows that mix them.
    """
    required = {tuple(sorted(pair)) for pair in pairs}
    sections = {name: getattr(recipe, name) for name in ("data", "eval_data") if getattr(recipe, name) is not None}
    for name, data in sections.items():
        requested = data.separate_modalities
        if requested is not None and (missing := sorted(required - set(requested))):
            mixed = ", or ".join(" and ".join(pair) for pair in missing)
            raise RecipeError(
                f"{name}.separate_modalities = {[list(pair) for pair in requested]}: '{recipe.model.source}' cannot "
                f"distinguish {mixed} in one row. Remove the key."
            )
        sections[name] = replace(data, separate_modalities=tuple(sorted(required | set(requested or ()))))
    return replace(recipe, **sections) if required else recipe
