"""A mutant that is equal in one process, on two gloo ranks: equal there, refused, wrong, or not run.

    pool = RankPool(2)
    mutants_on_ranks.verdict(pool, subject)

Layouts, each with rows of one document and with a packed row:

    sp 2            the tokens of a row divided, after the check of slices that starts a run, with padded rows; also rows with
                    padding, and rows whose image, video or sound lies across the slices
    ep 2, fsdp      experts divided, everything else sharded; models with experts
    fsdp            parameters sharded, rows divided

The reference is upstream's changed class in one process. If its logits of a row depend on the other rows, layouts that divide
rows cannot be equal and are not compared; if it fails on packed rows, only rows of one document are.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from patchgen.runtime import attention, model_calls, parallel, registry, seams
from patchgen.runtime.document_rows import LEFT, DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import row_lengths, selfcheck, sharding
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify import mutants
from patchgen.runtime.verify.changed_modules import changed_module
from patchgen.runtime.verify.changed_upstream import raises_too, training_conditions
from patchgen.runtime.verify.comparison import Step, compare_gradients, difference, name_of_worst
from patchgen.runtime.verify.conditioning import beyond_rounding
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.kept_state import state_kept
from patchgen.runtime.verify.layout import Layout
from patchgen.runtime.verify.media_ranks import PACKED, case_inputs, step_on_ranks
from patchgen.runtime.verify.media_samples import Sample
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.ranks import COLLECTIVE_TIMEOUT, CaseFailed, RankPool
from patchgen.runtime.verify.reference_model import (
    NotApplicable,
    ReferenceModel,
    state_of,
    switch_dropout_off,
    training_choices,
    training_config,
)
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.training_inputs import Documents

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = mutants.TOLERANCE
SECONDS, MORE_SECONDS = 120.0, 300.0
"""Within which ranks must have a verdict; the latter if they have waited for each other."""
PLAIN, PADDED, BOUNDARY, SOUNDS = "plain", "text", "boundary", "audio"
"""Names of `ReferenceModel.batches`; the samples of "text" have several lengths, so that all but one are padded. Those of
"boundary" have items of the first modality only, an image where the model takes any; ranks share the chunks of sounds, too."""
RUNTIME = Path(parallel.__file__).parents[1].as_posix()


@dataclass(frozen=True)
class Subject:
    """A mutant and the files generated from it.

    Attributes:
        module: the import path of upstream's file.
        head: the class that is compared.
        text, modules: of the mutant.
        files: generated files by name.
    """

    module: str
    head: str
    text: str
    modules: Mapping[str, str]
    files: Mapping[str, str]


LAYOUTS = (Layout(2, sp=2), Layout(2, ep=2, fsdp=True), Layout(2, fsdp=True))


def verdict(pool: RankPool, subject: Subject, layouts: Sequence[Layout] = LAYOUTS) -> mutants.Verdict:
    """The verdict on a mutant on two ranks: of what one layout refuses, that of the others if they are wrong."""
    found = _verdict(pool, subject, layouts)
    refusing = [number for number, layout in enumerate(layouts) if found.detail.startswith(f"{layout.name}, ")]
    if found.kind == mutants.REFUSED and refusing and (others := layouts[refusing[0] + 1 :]):
        rest = verdict(pool, subject, others)
        return rest if rest.kind == mutants.WRONG else found
    return found


def _verdict(
    pool: RankPool, subject: Subject, layouts: Sequence[Layout], *, is_second: bool = False
) -> mutants.Verdict:
    """The verdict in these layouts; ranks that wait for each other get a second chance, for the machine may be busy."""
    try:
        verdicts = pool.run(compare, subject, layouts, timeout=MORE_SECONDS if is_second else SECONDS)
    except CaseFailed as failure:
        # What a rank refused explains ranks that waited for it, not an error of another.
        kinds = (mutants.WRONG, mutants.REFUSED) if failure.is_inconclusive else (mutants.WRONG,)
        if judged := [verdict for verdict in failure.results if verdict.kind in kinds]:
            return judged[0]
        if failure.is_inconclusive and failure.has_waited and not is_second:
            with contextlib.closing(RankPool(pool.world, collective_timeout=2 * COLLECTIVE_TIMEOUT)) as patient:
                return _verdict(patient, subject, layouts, is_second=True)
        if failure.is_inconclusive and failure.has_waited:
            return mutants.Verdict(mutants.WRONG, f"on ranks: they wait for each other: {failure.first_error}")
        # No memory, or killed: no verdict.
        kind = mutants.NOT_RUN if failure.is_inconclusive else mutants.WRONG
        return mutants.Verdict(kind, f"on ranks: {failure.first_error}")
    if len({(verdict.kind, verdict.detail) for verdict in verdicts}) > 1:
        pool.close()  # a rank that failed alone leaves the others in a step: the next mutant would meet it
    # A rank may refuse what another would compute.
    return next((verdict for verdict in verdicts if verdict.kind != mutants.EQUAL), verdicts[0])


def compare(subject: Subject, layouts: Sequence[Layout] = LAYOUTS) -> mutants.Verdict:
    """The verdict of this rank in these layouts; runs on every rank."""
    attention.register()
    with changed_module(subject.module, subject.text, subject.modules) as changed_source:
        generated = changed_source.folder / "generated"
        generated.mkdir()
        for file, text in subject.files.items():
            (generated / file).write_text(text, encoding="utf-8")
        upstream_class = getattr(changed_source.load(), subject.head)
        model = registry.read_model(generated)
        left_out: dict[str, str] = {}
        try:
            reference = _Reference(model, subject.head, changed_source.name)
        except Exception as error:
            reraise_machine_failure(error)
            if _takes_training_rows(upstream_class):
                return _verdict_on_error(error, "start")
            left_out[PACKED] = f"upstream's changed class fails on packed rows, too: {mutants.one_line(error)}"
            with _rows_of_one_document():
                if not _takes_training_rows(upstream_class):
                    return mutants.Verdict(
                        mutants.NOT_RUN, "on ranks: upstream's changed class fails on the rows of a run, too"
                    )
                try:
                    reference = _Reference(model, subject.head, changed_source.name)
                except Exception as second:
                    reraise_machine_failure(second)
                    return _verdict_on_error(second, "start")
        if reason := _fails_without_labels(reference):
            return mutants.Verdict(mutants.NOT_RUN, f"on ranks: upstream's changed class needs labels: {reason}")
        takes_packed = not left_out
        compared = []
        for layout in layouts:
            if layout.ep > 1 and not sharding.expert_paths(reference.generated()):
                continue
            cases = [PLAIN, *([PACKED] if takes_packed else [])]
            if layout.sp > 1 and reference.separates == LEFT:
                left_out[layout.name] = model_calls.no_slices(subject.head, layout.sp)
                continue
            cases += [case for case in (PADDED, BOUNDARY, SOUNDS) if layout.sp > 1 and case in reference.batches()]
            for case in cases:
                layout_verdict = _compare_layout(reference, layout, case, takes_packed=takes_packed)
                if layout_verdict.kind in (mutants.WRONG, mutants.REFUSED):
                    return layout_verdict
                place = _place(layout, case)
                if layout_verdict.kind == mutants.NOT_RUN:
                    left_out[place] = layout_verdict.detail
                else:
                    compared.append(place)
    return mutants.Verdict(
        mutants.EQUAL if compared else mutants.NOT_RUN,
        "; ".join(f"{place}: {reason}" for place, reason in left_out.items()),
        compared=tuple(compared),
        left_out=left_out,
    )


def _place(layout: Layout, case: str) -> str:
    return f"{layout.name}, {case}"


class _Reference(ReferenceModel):
    """Upstream's changed class as a reference that keeps nothing of one case for the next."""

    def __init__(self, generated: registry.GeneratedModel, head: str, upstream_module: str) -> None:
        super().__init__(generated, head, upstream_module)
        fresh = build_model(self.upstream_class, self.config)  # the builder of samples has run the other
        perturb(fresh)
        switch_dropout_off(fresh)
        self.model = self.builder.model = fresh

    def generated(self, separates: DocumentSeparation = False) -> PreTrainedModel:
        return super().generated(separates or self.separates)

    def batches(self) -> dict[str, tuple[Sample, ...]]:
        with state_kept(self.model):
            return super().batches()

    def positions(self, inputs: dict[str, Any]) -> Tensor:
        with state_kept(self.model):
            return super().positions(inputs)

    def loss_and_gradients(
        self, batches: Sequence[dict[str, Any]], *, packed_rows: Sequence[int] | None = None, training: bool = True
    ) -> tuple[float, dict[str, Tensor]]:
        with state_kept(self.model):
            return super().loss_and_gradients(batches, packed_rows=packed_rows, training=training)

    def logits(self, inputs: Mapping[str, Any], *, training: bool = False) -> Tensor:
        self.model.train(training)
        with state_kept(self.model), all_eager():
            return self.model(**inputs, use_cache=False).logits.detach()


