"""The reference of comparisons on ranks: upstream's own class, built small, and the batches that it takes."""

from __future__ import annotations

import copy
import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from patchgen.runtime import attention, attention_kinds, model_calls, registry
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import ParallelConfig
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import given_config, reference_loss
from patchgen.runtime.verify.correspondence import Correspondence, correspondence
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.media_samples import Sample, SampleBuilder
from patchgen.runtime.verify.model_pair import build_model, config_class_of, perturb
from patchgen.runtime.verify.multimodal_inputs import REFUSALS, takes_media
from patchgen.runtime.verify.small_config import set_router_loss
from patchgen.runtime.verify.training_checks import Comparison
from patchgen.runtime.verify.training_path import attention_requirements, cpu_attention

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SEED = 7


class NotApplicable(ValueError):
    """A case that does not exist for this model."""


Subject = str | Path | registry.GeneratedModel
"""What is compared: a generated model, its name, or its folder."""


def find_generated(model: Subject) -> registry.GeneratedModel:
    if isinstance(model, registry.GeneratedModel):
        return model
    return registry.read_model(model) if isinstance(model, Path) else registry.find_model(model)


def head_with_media(directory: Path) -> str | None:
    """The first head of a generated model whose forward takes images, videos or audio."""
    return next((head for head in registry.read_model(directory).heads if head_takes_media(directory, head)), None)


def head_takes_media(model: Subject, head: str) -> bool:
    """Whether upstream's class of this name takes images, videos or audio."""
    return takes_media(getattr(find_generated(model).upstream(), head))


def training_choices(
    upstream_class: type[PreTrainedModel], generated_class: type[PreTrainedModel], config: PreTrainedConfig
) -> tuple[Names, dict[str, str], DocumentSeparation]:
    """The attention and seam implementations that a run uses, as far as a CPU can run them, and whether its model takes
    packed documents only in rows of their own."""
    attention.register()
    path = Comparison(upstream_class, generated_class, config, media=takes_media(upstream_class))
    path, kinds = attention_requirements(path, config, {})
    return (
        cpu_attention(attention_kinds.choose(kinds, config), kinds, config),
        path.compared_seams,
        path.separates_documents,
    )


def state_of(sp: int, ep: int = 1) -> ParallelState:
    """The parallel state of a layout."""
    return _state(sp, ep)


@functools.cache
def _state(sp: int, ep: int) -> ParallelState:  # process groups are never freed
    return ParallelState.create(ParallelConfig.for_world(dist.get_world_size(), sp=sp, ep=ep), "cpu")


def switch_dropout_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "dropout_p", "attn_dropout", "hidden_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def training_config(upstream_class: type[PreTrainedModel], given: GivenConfig) -> PreTrainedConfig:
    """A small config as a run has it: no cache, and the router loss if the model has one."""
    config = given.small_config(config_class_of(upstream_class)).config
    set_router_loss(config, True)
    for part in (config, config.get_text_config(decoder=True)):
        part.use_cache = False
    return config


def router_functions(directory: Path) -> tuple[str, ...]:
    """The functions of upstream's module that compute a router loss, from the record of a generated model."""
    return reference_loss.functions_of(json.loads((directory / "provenance.json").read_text(encoding="utf-8")))


