"""A generated class on two gloo ranks against upstream's own class in one process: what "proven" needs beside one process.

    fsdp2   parameters are sharded, each rank has rows of its own
    ep2     the same, and the ranks share the experts; models with experts
    sp2     the same parameters, and each rank has a slice of every row, after the check of slices that starts a run

Loss and every gathered gradient are compared. Attention, seams and documents in separate rows are as a run chooses them, and
the router loss is on. Models of text get plain and packed rows, models of media the batches of `media_ranks.py`. Where ranks
have rows of their own, their data also differ:

    few experts     one rank has a short row of one token, which most experts never see, with a single label
    padding alone   one rank has what the loader gives where no sample is left: padding, no label, no image
    packed (media)  one rank has no label; in steps with one modality for each rank, one has no image
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from patchgen.runtime import model_calls, parallel, seams
from patchgen.runtime.data.collate import collate, text_sample
from patchgen.runtime.document_rows import LEFT, DocumentSeparation
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel import selfcheck, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify import given_config, head_kinds, media_ranks
from patchgen.runtime.verify.comparison import nan_is_largest
from patchgen.runtime.verify.inputs import IGNORED, text_cases
from patchgen.runtime.verify.layout import TWO_RANKS, Layout
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.observe.facts import reason_against
from patchgen.runtime.verify.ranks import COLLECTIVE_TIMEOUT, CaseFailed, RankPool
from patchgen.runtime.verify.reference_model import (
    ReferenceModel,
    Subject,
    find_generated,
    head_takes_media,
    state_of,
    training_config,
)
from patchgen.runtime.verify.slices import encoder_decoder_refusal
from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS
from patchgen.runtime.verify.verdict import REFUSED, one_line_error

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.verify.proof import Proof

FLOOR = 1e-4
"""Differences are divided by at least this share of the largest gradient: biases of keys are zero but for rounding."""
TIMEOUT = 600.0
"""Seconds within which ranks must have compared one layout. Ranks that wait for each other end earlier (`COLLECTIVE_TIMEOUT`)."""
FEW_EXPERTS = "few experts"
FIGURES = ("loss", "gradients", "packed_loss", "packed_gradients")
SHORT = 9
"""Tokens of a short row."""

LocalCase = tuple[list[dict[str, Any]], list[int] | None, dict[str, Any]]
"""Upstream's batches, the packed row that each is a document of (None: not packed), and the batch of this rank."""


@dataclass(frozen=True)
class LayoutResult:
    """How a class did in one layout.

    Attributes:
        reason: why it does not agree, beginning with `verdict.REFUSED` if a run in this layout is refused; "" if it agrees.
        difference: the largest relative one; None if nothing was measured.
        applies: whether there is anything to compare: experts to share.
    """

    reason: str = ""
    difference: float | None = None
    applies: bool = True


def compare_on_two_ranks(
    model: Subject,
    head: str,
    *,
    separates: DocumentSeparation,
    layouts: Iterable[str] = TWO_RANKS,
    collective_timeout: float = COLLECTIVE_TIMEOUT,
    code: set[str] | None = None,
) -> dict[str, LayoutResult]:
    """The result of each layout; {} for a head that is not a language model, of which no rows are shared by ranks here.

    Args:
        separates: whether a run computes packed documents in rows of their own (`TrainingPath.separates_documents`).
        collective_timeout: seconds that a rank waits for another; those that wait for each other get a second try with twice this.
        code: gets the functions that the ranks have called (`executed_code.functions`).

    Raises:
        CaseFailed: the machine failed: a rank was killed, or had no memory.
    """
    generated = find_generated(model)
    if head_kinds.kind_of(head) is not None:
        return {}
    has_media = head_takes_media(generated, head)
    results: dict[str, LayoutResult] = {}
    with contextlib.closing(RankPool(2, collective_timeout=collective_timeout)) as pool:
        for name in layouts:
            layout = TWO_RANKS[name]
            row = compare_layout(pool, generated, head, layout, has_media=has_media, separates=separates)
            results[name] = result_of(row)
        if code is not None:
            code |= pool.functions()
    return results


def complete(proof: Proof, model: Subject) -> Proof:
    """A proof with the comparison on two ranks, if one process agrees; what was observed may rule out layouts without it.

    Raises:
        CaseFailed: the machine failed: a rank was killed, or had no memory.
    """
    if proof.is_proven and proof.training is not None:
        facts = proof.training.facts
        against = {name: reason_against(facts, ranks=layout.ranks, sp=layout.sp) for name, layout in TWO_RANKS.items()}
        allowed = [name for name, reason in against.items() if not reason]
        compared = compare_on_two_ranks(
            model,
            proof.head,
            separates=proof.training.separates_documents,
            layouts=allowed,
            code=proof.code_on_ranks,
        )
        refused = {name: LayoutResult(f"{REFUSED}: {reason}") for name, reason in against.items() if reason}
        proof.two_ranks = {
            name: {**compared, **refused}[name] for name in TWO_RANKS if name in {**compared, **refused}
        }
    return proof