@contextlib.contextmanager
def _rows_of_one_document() -> Iterator[None]:
    """Within the block, attention and kernels of a run are chosen by what rows of one document require."""
    packed = Documents.packed
    setattr(Documents, "packed", lambda self, positions=None: packed(replace(self, rows=self.rows[:1]), positions))  # noqa: B010
    try:
        yield
    finally:
        setattr(Documents, "packed", packed)  # noqa: B010


def _fails_without_labels(reference: _Reference) -> str:
    """The error of upstream's changed class without labels, with which the checks at the start of a run call no model."""
    samples = reference.batches().get(PLAIN)
    if samples is None:
        return ""
    inputs = reference.builder.case(PLAIN, samples).batch
    try:
        reference.logits({name: value for name, value in inputs.items() if name != "labels"})
    except Exception as error:
        reraise_machine_failure(error)
        return mutants.one_line(error)
    return ""


def _takes_training_rows(upstream_class: type[PreTrainedModel]) -> bool:
    """Whether upstream's changed class takes the rows of a run: it may fail on lengths that it was not tried with."""
    try:
        training_choices(upstream_class, upstream_class, training_config(upstream_class, GivenConfig()))
    except Exception as error:
        reraise_machine_failure(error)
        return False
    return True


def _compare_layout(reference: _Reference, layout: Layout, case: str, *, takes_packed: bool = True) -> mutants.Verdict:
    """The verdict in one layout; "not run", with the reason, if upstream in one process is no reference for it."""
    state = state_of(layout.sp, layout.ep)
    place = _place(layout, case)
    try:
        full_batches, local_batch = case_inputs(reference, case, state)
    except (NotApplicable, KeyError) as error:
        return mutants.Verdict(mutants.NOT_RUN, f"no inputs ({error})")
    if layout.sp == 1 and case == PLAIN and _rows_are_dependent(reference, full_batches[0]):
        return mutants.Verdict(mutants.NOT_RUN, "upstream's logits of a row depend on the other rows")
    if case == PACKED and not _divides_by_num_items(reference, full_batches[0]):
        return mutants.Verdict(mutants.NOT_RUN, "upstream's loss does not use num_items_in_batch")
    model = reference.generated()
    try:
        if layout.fsdp:
            sharding.shard_model(model, state)
        else:
            row_lengths.install(model)
        with parallel.using(state), all_eager(), seams.using(**reference.seams):
            vocab_size = model.config.get_text_config().vocab_size
            padded = PADDED in reference.batches()
            selfcheck.require_sliceable(model, state, vocab_size=vocab_size, packed=takes_packed, padded=padded)
            selfcheck.require_router_order(model, state, vocab_size=vocab_size)
        kernels = reference.seams
        loss, gradients = step_on_ranks(
            model, local_batch, state, pad_token_id=reference.pad_token_id, fsdp=layout.fsdp, kernels=kernels
        )
    except Exception as error:
        reraise_machine_failure(error)
        verdict = _verdict_on_error(error, place)
        # The check at the start of a run names its row and raises from the model's own error.
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        is_the_models = verdict.kind == mutants.WRONG or cause is not error
        if is_the_models and _fails_upstream(reference, full_batches, case, layout, cause):
            return mutants.Verdict(
                mutants.NOT_RUN, "upstream's changed class fails under the conditions of a run, too"
            )
        return verdict
    actual = _step(reference, loss, gradients)
    verdict = _judge(reference, full_batches, case, place, actual)
    if verdict.kind == mutants.WRONG:
        # Upstream may refuse the attention of a run (an audio tower without SDPA): then its own attention counts.
        unmasked = [_without_full_mask(inputs) for inputs in full_batches]
        with contextlib.suppress(ValueError), training_conditions(reference):
            verdict = _judge(reference, unmasked, case, place, actual)
    if verdict.kind == mutants.WRONG and case == PACKED and _joins_documents(reference, full_batches):
        return mutants.Verdict(mutants.NOT_RUN, "one process, too, computes the documents of a row together")
    return verdict