class ReferenceModel:
    """Upstream's class, built small, and the batches that it takes.

    Args:
        generated: the generated model.
        head: the class that is compared.
        upstream_module: the import path of upstream's file; default: the one that the file was generated from.

    Attributes:
        separates: whether a run with this config computes packed documents in rows of their own.
    """

    separates: DocumentSeparation

    def __init__(self, generated: registry.GeneratedModel, head: str, upstream_module: str | None = None) -> None:
        module = importlib.import_module(upstream_module) if upstream_module else generated.upstream()
        self.upstream_class = getattr(module, head)
        self.generated_class = getattr(generated.load(), head)
        self.config = training_config(self.upstream_class, given_config.read(generated.directory))
        self.router_functions = router_functions(generated.directory)
        choices = training_choices(self.upstream_class, self.generated_class, self.config)
        self.attention, self.seams, self.separates = choices
        self.model = build_model(self.upstream_class, self.config)
        perturb(self.model)
        switch_dropout_off(self.model)
        self.builder = SampleBuilder(self.model, seed=SEED)
        self.pad_token_id = int(self.builder.drawable[0])
        self._refused: dict[str, str] = {}

    @functools.cached_property
    def correspondence(self) -> Correspondence:
        """How upstream's tensors become those of the generated model."""
        return correspondence(self.model, build_model(self.generated_class, self.config))

    def batches(self) -> dict[str, tuple[Sample, ...]]:
        """The batches by name; items of `boundary` cross the middle of the row, those of `first` are in its first half.

        Batches that upstream refuses are left out.
        """
        batches = dict(self.builder.batches())
        kinds = list(self.builder.layouts)
        item, sample = self.builder.maker.item, self.builder.sample
        if kinds:
            batches["boundary"] = tuple(sample([7, item(kinds[0], 0), 7]) for _ in range(2))
            batches["first"] = tuple(sample([1, item(kinds[0], 1), 40]) for _ in range(2))
        batches["text"] = tuple(sample([length]) for length in (13, 9, 11, 10))
        batches["plain"] = tuple(sample([16]) for _ in range(4))
        batches["three"] = tuple(sample([length]) for length in (9, 12, 7))  # multimodal position ids have three rows
        if not self._refused:
            self._refused = {name: self.refusal(name, samples) for name, samples in batches.items()}
        return {name: samples for name, samples in batches.items() if not self._refused[name]}

    def refusal(self, name: str, samples: Sequence[Sample]) -> str:
        """Why upstream itself refuses a batch; empty if it does not."""
        try:
            self.builder.run_upstream(self.builder.case(name, samples).batch)
        except REFUSALS as refusal:
            reraise_machine_failure(refusal)
            return str(refusal) or type(refusal).__name__
        return ""

    def positions(self, inputs: dict[str, Any]) -> Tensor:
        """The position ids that upstream's fusion model passes to its language model; 0, 1, 2, ... if it passes none."""
        recorded: list[Tensor | None] = []
        decoder = self.model.get_decoder()

        def record(module: nn.Module, arguments: tuple, keywords: dict) -> None:
            recorded.append(keywords.get("position_ids"))

        hook = decoder.register_forward_pre_hook(record, with_kwargs=True)
        self.builder.run_upstream(inputs)
        hook.remove()
        reference_loss.reset_rope_deltas(self.model)
        if recorded[0] is not None:
            return recorded[0]
        return torch.arange(inputs["input_ids"].shape[1]).expand_as(inputs["input_ids"])

    def loss_and_gradients(
        self, batches: Sequence[dict[str, Any]], *, packed_rows: Sequence[int] | None = None, training: bool = True
    ) -> tuple[float, dict[str, Tensor]]:
        """`reference_loss.loss_and_gradients` of upstream's class, the gradients by the generated model's names."""
        loss, gradients = reference_loss.loss_and_gradients(
            self.model,
            batches,
            router_functions=self.router_functions,
            packed_rows=packed_rows,
            training=training,
            generated_class=self.generated_class,
        )
        return loss, self.correspondence.existing(gradients)

    def generated(self, separates: DocumentSeparation = False) -> PreTrainedModel:
        """The generated class with the same weights and the attention of a run.

        Args:
            separates: whether documents are computed in rows of their own.
        """
        model = self.generated_class._from_config(
            copy.deepcopy(self.config), attn_implementation=self.attention, dtype=torch.float32
        )
        model.load_state_dict(self.correspondence.to_generated(self.model.state_dict()))
        switch_dropout_off(model)
        model_calls.separate_documents(model, separates)  # not by an earlier proof
        return model


@functools.cache
def reference_model(model: Subject, head: str) -> ReferenceModel:
    """Cached per process: building models costs more than most batches."""
    attention.register()
    return ReferenceModel(find_generated(model), head)
