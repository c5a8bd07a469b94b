"""Multimodal models on real ranks against upstream's own class on one.

    patchgen verify qwen3_vl --ranks 4 --sp 2 --fsdp

Upstream's class in one process gets the full batch; the generated class on gloo ranks gets it split: samples over batch
ranks, tokens over the ranks that share a sequence. Loss and every gathered gradient are compared.

    images    several per sample, across the boundary of two slices, on one slice only, and a sample without
    video, audio, sound, mixed, text, packed
    padding alone   the first rank has a sample, the others what the loader gives where no sample is left
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from patchgen.runtime import model_calls, parallel, seams
from patchgen.runtime.data.collate import collate
from patchgen.runtime.document_rows import LEFT, DocumentSeparation
from patchgen.runtime.parallel import batch, loss, media, sharding
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.verify.comparison import nan_is_largest
from patchgen.runtime.verify.conditioning import (
    MAX_MOVEMENT,
    ROUNDING_FACTOR,
    gradient_sensitivity,
    relative_difference,
)
from patchgen.runtime.verify.media import AUDIO
from patchgen.runtime.verify.media_samples import Sample
from patchgen.runtime.verify.ranks import CaseFailed, RankPool
from patchgen.runtime.verify.reference_model import (
    NotApplicable,
    ReferenceModel,
    Subject,
    find_generated,
    reference_model,
    state_of,
)

LossAndGradients = tuple[float, dict[str, Tensor]]
TOLERANCE = 1e-5
"""Relative, on the loss and on every gradient; beyond it, what rounding alone explains (`conditioning.py`)."""
TIMEOUT = 60.0  # seconds: a batch that takes longer on the ranks hangs
MIXED_RANKS = "one modality each"
PACKED, PADDING_ALONE = "packed", "padding alone"
RICHEST_FIRST = ("mixed", "images", "audio", "video", "text")
"""Batches by what is in them."""


@dataclass(frozen=True)
class RankResult:
    """One batch on the ranks against one rank: relative differences; `reason` is empty if everything agrees."""

    case: str
    loss: float = math.nan
    gradient: float = math.nan
    parameter: str = ""
    seconds: float = 0.0
    reason: str = ""
    towers: dict[str, str] = field(default_factory=dict)
    """How the ranks that share a sequence computed each tower that ran."""


# ------------------------------------------------------------------------------------------ on every rank


def case_names(model: Subject, head: str, *, has_several_batches: bool = False) -> list[str]:
    """The names of a model's batches; runs on every rank, with the same result on all.

    Args:
        has_several_batches: whether several ranks hold batches, which may be of different modalities.
    """
    reference = reference_model(model, head)
    mixed = [MIXED_RANKS] if has_several_batches and reference.builder.layouts else []
    return [*reference.batches(), PACKED, *mixed]


def compare(model: Subject, head: str, name: str, **options: Any) -> dict[str, Any]:
    """`compare_case` with these options; runs on every rank, with the same result on all."""
    return compare_case(reference_model(model, head), name, **options)


def compare_case(
    reference: ReferenceModel,
    name: str,
    *,
    sp: int,
    fsdp: bool,
    ep: int = 1,
    training: bool = True,
    separates: DocumentSeparation = False,
) -> dict[str, Any]:
    """One batch on this layout against one rank.

    Args:
        separates: whether documents are computed in rows of their own.
    """
    started = time.perf_counter()
    state = state_of(sp, ep)
    full_batches, local_batch = case_inputs(reference, name, state)
    generated = reference.generated(separates)
    if fsdp:
        sharding.shard_model(generated, state, obeys_proof=False)
    actual = step_on_ranks(
        generated,
        local_batch,
        state,
        pad_token_id=reference.pad_token_id,
        fsdp=fsdp,
        training=training,
        kernels=reference.seams,
    )
    row = {"case": name, "seconds": time.perf_counter() - started, "towers": media.describe(generated, sp)}
    packed_rows = [0] * len(full_batches) if name == PACKED else None
    step = functools.partial(reference.loss_and_gradients, full_batches, packed_rows=packed_rows, training=training)
    return row | compare_steps(reference.model, lambda _model: step(), actual)


def compare_all_cases(
    model: Subject, head: str, *, sp: int, ep: int, separates: DocumentSeparation, cases: Sequence[str] | None = None
) -> dict[str, Any]:
    """The worst differences over all batches of a model, up to the first that fails; runs on every rank.

    If several ranks hold batches, steps follow in which each rank has another modality (`mixed_steps`).

    Args:
        separates: whether documents are computed in rows of their own.
        cases: names of batches; default: those of `case_names`.
    """
    reference = reference_model(model, head)
    rows = []
    for name in cases or case_names(model, head, has_several_batches=dist.get_world_size() > sp):
        if name == MIXED_RANKS:
            steps = len(reference.builder.layouts) + 1
            rows += mixed_steps(model, head, sp=sp, ep=ep, num_steps=steps, separates=separates)
        else:
            with contextlib.suppress(NotApplicable):
                rows.append(compare_case(reference, name, sp=sp, ep=ep, fsdp=True, separates=separates))
        if any(row.get("reason") for row in rows):
            break
    reason = next((f"{row['case']}: {row['reason']}" for row in rows if row.get("reason")), "")
    loss, gradient = (max((row[name] for row in rows), key=nan_is_largest) for name in ("loss", "gradient"))
    return {"loss": loss, "gradients": gradient, "reason": reason}


def mixed_steps(
    model: Subject,
    head: str,
    *,
    sp: int = 1,
    ep: int = 1,
    num_steps: int = 10,
    fsdp: bool = True,
    separates: DocumentSeparation = False,
) -> list[dict[str, Any]]:
    """Consecutive optimizer steps in which each batch index has another modality; runs on every rank.

    With four ranks and an omni model: images, video, audio and text only. In every step the gradients of the ranks are
    compared with those of one rank with the full batch and the same weights.

    Args:
        separates: whether documents are computed in rows of their own.
    """
    reference = reference_model(model, head)
    state = state_of(sp, ep)
    generated = reference.generated(separates)
    if fsdp:
        sharding.shard_model(generated, state, obeys_proof=False)
    optimizer = torch.optim.SGD(generated.parameters(), lr=1e-2)
    start = {name: tensor.clone() for name, tensor in reference.model.state_dict().items()}
    rows = []
    try:
        for number in range(num_steps):
            started = time.perf_counter()
            samples = one_modality_each(reference, state.config.num_batches, number)
            # Some models distinguish images and videos only by the batch they are in: upstream refuses a mixed batch.
            pieces = [[sample] for sample in samples] if reference.refusal("mixed", samples) else [samples]
            full_batches = [dict(reference.builder.case("mixed", piece).batch) for piece in pieces]
            local_batch = dict(reference.builder.case("mixed", [samples[state.batch_index]]).batch)
            local_batch["position_ids"] = reference.positions(local_batch)
            weights = reference.correspondence.to_upstream(generated, _full_state(generated))
            reference.model.load_state_dict(weights)
            actual = step_on_ranks(
                generated, local_batch, state, pad_token_id=reference.pad_token_id, fsdp=fsdp, kernels=reference.seams
            )
            step = functools.partial(reference.loss_and_gradients, full_batches)
            row = compare_steps(reference.model, lambda _model, step=step: step(), actual)
            optimizer.step()
            optimizer.zero_grad()
            rows.append({"case": f"step {number}", "seconds": time.perf_counter() - started} | row)
    finally:
        reference.model.load_state_dict(start)
    return rows


def one_modality_each(reference: ReferenceModel, num_batches: int, number: int) -> list[Sample]:
    """A sample for each batch index: the model's modalities, then text only, rotated by one each step."""
    kinds = [*reference.builder.layouts, None]
    samples = []
    for rank in range(num_batches):
        kind = kinds[(rank + number) % len(kinds)]
        items = [] if kind is None else [reference.builder.maker.item(kind, number % 2)]
        samples.append(reference.builder.sample([3 + rank, *items, 5]))
    return samples