def result_of(row: Mapping[str, Any]) -> LayoutResult:
    """What a row of `compare` says."""
    measured = [row[name] for name in FIGURES if name in row]
    difference = max(measured, key=nan_is_largest) if measured else None
    return LayoutResult(row.get("reason", ""), difference, row.get("applies", True))


def compare_layout(
    pool: RankPool,
    model: Subject,
    head: str,
    layout: Layout,
    *,
    has_media: bool,
    separates: DocumentSeparation,
    is_second: bool = False,
) -> dict[str, Any]:
    """`compare` on the ranks of a pool: the row of the first that does not agree, or the reason of ranks that ended without one.

    Raises:
        CaseFailed: the machine failed.
    """
    options: dict[str, Any] = {"has_media": has_media, "separates": separates}
    try:
        rows = pool.run(compare, model, head, layout, **options, timeout=TIMEOUT)
    except CaseFailed as failure:
        if not failure.is_inconclusive:
            return {"reason": failure.first_error}
        if not failure.has_waited:
            raise
        if is_second:
            return {"reason": f"the ranks wait for each other: {failure.first_error}"}
        with contextlib.closing(RankPool(pool.world, collective_timeout=2 * pool.collective_timeout)) as patient:
            return compare_layout(patient, model, head, layout, **options, is_second=True)
    if len({row.get("reason", "") for row in rows}) > 1:
        pool.lose()  # a rank that ended alone leaves the others in a step
    return next((row for row in rows if row.get("reason")), rows[0])


# ------------------------------------------------------------------------------------------ on every rank


def compare(
    model: Subject, head: str, layout: Layout, *, has_media: bool = False, separates: DocumentSeparation = False
) -> dict[str, Any]:
    """The worst differences in a layout, up to the first case that does not agree; runs on every rank.

    Args:
        has_media: compare the batches with images, video and sound that upstream takes, not text.

    Returns:
        `seconds`, and what was found of `loss`, `gradients`, `packed_loss`, `packed_gradients`, `reason` and `applies`.
    """
    started = time.perf_counter()
    row = _compare(model, head, layout, has_media=has_media, separates=separates)
    return row | {"seconds": time.perf_counter() - started}


def _compare(
    model: Subject, head: str, layout: Layout, *, has_media: bool, separates: DocumentSeparation
) -> dict[str, Any]:
    state = state_of(layout.sp, layout.ep)
    generated = find_generated(model)
    generated_class = getattr(generated.load(), head)
    config = training_config(getattr(generated.upstream(), head), given_config.read(generated.directory))
    if layout.ep > 1 and not sharding.expert_paths(build_model(generated_class, config)):
        return {"applies": False}
    if layout.sp > 1 and (refusal := encoder_decoder_refusal(generated_class, layout.sp)):
        return {"reason": f"{REFUSED}: {refusal}"}
    if layout.sp > 1 and separates == LEFT:
        return {"reason": f"{REFUSED}: {model_calls.no_slices(head, layout.sp)}"}
    reference = media_ranks.reference_model(model, head)
    ours = reference.generated(separates)
    if refusal := _start_refusal(ours, reference, state):
        return {"reason": refusal}
    if has_media:
        cases = _media_cases(reference) if layout.sp == 1 else None
        return media_ranks.compare_all_cases(model, head, sp=layout.sp, ep=layout.ep, separates=separates, cases=cases)
    return _compare_text(ours, reference, state)


def _start_refusal(ours: PreTrainedModel, reference: ReferenceModel, state: ParallelState) -> str:
    """Why a run on these ranks ends before its first step, when the model is divided or by the check of slices; "" if it does not.

    What a step raises is no refusal: a run would have begun.
    """
    reason = ""
    try:
        sharding.shard_model(ours, state, obeys_proof=False)
        if state.sp > 1:
            with parallel.using(state), seams.using(**reference.seams):
                vocab_size = ours.config.get_text_config().vocab_size
                selfcheck.require_sliceable(ours, state, vocab_size=vocab_size, padded=False)
    except (ValueError, NotImplementedError) as error:
        reason = one_line_error(error)
    reasons: list[str] = [""] * state.config.world
    dist.all_gather_object(reasons, reason)
    if not any(reasons):
        return ""
    if "" in reasons:
        rank, told = next((rank, told) for rank, told in enumerate(reasons) if told)
        return f"rank {rank} alone ends at the start of a run: {told}"
    return f"{REFUSED} at the start of a run: {reasons[0]}"


