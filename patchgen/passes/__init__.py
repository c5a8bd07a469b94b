"""The passes, and the order in which they run by default."""

from __future__ import annotations

from typing import TYPE_CHECKING

from patchgen import project_code
from patchgen.passes.absolute_imports import AbsoluteImports
from patchgen.passes.attention_kwargs import AttentionKwargs
from patchgen.passes.audio_sp import AudioSP
from patchgen.passes.base import Pass
from patchgen.passes.checkpoint_mapping import CheckpointMapping
from patchgen.passes.deepstack_sp import DeepstackSP
from patchgen.passes.drawn_masks import DrawnMasks
from patchgen.passes.dummy_forward import DummyForward
from patchgen.passes.fill_back import FillBack
from patchgen.passes.fused_experts import FusedExperts
from patchgen.passes.fused_loss import FusedLoss
from patchgen.passes.fused_ops import FusedOps
from patchgen.passes.generic_heads import GenericHeads
from patchgen.passes.hand_edits import HandEdits
from patchgen.passes.host_sync_lint import HostSyncLint
from patchgen.passes.host_values import HostValues
from patchgen.passes.language_sp import LanguageSP
from patchgen.passes.local_classes import LocalClasses
from patchgen.passes.max_seqlen import MaxSeqlen
from patchgen.passes.mixer_sp import MixerSP
from patchgen.passes.parallel_plan import ParallelPlan
from patchgen.passes.position_id_func import PositionIdFunc
from patchgen.passes.position_ids import PositionIds
from patchgen.passes.prune import Prune
from patchgen.passes.router_loss import RouterLoss
from patchgen.passes.shared_experts import SharedExperts
from patchgen.passes.stacked_experts import StackedExperts
from patchgen.passes.tied_embeddings import TiedEmbeddings
from patchgen.passes.vision_sp import VisionSP

if TYPE_CHECKING:
    from patchgen.model_configs import ModelConfig

PASSES: tuple[type[Pass], ...] = (
    HandEdits,
    GenericHeads,
    LocalClasses,  # before Prune, which would drop towers that only an Auto class builds
    Prune,
    AbsoluteImports,
    TiedEmbeddings,
    StackedExperts,
    FusedExperts,
    SharedExperts,
    RouterLoss,
    FusedLoss,
    LanguageSP,
    DrawnMasks,
    MixerSP,
    VisionSP,
    AudioSP,
    FillBack,
    DeepstackSP,
    AttentionKwargs,
    MaxSeqlen,
    HostValues,
    DummyForward,
    PositionIds,
    PositionIdFunc,
    FusedOps,
    ParallelPlan,
    CheckpointMapping,
    HostSyncLint,  # last: it reads the result of the others
)


def default_pipeline(config: ModelConfig) -> tuple[Pass, ...]:
    """All passes in order, as a model's config parametrises them."""
    arguments: dict[type[Pass], tuple[object, ...]] = {
        HandEdits: (config.edits,),
        GenericHeads: (config.kept,),
        Prune: (config.kept,),
    }
    lint = HostSyncLint(config.allow_sync, strict=config.strict_sync)
    return tuple(lint if kind is HostSyncLint else kind(*arguments.get(kind, ())) for kind in all_passes())


def all_passes() -> tuple[type[Pass], ...]:
    """The passes, those of the project included, in the order in which they run; raises as `with_project_passes`."""
    return project_code.with_project_passes(PASSES)


def pass_named(name: str) -> type[Pass] | None:
    return next((kind for kind in all_passes() if kind.name == name), None)