def _without_full_mask(inputs: dict[str, Any]) -> dict[str, Any]:
    """A batch as a run passes it: a mask without zeros is none, which changed code may ask for."""
    mask = inputs.get("attention_mask")
    is_full = mask is not None and bool(mask.all())
    return {name: value for name, value in inputs.items() if not (is_full and name == "attention_mask")}


def _fails_upstream(reference: _Reference, full_batches: list, case: str, layout: Layout, error: Exception) -> bool:
    """Whether upstream's changed class raises the same error in a step, under the attention of a run or sharded.

    Changes in place raise one: of what the attention saved for its backward, or of a layer's input, which FSDP2 hooks.
    """

    def step() -> None:
        with training_conditions(reference):
            _reference_step(reference, full_batches, case)

    return raises_too(step, error) or (
        layout.fsdp and raises_too(lambda: _sharded_step(reference, full_batches[0]), error)
    )


def _sharded_step(reference: _Reference, inputs: Mapping) -> None:
    """A step of upstream's changed class with each layer and the rest under FSDP2.

    Over this rank alone: where only one rank failed, the others are still in the step that failed.
    """
    model, mesh = copy.deepcopy(reference.model), _mesh_of_this_rank()
    for module in (*sharding.find_layers(model, None), model):
        fully_shard(module, mesh=mesh)
    with all_eager():
        model(**inputs, use_cache=False).loss.backward()