def _media_cases(reference: ReferenceModel) -> list[str]:
    """Batches for ranks with rows of their own: the richest, and those in which the ranks have different things."""
    batches = reference.batches()
    richest = [name for name in media_ranks.RICHEST_FIRST if name in batches][:1]
    mixed = [media_ranks.MIXED_RANKS] if reference.builder.layouts else []
    return [*richest, media_ranks.PACKED, *mixed, media_ranks.PADDING_ALONE]


def _compare_text(ours: PreTrainedModel, reference: ReferenceModel, state: ParallelState) -> dict[str, Any]:
    """Plain rows, packed ones, and, where ranks have rows of their own, uneven ones."""
    found: dict[str, Any] = {}
    packs = model_calls.takes_documents(type(ours))
    for name, (pieces, packed_rows, local_batch) in _text_inputs(reference, state, packs=packs):
        step = functools.partial(reference.loss_and_gradients, pieces, packed_rows=packed_rows)
        ours.zero_grad()
        actual = media_ranks.step_on_ranks(
            ours, local_batch, state, pad_token_id=0, fsdp=True, kernels=reference.seams
        )
        row = media_ranks.compare_steps(reference.model, lambda _model, step=step: step(), actual, FLOOR)
        prefix = "packed_" if name == media_ranks.PACKED else ""
        for kind, key in (("loss", f"{prefix}loss"), ("gradient", f"{prefix}gradients")):
            found[key] = max(row[kind], found.get(key, 0.0), key=nan_is_largest)
        if "reason" in row:
            return found | {"reason": f"{'' if name == 'plain' else f'{name}: '}{row['reason']}"}
    return found


def _text_inputs(reference: ReferenceModel, state: ParallelState, *, packs: bool) -> Iterator[tuple[str, LocalCase]]:
    texts = text_cases(reference.config, reference.upstream_class, packed=packs)
    cases = {case.name: dict(case.batch) for case in texts}
    rows = torch.arange(cases["plain"]["input_ids"].shape[0]).chunk(state.config.num_batches)[state.batch_index]
    for name in ("plain", media_ranks.PACKED):
        if name in cases:
            inputs = cases[name]
            pieces, packed_rows = _documents(inputs) if name == media_ranks.PACKED else ([inputs], None)
            yield name, (pieces, packed_rows, {key: value[rows] for key, value in inputs.items()})
    if state.config.num_batches > 1:
        plain = {key: value[:1] for key, value in cases["plain"].items()}
        short = one_token(plain["input_ids"], SHORT)
        if _takes(reference, short):
            local = short if state.batch_index else plain
            yield FEW_EXPERTS, ([plain, *[short] * (state.config.num_batches - 1)], None, local)
        yield media_ranks.PADDING_ALONE, ([plain], None, alone_or_padding(plain, state, reference.pad_token_id))


def one_token(ids: Tensor, length: int) -> dict[str, Tensor]:
    """A row `(1, length)` of the first token of `ids`, of which one has a label."""
    row = ids[:1, :1].expand(1, length).contiguous()
    labels = torch.full_like(row, IGNORED)
    labels[:, length // 2] = row[:, 0]
    return {"input_ids": row, "labels": labels}


def alone_or_padding(row: Mapping[str, Tensor], state: ParallelState, pad_token_id: int) -> dict[str, Any]:
    """As the loader gives them: this row for the first rank, and for the others a batch of padding."""
    samples = [] if state.batch_index else [text_sample(row["input_ids"][0], row["labels"][0] != IGNORED)]
    return collate(samples, pad_to=None, pad_token_id=pad_token_id)


def _takes(reference: ReferenceModel, inputs: Mapping[str, Tensor]) -> bool:
    """Whether upstream itself computes these rows."""
    try:
        reference.builder.run_upstream(inputs)
    except UPSTREAM_REFUSALS as error:
        reraise_machine_failure(error)
        return False
    return True


def _documents(inputs: dict) -> tuple[list[dict[str, Tensor]], list[int]]:
    """Each document of each packed row as a batch, and the index of its row."""
    length = inputs["input_ids"].shape[1]
    pieces, rows = [], []
    for row, positions in enumerate(inputs["position_ids"]):
        starts = torch.nonzero(positions == 0).view(-1).tolist()
        for start, end in itertools.pairwise([*starts, length]):
            pieces.append({name: inputs[name][row : row + 1, start:end] for name in ("input_ids", "labels")})
            rows.append(row)
    return pieces, rows
