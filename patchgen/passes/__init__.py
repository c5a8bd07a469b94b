"""The passes, and the order in which they run by default."""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from patchgen import project_code
from patchgen.passes.base import Pass

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig

ORDER = (
    "patchgen.passes.hand_edits:HandEdits",
    "patchgen.passes.generic_heads:GenericHeads",
    "patchgen.passes.local_classes:LocalClasses",  # before Prune, which would drop towers that only an Auto class builds
    "patchgen.passes.prune:Prune",
    "patchgen.passes.absolute_imports:AbsoluteImports",
    "patchgen.passes.tied_embeddings:TiedEmbeddings",
    "patchgen.passes.stacked_experts:StackedExperts",
    "patchgen.passes.fused_experts:FusedExperts",
    "patchgen.passes.shared_experts:SharedExperts",
    "patchgen.passes.router_loss:RouterLoss",
    "patchgen.passes.fused_loss:FusedLoss",
    "patchgen.passes.language_sp:LanguageSP",
    "patchgen.passes.drawn_masks:DrawnMasks",
    "patchgen.passes.attention_tables:AttentionTables",
    "patchgen.passes.mixer_sp:MixerSP",
    "patchgen.passes.vision_sp:VisionSP",
    "patchgen.passes.audio_sp:AudioSP",
    "patchgen.passes.fill_back:FillBack",
    "patchgen.passes.deepstack_sp:DeepstackSP",
    "patchgen.passes.attention_kwargs:AttentionKwargs",
    "patchgen.passes.max_seqlen:MaxSeqlen",
    "patchgen.passes.host_values:HostValues",
    "patchgen.passes.dummy_forward:DummyForward",
    "patchgen.passes.position_ids:PositionIds",
    "patchgen.passes.position_id_func:PositionIdFunc",
    "patchgen.passes.fused_ops:FusedOps",
    "patchgen.passes.parallel_plan:ParallelPlan",
    "patchgen.passes.checkpoint_mapping:CheckpointMapping",
    "patchgen.passes.host_sync_lint:HostSyncLint",  # last: it reads the result of the others
)
"""A pass is a file of this folder and a line here."""

PASSES: tuple[type[Pass], ...] = tuple(map(pkgutil.resolve_name, ORDER))


def default_pipeline(config: ModelConfig) -> tuple[Pass, ...]:
    """All passes in order, as a model's config parametrises them."""
    return tuple(kind.of_config(config) for kind in all_passes())


def all_passes() -> tuple[type[Pass], ...]:
    """The passes, those of the project included, in the order in which they run; raises as `with_project_passes`."""
    return project_code.with_project_passes(PASSES)


def pass_named(name: str) -> type[Pass] | None:
    return next((kind for kind in all_passes() if kind.name == name), None)