def _full_state(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def compare_steps(
    model: nn.Module,
    reference_step: Callable[[nn.Module], LossAndGradients],
    actual: LossAndGradients,
    floor: float = 2e-2,
) -> dict[str, Any]:
    """Loss and the worst gradient, relative, and why they do not agree.

    Args:
        model: upstream's, from which `reference_step` computes what is expected.
        actual: of the ranks.
        floor: differences are divided by at least this share of the largest gradient, because some gradients are sums
            that cancel (biases of keys, decay rates) and consist of rounding errors. By default they need not be closer
            than 2e-7 of the largest gradient, about two rounding errors of fp32.
    """
    (actual_loss, actual_gradients), (expected_loss, expected) = actual, reference_step(model)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    least = floor * largest
    differences = {
        name: relative_difference(actual_gradients.get(name), gradient, least) for name, gradient in expected.items()
    }
    differences |= {
        parameter: math.inf
        for parameter, gradient in actual_gradients.items()
        if parameter not in expected and bool(gradient.any())
    }
    worst = max(differences, key=lambda name: nan_is_largest(differences[name]))
    beyond = {name: difference for name, difference in differences.items() if not difference <= TOLERANCE}
    if any(name in expected for name in beyond):
        sensitivity = gradient_sensitivity(model, reference_step, expected, least)
        beyond = {
            name: difference
            for name, difference in beyond.items()
            if not difference <= ROUNDING_FACTOR * sensitivity.get(name, 0.0)
            and not (name in expected and _is_one_rounding(actual_gradients.get(name), expected[name], largest))
        }
    loss_difference = abs(actual_loss - expected_loss) / abs(expected_loss)
    row = {"loss": loss_difference, "gradient": differences[worst], "parameter": worst}
    if not loss_difference <= TOLERANCE:
        row["reason"] = f"loss {actual_loss:.7f}, upstream {expected_loss:.7f}"
    elif beyond:
        furthest = max(beyond, key=lambda name: nan_is_largest(beyond[name]))
        row["reason"] = f"gradient of {furthest} differs by {beyond[furthest]:.1e}"
    return row


def _is_one_rounding(actual: Tensor | None, expected: Tensor, largest: float) -> bool:
    """Whether a gradient whose terms cancel, exactly or nearly, is off by no more than one rounding error of the largest."""
    deviation = expected if actual is None else actual - expected
    if float(deviation.abs().max()) > torch.finfo(expected.dtype).eps * largest:
        return False
    return not expected.any() or float(deviation.norm()) <= MAX_MOVEMENT * float(expected.norm())


def step_on_ranks(
    model: nn.Module,
    inputs: dict[str, Any],
    state: ParallelState,
    *,
    pad_token_id: int,
    fsdp: bool,
    training: bool = True,
    kernels: Mapping[str, str] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Forward and backward of this rank's batch; loss and gradients summed over the ranks.

    Args:
        inputs: the batch of this rank's SP group.
        kernels: implementations of seams by name; the others are eager.
    """
    local = batch.slice_batch(inputs, sp=state.sp, sp_rank=state.sp_rank, pad_token_id=pad_token_id)
    items = loss.count_items([local], "cpu")
    model.train(training)
    with parallel.using(state), loss.step(items), seams.using(**(kernels or {})):
        share = model(**local, num_items_in_batch=items, use_cache=False).loss
        share.backward()
    total = share.detach().clone()
    dist.all_reduce(total)
    gradients = {}
    for name, parameter in model.named_parameters():
        if fsdp:
            if isinstance(parameter.grad, DTensor):
                gradients[name] = parameter.grad.full_tensor().clone()
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)  # in place, as an optimizer step follows
        gradients[name] = parameter.grad.clone()
    return float(total), gradients


def case_inputs(
    reference: ReferenceModel, name: str, state: ParallelState
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The batches of the single reference rank, and the batch of this rank's SP group, with its position ids.

    The reference takes one batch, or the batches of the ranks one by one if upstream's features of an item depend on what
    else is in its batch: sounds are padded to the longest and convolutions see that padding; a batch norm computes its
    statistics over a batch.
    """
    if name == PACKED:
        return _packed_inputs(reference, state)
    if name == PADDING_ALONE:
        return _padding_inputs(reference, state)
    samples = reference.batches()[name]
    while len(samples) < state.config.num_batches:  # every batch index gets a sample
        samples = (*samples, reference.builder.sample([9]))
    pieces = split_samples(samples, state.config.num_batches)
    samples = [sample for piece in pieces for sample in piece]
    has_audio = any(AUDIO in (item.kind, *(part.kind for part in item.parts)) for row in samples for item in row.items)
    depends_on_batch = has_audio or normalises_by_batch(reference.model)
    full_batches = [
        dict(reference.builder.case(name, piece).batch) for piece in (pieces if depends_on_batch else [samples])
    ]
    local_batch = dict(reference.builder.case(name, pieces[state.batch_index]).batch)
    local_batch["position_ids"] = reference.positions(local_batch)
    return full_batches, local_batch


def _packed_inputs(reference: ReferenceModel, state: ParallelState) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The samples of the richest batch, padded or one by one for the reference, in one row for the ranks, because upstream does
    not separate documents in every kind of layer. All batch indices have the same row, only the first its labels."""
    batches = reference.batches()
    samples = next(batches[name] for name in RICHEST_FIRST if name in batches)
    padded = dict(reference.builder.case("mixed", samples).batch)
    case = reference.builder.packed(padded, samples)
    full_batches = [padded]
    if case is not None:
        local_batch = dict(case.batch)
    elif padded.get("use_audio_in_video") or reference.positions(padded).ndim != 2:
        raise NotApplicable("upstream does not compute the multimodal positions of several samples in one row")
    else:
        positions = torch.cat([torch.arange(len(sample.ids)) for sample in samples])[None]
        local_batch = dict(reference.builder.in_one_row(padded, positions).batch)
        # Padding changes what upstream's overlays on the mask (`attention_overlays.py`) see, so samples go one by one. Sounds
        # are padded to the longest of a batch.
        if set(reference.builder.layouts) != {AUDIO} and not normalises_by_batch(reference.model):
            full_batches = [dict(reference.builder.case("mixed", [sample]).batch) for sample in samples]
    if state.batch_index:
        local_batch["labels"] = torch.full_like(local_batch["labels"], batch.IGNORED)
    return full_batches, local_batch


def _padding_inputs(reference: ReferenceModel, state: ParallelState) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A sample of the richest batch for the first batch index, and for the others the loader's batch without samples."""
    batches = reference.batches()
    sample = next(batches[name] for name in RICHEST_FIRST if name in batches)[0]
    inputs = dict(reference.builder.case(PADDING_ALONE, [sample]).batch)
    if state.batch_index:
        return [inputs], collate([], pad_to=None, pad_token_id=reference.pad_token_id)
    return [inputs], inputs | {"position_ids": reference.positions(inputs)}


def normalises_by_batch(model: nn.Module) -> bool:
    """Whether a batch norm makes the features of an item depend on the other items of its batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def split_samples(samples: Sequence[Sample], num_batches: int) -> list[list[Sample]]:
    """The samples of each batch index."""
    shares = torch.arange(len(samples)).tensor_split(num_batches)
    return [[samples[place] for place in places.tolist()] for places in shares]


# ------------------------------------------------------------------------------------- from the main process


def verify_on_ranks(
    model: Subject,
    pool: RankPool,
    *,
    sp: int,
    fsdp: bool,
    ep: int = 1,
    head: str | None = None,
    cases: Sequence[str] | None = None,
    training: bool = True,
    separates: DocumentSeparation = False,
) -> list[RankResult]:
    """Proves a generated model on gloo ranks; prints nothing.

    Args:
        pool: processes on this machine.
        sp: how many ranks share a sequence.
        fsdp: whether parameters are sharded over all ranks.
        ep: how many ranks share the experts, which FSDP2 divides.
        head: the class to prove; default: the first head.
        cases: names of batches; default: all that upstream takes, and ten steps with one modality per rank.
        training: whether both models are in training mode; in the steps with one modality per rank they always are.
        separates: whether a run computes packed documents in rows of their own, as the proof in one process found.
    """
    head = head or find_generated(model).heads[0]
    head_class = getattr(find_generated(model).load(), head)
    if reason := loss.why_not_additive(head_class):
        return [RankResult("its loss", reason=reason)]
    if sp > 1 and separates == LEFT:
        return [RankResult("its documents", reason=model_calls.no_slices(head, sp))]
    options: dict[str, Any] = {"sp": sp, "ep": ep, "fsdp": fsdp, "separates": separates}
    results = []
    try:
        several = pool.world > sp
        names = cases or pool.run(case_names, model, head, has_several_batches=several, timeout=4 * TIMEOUT)[0]
    except CaseFailed as failure:
        return [RankResult("its batches", reason=str(failure))]
    for name in names:
        try:
            if name == MIXED_RANKS:
                results.append(_worst_step(name, pool.run(mixed_steps, model, head, **options, timeout=TIMEOUT)[0]))
                continue
            row = pool.run(compare, model, head, name, **options, training=training, timeout=TIMEOUT)[0]
            results.append(RankResult(**row))
        except CaseFailed as failure:
            if NotApplicable.__name__ not in str(failure):
                results.append(RankResult(name, reason=str(failure)))
    return results


def _worst_step(name: str, rows: Sequence[dict[str, Any]]) -> RankResult:
    """Several steps as one result: the worst of each figure."""
    worst = max(rows, key=lambda row: nan_is_largest(row["gradient"]))
    reasons = [f"{row['case']}: {row['reason']}" for row in rows if row.get("reason")]
    return RankResult(
        case=name,
        loss=max((row["loss"] for row in rows), key=nan_is_largest),
        gradient=worst["gradient"],
        parameter=worst["parameter"],
        seconds=sum(row["seconds"] for row in rows),
        reason="; ".join(reasons[:3]),
    )
