"""A mutant that is equal in one process, on two gloo ranks: equal there, refused before a step, or wrong.

    pool = RankPool(2)
    mutants_on_ranks.verdict(pool, subject)

Layouts, each with rows of one document and with a packed row:

    sp 2            the tokens of a row divided; before it the check of slices that a run makes at its start
    ep 2, fsdp      experts divided, everything else sharded; models with experts
    fsdp            parameters sharded, rows divided

Upstream's changed class in one process says what is right. Where its logits of a row depend on the other rows, nothing that
divides rows can be equal: those layouts are not compared.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from patchgen.runtime import attention, parallel, registry, seams
from patchgen.runtime.parallel import selfcheck, sharding
from patchgen.runtime.verify import mutants
from patchgen.runtime.verify.changed_modules import importable
from patchgen.runtime.verify.comparison import Step, compare_gradients, difference
from patchgen.runtime.verify.conditioning import ROUNDING, SHAKES, WELL_CONDITIONED, is_rounding, shaken_step
from patchgen.runtime.verify.layout import Layout
from patchgen.runtime.verify.media_ranks import PACKED, inputs_of, on_ranks
from patchgen.runtime.verify.ranks import CaseFailed, RankPool
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.yardstick import NotApplicable, Yardstick, choices, state_of, training_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOLERANCE = mutants.TOLERANCE
SECONDS = 120.0
NO_END = "did not end"
WHOLE_ROWS = "plain"
RUNTIME = Path(parallel.__file__).parents[1].as_posix()


@dataclass(frozen=True)
class Subject:
    """A mutant and what was generated from it.

    Attributes:
        module: the import path of upstream's file.
        head: the class that is compared.
        text, modules: of the mutant.
        files: what was generated, by the names of files.
    """

    module: str
    head: str
    text: str
    modules: Mapping[str, str]
    files: Mapping[str, str]


LAYOUTS = (Layout(2, sp=2), Layout(2, ep=2, fsdp=True), Layout(2, fsdp=True))


def verdict(pool: RankPool, subject: Subject) -> mutants.Verdict:
    """Of a mutant on two ranks."""
    try:
        answers = pool.run(compare, subject, timeout=SECONDS)
    except CaseFailed as failure:
        told = _last_line(str(failure))
        # A machine that is busy elsewhere, or ranks that wait for each other: no verdict, and it is counted as none.
        kind = mutants.NOT_RUN if told.endswith(NO_END) else mutants.WRONG
        return mutants.Verdict(kind, f"on ranks: {told}")
    # A rank may refuse what another would compute: the first that is not equal speaks.
    return next((one for one in answers if one.kind != mutants.EQUAL), answers[0])


def compare(subject: Subject) -> mutants.Verdict:
    """Runs on every rank."""
    attention.register()
    with importable(subject.module, subject.text, subject.modules) as changed:
        generated = changed.folder / "generated"
        generated.mkdir()
        for file, text in subject.files.items():
            (generated / file).write_text(text, encoding="utf-8")
        upstream_class = getattr(changed.load(), subject.head)
        try:
            known = Yardstick(registry.read_model(generated), subject.head, changed.name)
        except Exception as error:
            if _starts(upstream_class):
                return _raised(error, "start")
            return mutants.Verdict(
                mutants.NOT_RUN, "on ranks: upstream's changed class fails on the rows of a run, too"
            )
        for layout in LAYOUTS:
            if layout.ep > 1 and not sharding.expert_paths(known.generated()):
                continue
            for case in (WHOLE_ROWS, PACKED):
                found = _compared(known, layout, case)
                if found.kind != mutants.EQUAL:
                    return found
    return mutants.Verdict(mutants.EQUAL)


def _starts(upstream_class: type[PreTrainedModel]) -> bool:
    """Whether upstream's changed class takes the rows of a run at all: it may fail on other lengths than it was tried with."""
    try:
        choices(upstream_class, upstream_class, training_config(upstream_class))
    except Exception:
        return False
    return True


def _compared(known: Yardstick, layout: Layout, case: str) -> mutants.Verdict:
    state = state_of(layout.sp, layout.ep)
    where = f"{layout.name}, {case}"
    try:
        whole, mine = inputs_of(known, case, state)
    except (NotApplicable, KeyError):
        return mutants.Verdict(mutants.EQUAL)
    if layout.sp == 1 and case == WHOLE_ROWS and _rows_depend(known, whole[0]):
        return mutants.Verdict(mutants.EQUAL)
    if case == PACKED and not _counts_labels(known, whole[0]):
        return mutants.Verdict(mutants.EQUAL)
    model = known.generated()
    try:
        if layout.fsdp:
            sharding.shard_model(model, state)
        if layout.sp > 1:
            with parallel.using(state), all_eager(), seams.using(**known.seams):
                selfcheck.require_sliceable(model, state, vocab_size=model.config.get_text_config().vocab_size)
        kernels = known.seams
        loss, gradients = on_ranks(model, mine, state, pad=known.pad, fsdp=layout.fsdp, kernels=kernels)
    except Exception as error:
        return _raised(error, where)
    actual = _step(known, loss, gradients)
    found = _judged(known, whole, case, where, actual)
    if found.kind == mutants.WRONG:
        with _attending_as_a_run(known):
            found = _judged(known, whole, case, where, actual)
    return found


