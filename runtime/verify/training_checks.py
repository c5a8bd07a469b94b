"""The comparisons of `training_path.py`, one by one: the generated class as the trainer calls it, and upstream's, eager.

B rows   S tokens per row   V vocabulary
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.kernels.loss.chunking import largest_chunk
from patchgen.runtime import attention, attention_kinds, model_calls, parallel, seams
from patchgen.runtime.attention_kinds import Kind, Names
from patchgen.runtime.document_rows import Separated
from patchgen.runtime.parallel import loss, report
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import training_inputs as inputs
from patchgen.runtime.verify.comparison import (
    EQUAL,
    SEED,
    Difference,
    Step,
    compare_gradients,
    difference,
)
from patchgen.runtime.verify.conditioning import ROUNDING, SHAKES, WELL_CONDITIONED, is_rounding, shaken_step
from patchgen.runtime.verify.correspondence import Correspondence, correspondence
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.multimodal_inputs import takes_media
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.training_inputs import Batch, Documents

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TOLERANCE = 1e-5
CHUNK = 7
UNSEEN = 5
"""Tokens at the end of a row that are changed."""


@dataclass(frozen=True)
class Check:
    """One comparison: the largest relative differences of what it compared."""

    name: str
    loss: Difference = EQUAL
    logits: Difference = EQUAL
    gradient: Difference = EQUAL

    @property
    def worst(self) -> float:
        """The largest of the three, relative."""
        return max(self.loss.relative, self.logits.relative, self.gradient.relative)


class Comparison:
    """Both models with the same weights, and the comparisons one by one."""

    def __init__(
        self,
        reference_class: type[PreTrainedModel],
        generated_class: type[PreTrainedModel],
        config: PreTrainedConfig,
        media: bool,
    ) -> None:
        self.generated_class, self.config = generated_class, config
        self.reference = build_model(reference_class, config)
        perturb(self.reference)
        self.draw = inputs.TextDraw(config)
        self.plain = inputs.plain_rows(self.draw)
        self.text = inputs.text_documents(self.draw)
        self.items: Callable[[Batch], int] = inputs.num_labels
        self.needs_media = takes_media(reference_class) and self.upstream_refusal() is not None
        self.media = inputs.media_documents(self.reference) if media or self.needs_media else {}
        if self.needs_media and self.media:  # rows of text alone are none that it is trained on
            self.text = next(iter(self.media.values()))
            self.plain = dict(self.text.whole_batch())
        self.seams: dict[str, str] = {}
        self.ran_seams: dict[str, str] = {}
        self.positions: Any = None
        self.state: ParallelState | None = None
        self.ran_with: Names = ""
        self.separates_documents: Separated = not model_calls.takes_documents(generated_class)
        self.only: tuple[str, ...] = ()
        self.correspondence = Correspondence()
        self.checks: list[Check] = []
        self.failures: list[str] = []
        self.left_out: dict[str, str] = {}

    def _generated(self, name: Names, config: PreTrainedConfig) -> PreTrainedModel:
        """The generated class under an attention, with upstream's weights."""
        torch.manual_seed(SEED)
        model = self.generated_class._from_config(copy.deepcopy(config), attn_implementation=name, dtype=torch.float32)
        self.correspondence = correspondence(self.reference, model)
        model.load_state_dict(self.correspondence.apply(self.reference.state_dict()), strict=True)
        return model.train()

    @cached_property
    def generated(self) -> PreTrainedModel:
        """The generated class as it is compared."""
        model = self._generated(self.ran_with, self.config)
        if self.separates_documents:
            model_calls.separate_documents(model, self.separates_documents)
        return model

    def with_documents_apart(self, how: Separated = True) -> Comparison:
        """The same comparison, nothing compared yet, of a model that computes packed documents in rows of their own."""
        other = copy.copy(self)
        other.__dict__.pop("generated", None)
        other.separates_documents, other.checks, other.failures, other.left_out = how, [], [], {}
        return other

    def choices(self, config: PreTrainedConfig, named_seams: Mapping[str, str | None]) -> tuple[Kind, ...]:
        """Finds the seams of a run and its position function; returns what each kind of layer asks of its attention.

        Rows of the data pipeline are run for that, with `config`.
        """
        model = self._generated(attention.ORDER[-1], config)
        if self.separates_documents:
            model_calls.separate_documents(model, self.separates_documents)
        finder = getattr(model, "get_position_id_func", None)
        self.positions = finder() if finder is not None else None
        self.seams = seams.for_training(report.seam_users(model), named_seams)
        self.ran_seams = {seam: self._runnable(model, seam) for seam in seams.AUTO_IN_TRAINING if seam in self.seams}
        packed = [self.text.packed(), *(one.packed(self.positions) for one in self.media.values())]
        with attention.recording() as asked, torch.no_grad(), all_eager():
            for rows in packed:
                model(**inputs.without_labels(inputs.handed(rows)), use_cache=False)
        return attention_kinds.recorded_kinds(model, asked)

    def _runnable(self, model: PreTrainedModel, seam: str) -> str:
        """The implementation of a seam that a run selects, or the choice of the CPU where it needs another device."""
        try:
            with torch.no_grad(), attention.recording(), _selected({seam: self.seams[seam]}):
                model(**self.plain, use_cache=False)
        except (NotImplementedError, ImportError):
            return seams.AUTO
        except Exception:
            pass  # the comparison says it
        return self.seams[seam]

    # ------------------------------------------------------------------------------------------- the checks

    def run(self) -> None:
        """All comparisons; a comparison that raises has failed, and the others go on."""
        packed = self.text.packed()
        steps: list[tuple[str, Callable[[], None]]] = [
            ("causality", self.causality),
            ("plain", lambda: self.rows("plain", self.plain, spare=3)),
            ("leak", lambda: self.leak(packed)),
            ("packed", lambda: self.documents("packed", self.text, packed)),
            ("padded right", lambda: self.rows("padded right", inputs.padded_rows(self.plain, left=False))),
            ("padded left", lambda: self.rows("padded left", inputs.padded_rows(self.plain, left=True))),
            ("chunks", lambda: self.documents("chunks", self.text, packed, chunk=CHUNK)),
            ("accumulation", lambda: self.accumulation(packed)),
            ("router loss", self.router_loss),
        ]
        if self.needs_media:  # the others are of other tokens, and of text alone
            steps = [one for one in steps if one[0] in ("plain", "packed", "chunks", "accumulation")]
        if self.only:
            steps = [one for one in steps if one[0] in self.only]
        for name, media in self.media.items():
            if self.only:
                steps.append(
                    (f"rows with {name}", lambda n=name, d=media: self.rows(f"rows with {n}", d.whole_batch()))
                )
                continue
            packed_media = lambda n=name, d=media: self.documents(f"packed {n}", d, d.packed(self.positions))  # noqa: E731
            steps.append((f"packed {name}", packed_media))
        for name, step in steps:
            before = len(self.failures)
            try:
                step()
            except Exception as error:
                self.failures.append(f"{_SUBJECT.get(name, name)}: {told(error)}")
            media = self.media.get(name.partition(" ")[2])
            takes_it = self.reference._supports_sdpa and len(self.failures) > before
            if takes_it and media is not None and (own := self._beside_sdpa(media)) > TOLERANCE:
                reason = (
                    f"{name}: upstream's own logits under sdpa differ from its eager ones by {own:.0e} of their size."
                )
                self.failures[before:] = [reason]

    def _beside_sdpa(self, documents: Documents) -> float:
        """How far upstream's own class, under the attention that it takes unasked, is from itself, eager."""
        other = copy.deepcopy(self.reference)
        other.set_attn_implementation("sdpa")
        rows = documents.reference()
        return difference(*(self._row_of_logits(model, rows) for model in (other, self.reference))).relative

    def causality(self) -> None:
        """Tokens at the end of a row change no logits before them, unless they do so upstream."""
        place = slice(self.plain["input_ids"].shape[1] - UNSEEN, None)
        changed = inputs.changed(self.plain, place, self.draw)
        upstream = [self._reference_logits(self.reference, rows)[:, : place.start] for rows in (self.plain, changed)]
        own = [self._logits(inputs.handed(rows))[:, : place.start] for rows in (self.plain, changed)]
        if difference(*upstream).relative > TOLERANCE:
            return  # it sees later tokens upstream, too: the rows below are compared with it
        found = difference(*own)
        self.checks.append(Check("causality", logits=found))
        if not found.relative <= TOLERANCE:
            self.failures.append(
                f"a later token changes earlier logits by {found.relative:.0e} of their size, and upstream it does not."
            )

    def rows(self, name: str, rows: Batch, spare: int = 0) -> None:
        """Rows without packing, in a step that has `spare` labels elsewhere."""
        items = self.items(rows) + spare
        counts = rows.get("attention_mask", torch.ones_like(rows["input_ids"])).bool()
        failed = len(self.failures)
        handed = inputs.handed(rows)
        if "attention_mask" in rows:  # a run never pads by a mask: others may
            targets = loss.upstream_labels(self.generated_class, rows)["labels"]
            handed = rows if targets is rows["labels"] else {**rows, "shift_labels": targets}
        logits = lambda model: {"logits": self._reference_logits(model, rows)[counts]}  # noqa: E731
        self._compare(
            name,
            actual=self._step([handed], items, {"logits": self._logits(handed)[counts]}),
            upstream_step=lambda model: self._reference_step(model, [rows], items, logits(model)),
        )
        # What attention makes of padding is each implementation's own: nothing to compare where upstream reads that.
        if len(self.failures) > failed and not counts.all() and self._reads_padding_upstream(rows, counts):
            found = self.checks.pop()
            self.left_out[name] = f"upstream reads the padding itself; ours differs by {found.worst:.0e} of its size"
            del self.failures[failed:]

    def _reads_padding_upstream(self, rows: Batch, counts: Tensor) -> bool:
        """Whether other tokens behind the zeros of the mask change upstream's logits of the others."""
        other = {**rows, "input_ids": torch.where(counts, rows["input_ids"], self.draw.others(rows["input_ids"]))}
        found = [self._reference_logits(self.reference, one)[counts] for one in (rows, other)]
        return not difference(*found).relative <= TOLERANCE

    def documents(self, name: str, documents: Documents, packed: Batch, chunk: int | None = None) -> None:
        """A packed row against its documents alone."""
        items = sum(map(self.items, documents.rows))
        rows = documents.reference()
        with largest_chunk(chunk) if chunk else contextlib.nullcontext():
            actual = self._step([inputs.handed(packed)], items, {"logits": self._logits(inputs.handed(packed))})
        self._compare(
            name,
            actual,
            lambda model: self._reference_step(model, rows, items, {"logits": self._row_of_logits(model, rows)}),
        )

    def leak(self, packed: Batch) -> None:
        """Other tokens in one document change no logits of the others."""
        worst = self._leak(packed, lambda rows: self._logits(inputs.handed(rows)))
        self.checks.append(Check("leak", logits=worst))
        if not worst.relative <= TOLERANCE:
            self.failures.append(
                f"packed rows: other tokens in one document change the logits of others by {worst.relative:.0e} of their "
                "size."
            )

    def _leak(self, packed: Batch, logits: Callable[[Batch], Tensor]) -> Difference:
        """How far other tokens in one document change the logits of the others."""
        before, worst = logits(packed), EQUAL
        for place in self.text.bounds():
            after = logits(inputs.changed(packed, place, self.draw))
            others = torch.ones(before.shape[1], dtype=torch.bool)
            others[place] = False
            worst = worst.worst(difference(after[:, others], before[:, others]))
        return worst

    def mixes_documents_upstream(self) -> bool:
        """Whether upstream's own class, eager, mixes documents that only their position ids tell apart, or fails on them."""
        known = inspect.signature(type(self.reference).forward).parameters
        packed = {name: self.text.packed()[name] for name in ("input_ids", "position_ids") if name in known}
        try:
            found = self._leak(packed, lambda rows: self._reference_logits(self.reference, rows))
            for documents in self.media.values():
                rows = {n: v for n, v in documents.packed(self.positions).items() if n in known}
                apart = self._row_of_logits(self.reference, documents.reference())
                found = found.worst(difference(self._reference_logits(self.reference, rows), apart))
        except Exception:
            return True
        return not found.relative <= TOLERANCE

    def upstream_refusal(self) -> Exception | None:
        """What upstream's own class, eager, raises in training on a document by itself."""
        items = sum(map(self.items, self.text.rows))
        try:
            self._reference_step(self.reference, self.text.rows, items)
        except Exception as error:
            return error
        return None

    def accumulation(self, packed: Batch) -> None:
        """Two micro-batches of different size are one step over both."""
        rows = [*inputs.same_rows([self.text]), *(self.text.rows if self.needs_media else [self.plain])]
        items = sum(map(self.items, rows))
        second = packed if self.needs_media else self.plain
        self._compare(
            "accumulation",
            self._step([inputs.handed(packed), inputs.handed(second)], items),
            lambda model: self._reference_step(model, rows, items),
        )

    def router_loss(self) -> None:
        """One row with the router loss, whose definition over several rows is the run's own (docs/parallel.md)."""
        switch = "output_router_logits"
        owners = [
            one
            for model in (self.reference, self.generated)
            for one in (model.config, model.config.get_text_config(decoder=True))
            if hasattr(one, switch)
        ]
        if not owners:
            return
        row = {name: tensor[:1] for name, tensor in self.plain.items()}
        with contextlib.ExitStack() as stack:
            for one in owners:
                stack.callback(setattr, one, switch, getattr(one, switch))
                setattr(one, switch, True)
            items = self.items(row)
            self._compare(
                "router loss",
                self._step([inputs.handed(row)], items),
                lambda model: self._reference_step(model, [row], items),
            )

    # ------------------------------------------------------------------------------------- as the trainer calls

    def _logits(self, rows: Batch) -> Tensor:
        """`(B, S, V)` of the generated model, as evaluation would call it."""
        with torch.no_grad(), _selected(self.ran_seams), parallel.using(self.state):
            return self.generated(**inputs.without_labels(rows), use_cache=False).logits

    def _step(self, micro_batches: Sequence[Batch], items: int, outputs: Mapping[str, Tensor] | None = None) -> Step:
        """Loss and gradients of one step, as the trainer takes it."""
        model, total = self.generated, torch.zeros(())
        model.zero_grad(set_to_none=True)
        number = torch.tensor(items)
        with _selected(self.ran_seams), self._as_a_run(number, len(micro_batches)):
            for rows in micro_batches:
                torch.manual_seed(SEED)
                share = model(**copy.deepcopy(rows), num_items_in_batch=number, use_cache=False).loss
                share.backward()
                total = total + share.detach()
        return Step({"loss": total, **(outputs or {})}, {name: p.grad for name, p in model.named_parameters()})

    @contextlib.contextmanager
    def _as_a_run(self, items: Tensor, micro_batches: int) -> Iterator[None]:
        """A step of the trainer; heads of whole rows train in others', which call them without one."""
        if self.only:
            yield
        else:
            with parallel.using(self.state), loss.step(items, micro_batches):
                yield

    @staticmethod
    def _reference_logits(model: nn.Module, rows: Batch) -> Tensor:
        handed = inputs.in_dtype_of(model, inputs.without_labels(rows))
        with torch.no_grad(), all_eager():
            return model(**handed, use_cache=False).logits

    def _reference_step(
        self, model: nn.Module, rows: Sequence[Batch], items: int, outputs: Mapping[str, Tensor] | None = None
    ) -> Step:
        """The step of documents one by one: each mean counts with its share of the labels."""
        model.train()
        model.zero_grad(set_to_none=True)
        total = torch.zeros((), dtype=torch.float64)
        for row in rows:
            labels = self.items(row)
            if not labels:
                continue
            torch.manual_seed(SEED)
            handed = inputs.in_dtype_of(model, loss.upstream_labels(self.generated_class, copy.deepcopy(dict(row))))
            with all_eager():
                mean = model(**handed, use_cache=False).loss
                share = mean * (labels / items)
                share.backward()
            total += share.detach()
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        return Step(
            {"loss": total.to(dtype), **(outputs or {})}, {name: p.grad for name, p in model.named_parameters()}
        )

    def _row_of_logits(self, model: nn.Module, rows: Sequence[Batch]) -> Tensor:
        """The logits of documents one after the other, `(1, S, V)`, without those of padding."""
        parts = []
        for row in rows:
            counts = row.get("attention_mask", torch.ones_like(row["input_ids"])).bool()
            parts.append(self._reference_logits(model, row)[counts])
        return torch.cat(parts)[None]

    # --------------------------------------------------------------------------------------------- comparing

    def _compare(self, name: str, actual: Step, upstream_step: Callable[[nn.Module], Step]) -> None:
        def reference(model: nn.Module) -> Step:
            return self.correspondence.step(upstream_step(model))

        expected = reference(self.reference)
        found = {key: difference(actual.outputs[key], expected.outputs[key]) for key in actual.outputs}
        gradients = compare_gradients(actual, expected)
        worst = EQUAL
        for one in gradients.values():
            worst = worst.worst(one)
        self.checks.append(Check(name, found["loss"], found.get("logits", EQUAL), worst))
        beyond = {key: one for key, one in found.items() if not one.relative <= TOLERANCE}
        beyond |= {f"gradient of {key}": one for key, one in gradients.items() if not one.relative <= TOLERANCE}
        hopeless = ROUNDING * WELL_CONDITIONED
        if beyond and all(one.relative <= hopeless for one in beyond.values()):
            shaken = [shaken_step(self.reference, reference, seed) for seed in range(SHAKES)]
            beyond = {key: one for key, one in beyond.items() if not is_rounding(key, actual, expected, shaken)}
        if beyond:
            telling = (key for key in ("logits", "loss") if key in beyond)
            key = next(telling, max(beyond, key=lambda name: beyond[name].relative))
            verb = "differ" if key == "logits" else "differs"
            whose = "upstream's" if name in UNPACKED or self.only else "upstream's for the documents alone"
            self.failures.append(f"{_SUBJECT.get(name, name)}: {key} {verb} from {whose} by {_size(beyond[key])}.")


UNPACKED = ("plain", "padded right", "padded left", "router loss")
_SUBJECT = {
    "plain": "rows of one document",
    "packed": "packed rows",
    "leak": "packed rows",
    "chunks": "the loss in chunks",
    "accumulation": "gradient accumulation",
}


def _size(found: Difference) -> str:
    if found.absolute == float("inf"):
        return "all of it: it is there on one side only"
    return f"{found.relative:.0e} of its size"


@contextlib.contextmanager
def _selected(chosen: Mapping[str, str]) -> Iterator[None]:
    with all_eager(), seams.using(**chosen):
        yield


def told(error: Exception) -> str:
    """An exception in one line, ending in a full stop."""
    text = " ".join(str(error).split()) or "no message"
    named = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return named if named.endswith((".", "!", "?")) else f"{named}."
