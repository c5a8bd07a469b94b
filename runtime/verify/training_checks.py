"""The checks of `training_path.py`: the generated class as the trainer calls it, against upstream's, eager.

B rows   S tokens per row   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from patchgen.kernels.loss.chunking import largest_chunk
from patchgen.runtime import model_calls
from patchgen.runtime.document_rows import DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import loss
from patchgen.runtime.verify import bf16
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.comparison import (
    EQUAL,
    Difference,
    Step,
    compare_gradients,
    compare_outputs,
    difference,
    name_of_worst,
    nan_is_largest,
    worst_of,
)
from patchgen.runtime.verify.conditioning import beyond_rounding
from patchgen.runtime.verify.large_weights import large_weights
from patchgen.runtime.verify.training_inputs import Batch, Documents
from patchgen.runtime.verify.training_steps import BothModels
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


class Comparison(BothModels):
    """Both models with the same weights, and a method for each check.

    Attributes:
        checks: the differences that were measured; `failures`: a sentence for each that is too large.
        left_out: checks that cannot be made, and why.
    """

    def __init__(
        self,
        reference_class: type[PreTrainedModel],
        generated_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        media: bool,
    ) -> None:
        super().__init__(reference_class, generated_class, config, media)
        self.checks: list[Check] = []
        self.failures: list[str] = []
        self.left_out: dict[str, str] = {}

    def with_separate_documents(self, how: DocumentSeparation = True) -> Comparison:
        """A fresh copy of this comparison whose generated model computes packed documents in rows of their own."""
        copied = copy.copy(self)
        copied.__dict__.pop("generated", None)
        copied.separates_documents, copied.checks, copied.failures, copied.left_out = how, [], [], {}
        return copied

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
        is_real = _is_real(rows)
        num_failures = len(self.failures)
        batch = inputs.trainer_inputs(rows)
        if "attention_mask" in rows:  # our trainer never pads by a mask; other trainers do
            targets = loss.upstream_labels(self.generated_class, rows)["labels"]
            batch = rows if targets is rows["labels"] else {**rows, "shift_labels": targets}
        self._compare(
            name,
            actual=self._step([batch], items, {"logits": self._logits(batch)[is_real]}),
            upstream_step=lambda model: self._reference_step(model, [rows], items, self._real_logits(model, rows)),
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
        if not self.has_router_loss:
            return
        row = {name: tensor[:1] for name, tensor in self.plain.items()}
        items = self.count_labels(row)
        with self.router_loss_on():
            self._compare(
                "router loss",
                self._step([inputs.trainer_inputs(row)], items),
                lambda model: self._reference_step(model, [row], items),
            )

    def large_weights(self) -> None:
        """Rows of one document, with weights on which clamps and caps bite."""
        rows, items = self.plain, self.count_labels(self.plain)

        def reference() -> Step:
            return self._reference_step(self.reference, [rows], items, self._real_logits(self.reference, rows))

        with large_weights(self.reference, self.generated, self.correspondence):
            if self._upstream_if_any("large weights", reference) is None:
                return
            actual = self._step([inputs.trainer_inputs(rows)], items)
            self._compare("large weights", actual, lambda model: self._reference_step(model, [rows], items))

    def bf16(self) -> None:
        """Rows of one document in bf16, in units of upstream's own error there."""
        rows, items = bf16.inputs_in_bf16(self.plain), self.count_labels(self.plain)
        choices = bf16.SameChoices()

        def reference(model: nn.Module) -> Step:
            with choices:
                step = self._reference_step(model, [rows], items, self._real_logits(model, rows))
                return self.correspondence.step(step)

        with bf16.rounded(self.reference):
            exact, weights = reference(self.reference), self.reference.state_dict()
            upstream = self._upstream_if_any(
                "bf16", lambda: reference(bf16.model_in_bf16(type(self.reference), self.config, weights))
            )
            if upstream is None:
                return
            ours = self.with_separate_documents(self.separates_documents)
            ours.generated = self._generated(self.compared_attention, self.config, bf16.DTYPE)
        model_calls.separate_documents(ours.generated, self.separates_documents)
        with choices:
            batch = inputs.trainer_inputs(rows)
            actual = ours._step([batch], items, {"logits": ours._logits(batch)[_is_real(rows)]})
        self.left_out |= bf16.left_out(upstream, exact)
        far = bf16.further_than_upstream(actual, upstream, exact)
        if far and choices.differs:
            self.left_out["bf16"] = (
                "another element is the largest than upstream, which is no rounding of what follows"
            )
            return
        gradients = compare_gradients(bf16.in_fp32(actual), exact)
        outputs = compare_outputs(bf16.in_fp32(actual), bf16.in_fp32(exact))
        self.checks.append(Check("bf16", outputs["loss"], outputs["logits"], worst_of(gradients.values())))
        if far:
            key = max(far, key=lambda name: nan_is_largest(far[name]))
            self.failures.append(
                f"in bf16 {key} is {far[key]:.0f} times as far from upstream's in fp32 as upstream's own in bf16."
            )

    def _upstream_if_any(self, name: str, step: Callable[[], Step]) -> Step | None:
        """Upstream's step; None, and the check is left out, if its class refuses it or computes what is not finite."""
        try:
            upstream = step()
        except Exception as error:  # an operation may have no form in bf16, or none on this device
            reraise_machine_failure(error)
            self.left_out[name] = f"upstream's own class fails: {one_line_error(error)}"
            return None
        if upstream.not_finite:
            self.left_out[name] = f"upstream's own {upstream.not_finite} are not finite"
            return None
        return upstream

    def _real_logits(self, model: nn.Module, rows: Batch) -> dict[str, Tensor]:
        """The logits of an upstream model without those at padding, which are undefined."""
        return {"logits": self._reference_logits(model, rows)[_is_real(rows)]}

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


def _is_real(rows: Batch) -> Tensor:
    """Which positions `(B, S)` are no padding."""
    return rows.get("attention_mask", torch.ones_like(rows["input_ids"])).bool()


UNPACKED = ("plain", "padded right", "padded left", "router loss", "large weights", "bf16")
_WITH_MEDIA = ("plain", "packed", "chunks", "accumulation", "large weights", "bf16")
_SUBJECT = {
    "plain": "rows of one document",
    "packed": "packed rows",
    "leak": "packed rows",
    "chunks": "the loss in chunks",
    "accumulation": "gradient accumulation",
}
