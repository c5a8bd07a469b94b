"""The checks of `training_path.py`: the generated class as the trainer calls it, against upstream's, eager.

B rows   S tokens per row   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.kernels.loss.chunking import largest_chunk
from patchgen.runtime import attention, attention_kinds, kept_dtypes, model_calls, parallel, seams
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import loss, report
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import bf16
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.comparison import (
    EQUAL,
    SEED,
    Difference,
    Step,
    changed_inputs,
    compare_gradients,
    difference,
    name_of_worst,
    nan_is_largest,
    worst_of,
)
from patchgen.runtime.verify.conditioning import beyond_rounding
from patchgen.runtime.verify.correspondence import Correspondence, correspondence
from patchgen.runtime.verify.large_weights import large_weights
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.multimodal_inputs import takes_media
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import set_router_loss
from patchgen.runtime.verify.training_inputs import Batch, Documents
from patchgen.runtime.verify.verdict import one_line_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5  # the largest relative difference, in the 2-norm, that passes
CHUNK_TOKENS = 7  # the most tokens of a chunk of the loss in the check of chunks
NUM_CHANGED = 5
"""Tokens at the end of a row that the causality check replaces."""


@dataclass(frozen=True)
class Check:
    """The largest differences that one comparison found."""

    name: str
    loss: Difference = EQUAL
    logits: Difference = EQUAL
    gradient: Difference = EQUAL

    @property
    def worst(self) -> float:
        """The largest of the three, relative."""
        return worst_of((self.loss, self.logits, self.gradient)).relative


class Comparison:
    """Both models with the same weights, and a method for each check.

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
        self.checks: list[Check] = []
        self.failures: list[str] = []
        self.left_out: dict[str, str] = {}

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

    def with_separate_documents(self, how: DocumentSeparation = True) -> Comparison:
        """A fresh copy of this comparison whose generated model computes packed documents in rows of their own."""
        copied = copy.copy(self)
        copied.__dict__.pop("generated", None)
        copied.separates_documents, copied.checks, copied.failures, copied.left_out = how, [], [], {}
        return copied

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
            with torch.no_grad(), attention.recording(), _selected({seam: self.seams[seam]}):
                model(**self.plain, use_cache=False)
        except (NotImplementedError, ImportError):
            return seams.AUTO
        except Exception as error:
            reraise_machine_failure(error)  # any other: the check that runs it fails with this error
        return self.seams[seam]

    # ------------------------------------------------------------------------------------------- the checks

    def run(self) -> None:
        """All checks; one that raises has failed, and the others go on."""
        packed = self.text.packed()
        steps: dict[str, Callable[[], None]] = {
            "causality": self.causality,
            "plain": lambda: self.rows("plain", self.plain, other_labels=3),
            "leak": lambda: self.leak(packed),
            "packed": lambda: self.documents("packed", self.text, packed),
            "padded right": lambda: self.rows("padded right", inputs.padded_rows(self.plain, left=False)),
            "padded left": lambda: self.rows("padded left", inputs.padded_rows(self.plain, left=True)),
            "chunks": lambda: self.documents("chunks", self.text, packed, chunk=CHUNK_TOKENS),
            "accumulation": lambda: self.accumulation(packed),
            "router loss": self.router_loss,
            "large weights": self.large_weights,
            "bf16": self.bf16,
        }
        if self.needs_media:  # the others replace tokens, or pad or select rows, which tensors of media do not have
            steps = {name: steps[name] for name in _WITH_MEDIA}
        if self.check_names:
            steps = {name: step for name, step in steps.items() if name in self.check_names}
        for name, step in steps.items():
            self._run_check(name, step)
        for kind, media in self.media.items():
            if self.check_names:
                name, batches = f"rows with {kind}", [media.require_padded()]
                self._run_check(name, functools.partial(self.rows, name, batches[0]), batches)
            else:
                name = f"packed {kind}"
                self._run_check(
                    name, lambda n=name, d=media: self.documents(n, d, d.packed(self.positions)), media.reference()
                )

    def _run_check(self, name: str, check: Callable[[], None], with_media: Sequence[Batch] = ()) -> None:
        """Runs one check; on `with_media`, upstream's batches, a failure says if upstream's own attentions differ there."""
        before = len(self.failures)
        try:
            check()
        except Exception as error:
            reraise_machine_failure(error)
            self.failures.append(f"{_SUBJECT.get(name, name)}: {one_line_error(error)}")
        if len(self.failures) == before or not with_media or not self.reference._supports_sdpa:
            return
        if (deviation := self._sdpa_deviation(with_media)) > TOLERANCE:
            self.failures[before:] = [
                f"{name}: upstream's own logits with sdpa differ from its eager ones by {deviation:.0e}, relative."
            ]

    def _sdpa_deviation(self, rows: Sequence[Batch]) -> float:
        """How far upstream's own class with sdpa, its default attention, is from itself with eager attention."""
        sdpa = copy.deepcopy(self.reference)
        sdpa.set_attn_implementation("sdpa")
        return difference(*(self._row_of_logits(model, rows) for model in (sdpa, self.reference))).relative

    def causality(self) -> None:
        """Tokens at the end of a row change no logits before them, unless they do so upstream."""
        place = slice(self.plain["input_ids"].shape[1] - NUM_CHANGED, None)
        altered = inputs.changed(self.plain, place, self.tokens)
        upstream = [self._reference_logits(self.reference, rows)[:, : place.start] for rows in (self.plain, altered)]
        if difference(*upstream).relative > TOLERANCE:
            return  # upstream is not causal either: the other checks compare with it
        deviation = difference(
            *(self._logits(inputs.trainer_inputs(rows))[:, : place.start] for rows in (self.plain, altered))
        )
        self.checks.append(Check("causality", logits=deviation))
        if not deviation.relative <= TOLERANCE:
            self.failures.append(
                f"a later token changes earlier logits by {deviation.relative:.0e}, relative, and upstream it does not."
            )

    def rows(self, name: str, rows: Batch, other_labels: int = 0) -> None:
        """Rows without packing, in a step with `other_labels` more labels; a failure is left out if upstream reads padding."""
        items = self.count_labels(rows) + other_labels
        is_real = rows.get("attention_mask", torch.ones_like(rows["input_ids"])).bool()
        num_failures = len(self.failures)
        batch = inputs.trainer_inputs(rows)
        if "attention_mask" in rows:  # our trainer never pads by a mask; other trainers do
            targets = loss.upstream_labels(self.generated_class, rows)["labels"]
            batch = rows if targets is rows["labels"] else {**rows, "shift_labels": targets}
        logits = lambda model: {"logits": self._reference_logits(model, rows)[is_real]}  # noqa: E731
        self._compare(
            name,
            actual=self._step([batch], items, {"logits": self._logits(batch)[is_real]}),
            upstream_step=lambda model: self._reference_step(model, [rows], items, logits(model)),
        )
        # Attention outputs at padding are undefined: a model whose upstream reads them cannot be compared.
        if len(self.failures) > num_failures and not is_real.all() and self._reads_padding_upstream(rows, is_real):
            check = self.checks.pop()
            self.left_out[name] = f"upstream reads the padding itself; ours differs by {check.worst:.0e}, relative"
            del self.failures[num_failures:]

    def _reads_padding_upstream(self, rows: Batch, is_real: Tensor) -> bool:
        """Whether other token ids at masked positions change upstream's logits elsewhere."""
        altered = {**rows, "input_ids": torch.where(is_real, rows["input_ids"], self.tokens.others(rows["input_ids"]))}
        logits = [self._reference_logits(self.reference, batch)[is_real] for batch in (rows, altered)]
        return not difference(*logits).relative <= TOLERANCE

    def documents(self, name: str, documents: Documents, packed: Batch, chunk: int | None = None) -> None:
        """A packed row against what upstream takes (`Documents.reference`), in chunks of the loss of at most `chunk` tokens."""
        items = sum(map(self.count_labels, documents.rows))
        rows, batch = documents.reference(), inputs.trainer_inputs(packed)
        with largest_chunk(chunk) if chunk else contextlib.nullcontext():
            actual = self._step([batch], items, {"logits": self._logits(batch)})
        self._compare(
            name,
            actual,
            lambda model: self._reference_step(model, rows, items, {"logits": self._row_of_logits(model, rows)}),
        )

    def leak(self, packed: Batch) -> None:
        """Other tokens in one document change no logits of the others."""
        worst = self._leak(packed, lambda rows: self._logits(inputs.trainer_inputs(rows)))
        self.checks.append(Check("leak", logits=worst))
        if not worst.relative <= TOLERANCE:
            self.failures.append(
                f"packed rows: other tokens in one document change the logits of others by {worst.relative:.0e}, relative."
            )

    def _leak(self, packed: Batch, logits: Callable[[Batch], Tensor]) -> Difference:
        """How far other tokens in one document change the logits of the others."""
        before, worst = logits(packed), EQUAL
        for place in self.text.bounds():
            after = logits(inputs.changed(packed, place, self.tokens))
            is_other = torch.ones(before.shape[1], dtype=torch.bool)
            is_other[place] = False
            worst = worst.worst(difference(after[:, is_other], before[:, is_other]))
        return worst

    def mixes_documents_upstream(self) -> bool:
        """Whether upstream's own class, eager, mixes documents that only position ids distinguish, or fails on them."""
        parameters = inspect.signature(type(self.reference).forward).parameters
        packed = {name: self.text.packed()[name] for name in ("input_ids", "position_ids") if name in parameters}
        try:
            deviation = self._leak(packed, lambda rows: self._reference_logits(self.reference, rows))
            for documents in self.media.values():
                rows = {n: v for n, v in documents.packed(self.positions).items() if n in parameters}
                separate = self._row_of_logits(self.reference, documents.reference())
                deviation = deviation.worst(difference(self._reference_logits(self.reference, rows), separate))
        except Exception as error:
            reraise_machine_failure(error)
            return True
        return not deviation.relative <= TOLERANCE

    def upstream_error(self) -> Exception | None:
        """What upstream's own class, eager, raises in a training step on single documents."""
        items = sum(map(self.count_labels, self.text.rows))
        try:
            self._reference_step(self.reference, self.text.rows, items)
        except Exception as error:
            reraise_machine_failure(error)
            return error
        return None

    def accumulation(self, packed: Batch) -> None:
        """Two micro-batches, a packed row and plain rows, are one step over both; the packed row twice if text alone fails."""
        rows = [*self.text.rows, *(self.text.rows if self.needs_media else [self.plain])]
        items = sum(map(self.count_labels, rows))
        second = packed if self.needs_media else self.plain
        self._compare(
            "accumulation",
            self._step([inputs.trainer_inputs(packed), inputs.trainer_inputs(second)], items),
            lambda model: self._reference_step(model, rows, items),
        )

    def router_loss(self) -> None:
        """One row with the router loss; over several rows a run defines it differently (docs/parallel.md)."""
        configs = (self.reference.config, self.generated.config)
        if not any(
            hasattr(part, "output_router_logits") for c in configs for part in (c, c.get_text_config(decoder=True))
        ):
            return
        row = {name: tensor[:1] for name, tensor in self.plain.items()}
        items = self.count_labels(row)
        try:
            for config in configs:
                set_router_loss(config, True)
            self._compare(
                "router loss",
                self._step([inputs.trainer_inputs(row)], items),
                lambda model: self._reference_step(model, [row], items),
            )
        finally:
            for config in configs:
                set_router_loss(config, False)  # as in the other checks

    def large_weights(self) -> None:
        """Rows of one document, with weights on which clamps and caps bite."""
        rows, items, num_failures = self.plain, self.count_labels(self.plain), len(self.failures)
        with large_weights(self.reference, self.generated, self.correspondence):
            actual = self._step([inputs.trainer_inputs(rows)], items)
            self._compare("large weights", actual, lambda model: self._reference_step(model, [rows], items))
            if len(self.failures) > num_failures and not self._reference_logits(self.reference, rows).isfinite().all():
                self.left_out["large weights"] = "upstream's own logits are not finite"
                self.checks.pop()
                del self.failures[num_failures:]

    def bf16(self) -> None:
        """Rows of one document in bf16, in units of upstream's own error there."""
        rows, items = bf16.inputs_in_bf16(self.plain), self.count_labels(self.plain)
        choices = bf16.SameChoices()

        def reference(model: nn.Module) -> Step:
            with choices:
                return self.correspondence.step(self._reference_step(model, [rows], items))

        with bf16.rounded(self.reference):
            exact, weights = reference(self.reference), self.reference.state_dict()
            try:
                upstream = reference(bf16.model_in_bf16(type(self.reference), self.config, weights))
            except Exception as error:  # an operation may have no form in bf16, or none on this device
                reraise_machine_failure(error)
                self.left_out["bf16"] = f"upstream's own class fails: {one_line_error(error)}"
                return
            ours = self.with_separate_documents(self.separates_documents)
            ours.generated = self._generated(self.compared_attention, self.config, bf16.DTYPE)
        model_calls.separate_documents(ours.generated, self.separates_documents)
        try:
            with choices:
                actual = ours._step([inputs.trainer_inputs(rows)], items)
        except NotImplementedError as error:
            self.left_out["bf16"] = one_line_error(error)
            return
        far = bf16.further_than_upstream(actual, upstream, exact)
        if far and choices.differs:
            self.left_out["bf16"] = "another element is the largest than in fp32, which is no rounding of what follows"
            return
        gradients = compare_gradients(bf16.in_fp32(actual), exact)
        loss = difference(actual.outputs["loss"].float(), exact.outputs["loss"].float())
        self.checks.append(Check("bf16", loss, gradient=worst_of(gradients.values())))
        if far:
            key = max(far, key=lambda name: nan_is_largest(far[name]))
            self.failures.append(
                f"in bf16 {key} is {far[key]:.0f} times as far from upstream's in fp32 as upstream's own in bf16."
            )

    # ------------------------------------------------------------------------------------- as the trainer calls

    def _logits(self, rows: Batch) -> Tensor:
        """`(B, S, V)` of the generated model, called without labels."""
        with torch.no_grad(), _selected(self.compared_seams), parallel.using(self.state):
            return self.generated(**inputs.without_labels(rows), use_cache=False).logits

    def _step(self, micro_batches: Sequence[Batch], items: int, outputs: Mapping[str, Tensor] | None = None) -> Step:
        """Loss and gradients of one step, as the trainer takes it."""
        model, total, changed = self.generated, torch.zeros(()), []
        model.zero_grad(set_to_none=True)
        num_items = torch.tensor(items)
        with _selected(self.compared_seams), self._in_training_step(num_items, len(micro_batches)):
            for rows in micro_batches:
                torch.manual_seed(SEED)
                batch = copy.deepcopy(rows)
                share = model(**batch, num_items_in_batch=num_items, use_cache=False).loss
                share.backward()
                total = total + share.detach()
                changed += changed_inputs(batch, rows)
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return Step({"loss": total, **(outputs or {})}, gradients, tuple(changed))

    def forward(self, rows: Batch) -> Tensor:
        """The loss of the generated model, as in a step of a trainer."""
        num_items = torch.tensor(self.count_labels(rows))
        with _selected(self.compared_seams), self._in_training_step(num_items, 1):
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

    # --------------------------------------------------------------------------------------------- comparing

    def _compare(self, name: str, actual: Step, upstream_step: Callable[[nn.Module], Step]) -> None:
        def reference(model: nn.Module) -> Step:
            return self.correspondence.step(upstream_step(model))

        expected = reference(self.reference)
        values = {key: difference(actual.outputs[key], expected.outputs[key]) for key in actual.outputs}
        gradients = compare_gradients(actual, expected)
        self.checks.append(Check(name, values["loss"], values.get("logits", EQUAL), worst_of(gradients.values())))
        values |= {f"gradient of {key}": value for key, value in gradients.items()}
        self.failures += [
            f"{_SUBJECT.get(name, name)}: a step changes '{key}' of its caller's batch in place, upstream's does not."
            for key in dict.fromkeys(actual.changed_inputs)
            if key not in expected.changed_inputs
        ]
        beyond = {key: value for key, value in values.items() if not value.relative <= TOLERANCE}
        if beyond := beyond_rounding(beyond, actual, expected, self.reference, reference):
            key = next((key for key in ("logits", "loss") if key in beyond), name_of_worst(beyond))
            verb = "differ" if key == "logits" else "differs"
            source = (
                "upstream's" if name in UNPACKED or self.check_names else "upstream's for the documents one by one"
            )
            reason = beyond[key].not_measurable
            how_far = f": {reason}" if reason else f" by {beyond[key].relative:.0e}, relative"
            self.failures.append(f"{_SUBJECT.get(name, name)}: {key} {verb} from {source}{how_far}.")


UNPACKED = ("plain", "padded right", "padded left", "router loss", "large weights", "bf16")
_WITH_MEDIA = ("plain", "packed", "chunks", "accumulation", "large weights", "bf16")
_SUBJECT = {
    "plain": "rows of one document",
    "packed": "packed rows",
    "leak": "packed rows",
    "chunks": "the loss in chunks",
    "accumulation": "gradient accumulation",
}


@contextlib.contextmanager
def _selected(implementations: Mapping[str, str]) -> Iterator[None]:
    with all_eager(), seams.using(**implementations):
        yield
