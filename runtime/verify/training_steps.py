"""Both models of a proof, and a step of each: the generated one as the trainer calls it, upstream's over documents one by one.

B rows   S tokens per row   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime import attention, attention_kinds, kept_dtypes, model_calls, parallel, seams
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import loss, report
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.comparison import SEED, Step, changed_inputs
from patchgen.runtime.verify.correspondence import Correspondence, correspondence
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.multimodal_inputs import takes_media
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import set_router_loss
from patchgen.runtime.verify.training_inputs import Batch

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class BothModels:
    """Upstream's and the generated model with the same weights, in a run's context.

    Attributes:
        count_labels: how many labels a batch's loss is a mean over.
        needs_media: upstream takes media and fails on text alone: checks use rows with media, some are left out (`run`).
        positions: the model's position function (`get_position_id_func()`), if it has one.
        seams: implementations that a run selects; `compared_seams`: what checks select, "auto" for one that cannot run here.
        separates_documents: whether the generated model computes each packed document in a row of its own.
        check_names: the names of the checks to run, for heads that take unpacked rows only (media then also); empty: all.
    """

    def __init__(
        self,
        reference_class: type[PreTrainedModel],
        generated_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        media: bool,
    ) -> None:
        self.generated_class, self.config = generated_class, config
        self.reference = build_model(reference_class, config)
        perturb(self.reference)  # fresh weights would hide an unused bias, or a norm without its weight
        self.tokens = inputs.TokenSampler(config)
        self.plain = inputs.plain_rows(self.tokens)
        self.text = inputs.text_documents(self.tokens)
        self.count_labels: Callable[[Batch], int] = inputs.num_labels
        self.needs_media = takes_media(reference_class) and self.upstream_error() is not None
        self.media = inputs.media_documents(self.reference) if media or self.needs_media else {}
        if self.needs_media and self.media:  # it is never trained on text alone
            self.text = next(iter(self.media.values()))
            self.plain = dict(self.text.require_padded())
        self.seams: dict[str, str] = {}
        self.compared_seams: dict[str, str] = {}
        self.positions: Any = None
        self.state: ParallelState | None = None
        self.compared_attention: Names = ""
        self.separates_documents: DocumentSeparation = not model_calls.takes_documents(generated_class)
        self.check_names: tuple[str, ...] = ()
        self.correspondence = Correspondence()

    def _generated(self, name: Names, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The generated class with this attention and upstream's weights."""
        torch.manual_seed(SEED)
        model = self.generated_class._from_config(copy.deepcopy(config), attn_implementation=name, dtype=dtype)
        kept_dtypes.keep_in_fp32(model, dtype)
        self.correspondence = correspondence(self.reference, model)
        model.load_state_dict(self.correspondence.to_generated(self.reference.state_dict()), strict=True)
        return model.train()

    @functools.cached_property
    def generated(self) -> PreTrainedModel:
        model = self._generated(self.compared_attention, self.config)
        model_calls.separate_documents(model, self.separates_documents)  # not by an earlier proof
        return model

    def choose(self, config: PreTrainedConfig, named_seams: Mapping[str, str | None]) -> tuple[Kind, ...]:
        """Sets the seams of a run and its position function; returns what each kind of layer requires of its attention,
        found by running rows of the data pipeline with `config`."""
        model = self._generated(attention.ORDER[-1], config)
        model_calls.separate_documents(model, self.separates_documents)  # not by an earlier proof
        finder = getattr(model, "get_position_id_func", None)
        self.positions = finder() if finder is not None else None
        self.seams = seams.for_training(report.seam_users(model), named_seams)
        self.compared_seams = {
            seam: self._runnable(model, seam) for seam in seams.AUTO_IN_TRAINING if seam in self.seams
        }
        packed = [self.text.packed(), *(documents.packed(self.positions) for documents in self.media.values())]
        with attention.recording() as calls, torch.no_grad(), all_eager():
            for rows in packed:
                model(**inputs.without_labels(inputs.trainer_inputs(rows)), use_cache=False)
        return attention_kinds.recorded_kinds(model, calls)

    def _runnable(self, model: PreTrainedModel, seam: str) -> str:
        """The implementation of a seam that a run selects, or "auto" if that one needs another device."""
        try:
            with torch.no_grad(), attention.recording(), selected({seam: self.seams[seam]}):
                model(**self.plain, use_cache=False)
        except (NotImplementedError, ImportError):
            return seams.AUTO
        except Exception as error:
            reraise_machine_failure(error)  # any other: the check that runs it fails with this error
        return self.seams[seam]

    def _logits(self, rows: Batch) -> Tensor:
        """`(B, S, V)` of the generated model, called without labels."""
        with torch.no_grad(), selected(self.compared_seams), parallel.using(self.state):
            return self.generated(**inputs.without_labels(rows), use_cache=False).logits

    def _step(self, micro_batches: Sequence[Batch], items: int, outputs: Mapping[str, Tensor] | None = None) -> Step:
        """Loss and gradients of one step, as the trainer takes it."""
        model, total, changed = self.generated, torch.zeros(()), []
        model.zero_grad(set_to_none=True)
        num_items = torch.tensor(items)
        with selected(self.compared_seams), self._in_training_step(num_items, len(micro_batches)):
            for rows in micro_batches:
                torch.manual_seed(SEED)
                batch = copy.deepcopy(rows)
                share = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
                share.backward()
                total = total + share.detach()
                changed += changed_inputs(batch, rows)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return Step({"loss": total, **(outputs or {})}, gradients, tuple(changed))

    @property
    def has_router_loss(self) -> bool:
        """Whether a config has the switch of the router loss, which is off but within `router_loss_on`."""
        return any(
            hasattr(part, "output_router_logits")
            for config in (self.reference.config, self.generated.config)
            for part in (config, config.get_text_config(decoder=True))
        )

    @contextlib.contextmanager
    def router_loss_on(self) -> Iterator[None]:
        """Within the block both models add the loss of their routers."""
        configs = (self.reference.config, self.generated.config)
        for config in configs:
            set_router_loss(config, True)
        try:
            yield
        finally:
            for config in configs:
                set_router_loss(config, False)

    def forward(self, rows: Batch) -> Tensor:
        """The loss of the generated model, as in a step of a trainer."""
        num_items = torch.tensor(self.count_labels(rows))
        with selected(self.compared_seams), self._in_training_step(num_items, 1):
            torch.manual_seed(SEED)
            return self.generated(**rows, num_items_in_batch=num_items, use_cache=False).loss

    def step(self, rows: Batch) -> Step:
        """A step of the generated model on one micro-batch."""
        return self._step([rows], self.count_labels(rows))

    @contextlib.contextmanager
    def _in_training_step(self, num_items: Tensor, micro_batches: int) -> Iterator[None]:
        """The context of a trainer's step; heads that take unpacked rows only are trained by other trainers, without it."""
        if self.check_names:
            yield
        else:
            with parallel.using(self.state), loss.step(num_items, micro_batches):
                yield

    @staticmethod
    def _reference_logits(model: nn.Module, rows: Batch) -> Tensor:
        batch = inputs.in_dtype_of(model, inputs.without_labels(rows))
        with torch.no_grad(), all_eager():
            return model(**batch, use_cache=False).logits

    def _reference_step(
        self, model: nn.Module, rows: Sequence[Batch], items: int, outputs: Mapping[str, Tensor] | None = None
    ) -> Step:
        """The step over documents one by one: each mean loss is weighted by its share of the labels."""
        model.train()
        model.zero_grad(set_to_none=True)
        total, changed = torch.zeros((), dtype=torch.float64), []
        for row in rows:
            labels = self.count_labels(row)
            if not labels:
                continue
            torch.manual_seed(SEED)
            original = inputs.in_dtype_of(model, loss.upstream_labels(self.generated_class, dict(row)))
            batch = copy.deepcopy(original)
            with all_eager():
                mean = model(**batch, use_cache=False).loss
                share = mean * (labels / items)
                share.backward()
            total += share.detach()
            changed += changed_inputs(batch, original)
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return Step({"loss": total.to(dtype), **(outputs or {})}, gradients, tuple(changed))

    def _row_of_logits(self, model: nn.Module, rows: Sequence[Batch]) -> Tensor:
        """The logits of documents one after the other, `(1, S, V)`, without those of padding."""
        parts = []
        for row in rows:
            is_real = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
            parts.append(self._reference_logits(model, row)[is_real])
        return torch.cat(parts)[None]

    def upstream_error(self) -> Exception | None:
        """What upstream's own class, eager, raises in a training step on single documents."""
        items = sum(map(self.count_labels, self.text.rows))
        try:
            self._reference_step(self.reference, self.text.rows, items)
        except Exception as error:
            reraise_machine_failure(error)
            return error
        return None


@contextlib.contextmanager
def selected(implementations: Mapping[str, str]) -> Iterator[None]:
    """Within the block the seams use these implementations, and eager ones elsewhere."""
    with all_eager(), seams.using(**implementations):
        yield