@contextlib.contextmanager
def _attending_as_a_run(known: Yardstick) -> Iterator[None]:
    """Upstream's model under the attention of a run, and with a mask of its router loss."""
    module = vars(sys.modules[type(known.model).__module__])
    before = {name: module[name] for name in known.router_functions if inspect.isfunction(module.get(name))}
    module.update({name: _with_mask(function) for name, function in before.items()})
    try:
        with mutants.attending_as_a_run(known.model, known.attention):
            yield
    finally:
        module.update(before)


def _with_mask(function: Callable) -> Callable:
    """A router loss that is told of each token that it is none of padding, as it is on a rank that has some."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def masked(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        if "attention_mask" in signature.parameters and bound.arguments.get("attention_mask") is None:
            bound.arguments["attention_mask"] = torch.ones(1, len(bound.arguments["gate_logits"][0]), dtype=torch.long)
        return function(*bound.args, **bound.kwargs)

    return masked


def _judged(known: Yardstick, whole: list, case: str, where: str, actual: Step) -> mutants.Verdict:
    expected = _reference(known, whole, case)
    found = {"loss": difference(actual.outputs["loss"], expected.outputs["loss"])}
    found |= {f"gradient of {name}": one for name, one in compare_gradients(actual, expected).items()}
    beyond = {name: one for name, one in found.items() if not one.relative <= TOLERANCE}
    if beyond and all(one.relative <= ROUNDING * WELL_CONDITIONED for one in beyond.values()):
        shaken = [shaken_step(known.model, lambda _: _reference(known, whole, case), seed) for seed in range(SHAKES)]
        beyond = {name: one for name, one in beyond.items() if not is_rounding(name, actual, expected, shaken)}
    if not beyond:
        return mutants.Verdict(mutants.EQUAL)
    worst = max(beyond, key=lambda name: beyond[name].relative)
    return mutants.Verdict(mutants.WRONG, f"{where}: {worst} differs by {beyond[worst].relative:.1e}")


def _reference(known: Yardstick, whole: list, case: str) -> Step:
    return _step(known, *known.one_rank(whole, is_one_row=case == PACKED))


def _step(known: Yardstick, loss: float, gradients: Mapping[str, Tensor]) -> Step:
    """A parameter that nothing reaches has no gradient in one process and a sum of zeros on ranks: zeros for both."""
    found = {name: gradients.get(name, torch.zeros_like(one)) for name, one in known.model.named_parameters()}
    return Step({"loss": torch.tensor(loss)}, found)


@torch.no_grad()
def _counts_labels(known: Yardstick, inputs: Mapping) -> bool:
    """Whether upstream's loss divides by the number of labels that a step hands in: else the losses of documents do not add up."""
    with all_eager():
        losses = [known.model(**inputs, num_items_in_batch=torch.tensor(number)).loss for number in (50, 100)]
    return bool(losses[0] != losses[1])


@torch.no_grad()
def _rows_depend(known: Yardstick, inputs: Mapping) -> bool:
    """Whether upstream's logits of a row are others beside other rows."""
    known.model.eval()
    rows = {key: inputs[key] for key in ("input_ids", "attention_mask") if key in inputs}
    if set(inputs) - {"input_ids", "attention_mask", "labels", "position_ids"}:
        return False  # with images, a row is not cut out of a batch so simply
    half = len(rows["input_ids"]) // 2
    with all_eager():
        both = known.model(**rows, use_cache=False).logits
        first = known.model(**{key: value[:half] for key, value in rows.items()}, use_cache=False).logits
    return difference(both[:half], first).relative > TOLERANCE


def _raised(error: Exception, where: str) -> mutants.Verdict:
    """A refusal, where the runtime raised it; wrong, where the model did."""
    frames = traceback.extract_tb(error.__traceback__)
    own = Path(frames[-1].filename).as_posix()
    told = f"{where}: {type(error).__name__}: {' '.join(str(error).split())}"[:240]
    if own.startswith(RUNTIME) and isinstance(error, ValueError | NotImplementedError):
        return mutants.Verdict(mutants.REFUSED, told, f"runtime/{Path(own).relative_to(RUNTIME).as_posix()}")
    return mutants.Verdict(mutants.WRONG, told)


def _last_line(trace: str) -> str:
    lines = [
        line for line in trace.splitlines() if line and not line.startswith((" ", "rank ", "ranks ", "Traceback"))
    ]
    return (lines[0] if lines else trace.strip())[:200]