@functools.cache
def _mesh_of_this_rank() -> DeviceMesh:  # process groups are never freed
    group = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return DeviceMesh.from_group(group, "cpu")


def _reference_step(reference: _Reference, full_batches: list, case: str) -> Step:
    packed_rows = [0] * len(full_batches) if case == PACKED else None
    return _step(reference, *reference.loss_and_gradients(full_batches, packed_rows=packed_rows))


def _judge(reference: _Reference, full_batches: list, case: str, place: str, actual: Step) -> mutants.Verdict:
    def reference_step(_: torch.nn.Module) -> Step:
        return _reference_step(reference, full_batches, case)

    expected = reference_step(reference.model)
    differences = {"loss": difference(actual.outputs["loss"], expected.outputs["loss"])}
    differences |= {f"gradient of {name}": gradient for name, gradient in compare_gradients(actual, expected).items()}
    beyond = {name: value for name, value in differences.items() if not value.relative <= TOLERANCE}
    beyond = beyond_rounding(beyond, actual, expected, reference.model, reference_step)
    if not beyond:
        return mutants.Verdict(mutants.EQUAL)
    worst = name_of_worst(beyond)
    return mutants.Verdict(mutants.WRONG, f"{place}: {worst} differs by {beyond[worst].relative:.1e}")


def _step(reference: _Reference, loss: float, gradients: Mapping[str, Tensor]) -> Step:
    """A step with zeros for missing gradients: an unused parameter has none in one process and zeros on ranks."""
    all_gradients = {
        name: gradients.get(name, torch.zeros_like(parameter))
        for name, parameter in reference.model.named_parameters()
    }
    return Step({"loss": torch.tensor(loss)}, all_gradients)


@torch.no_grad()
def _joins_documents(reference: _Reference, full_batches: list) -> bool:
    """Whether the generated class in one process computes other logits for the documents of a packed row than upstream's class
    for each alone: then ranks are not to blame for a difference from upstream's documents one by one."""
    _, row = case_inputs(reference, PACKED, state_of(dist.get_world_size()))
    local = slice_batch(row, sp=1, sp_rank=0, pad_token_id=reference.pad_token_id)
    model = reference.generated()
    with parallel.using(None), all_eager(), seams.using(**reference.seams):
        joined = model.eval()(**local, use_cache=False).logits[0]
    apart = []
    for inputs in full_batches:
        logits = reference.logits(inputs)
        mask = inputs.get("attention_mask")
        apart.append(logits.flatten(0, 1) if mask is None else logits[mask.bool()])
    alone = torch.cat(apart)
    return difference(joined[: len(alone)], alone).relative > TOLERANCE


@torch.no_grad()
def _divides_by_num_items(reference: _Reference, inputs: Mapping) -> bool:
    """Whether upstream's loss uses `num_items_in_batch`: otherwise the losses of documents do not add up."""
    losses = []
    for number in (50, 100):
        with state_kept(reference.model), all_eager():
            losses.append(reference.model(**inputs, num_items_in_batch=torch.tensor(number)).loss)
    return bool(losses[0] != losses[1])


def _rows_are_dependent(reference: _Reference, inputs: Mapping) -> bool:
    """Whether upstream's logits of a row depend on the rows before or after it, in either mode; with gradients, as in a step."""
    rows = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
    if set(inputs) - {"input_ids", "attention_mask", "labels", "position_ids"}:
        return False  # a batch with images cannot simply be cut into rows
    half = len(rows["input_ids"]) // 2
    for training in (False, True):
        together = reference.logits(rows, training=training)
        for part in (slice(half), slice(half, None)):
            alone = reference.logits({key: value[part] for key, value in rows.items()}, training=training)
            if difference(together[part], alone).relative > TOLERANCE:
                return True
    return False


def _verdict_on_error(error: Exception, place: str) -> mutants.Verdict:
    """Refused if the runtime raised the error on purpose, wrong if the model did."""
    file = Path(traceback.extract_tb(error.__traceback__)[-1].filename).as_posix()
    detail = f"{place}: {type(error).__name__}: {' '.join(str(error).split())}"[:240]
    if file.startswith(RUNTIME) and isinstance(error, ValueError | NotImplementedError):
        return mutants.Verdict(mutants.REFUSED, detail, f"runtime/{Path(file).relative_to(RUNTIME).as_posix()}")
    return mutants.Verdict(mutants.WRONG, detail)
