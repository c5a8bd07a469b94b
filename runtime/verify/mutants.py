"""Verdicts on changed upstream sources: the generator refuses them, the proof tells them, or the generated file equals them.

    from patchgen.runtime.verify import mutants

    judge = mutants.Judge(upstream.load("qwen3_moe"))
    judge.verdict(mutant)              # refused (by which pass), told (by what), equal, wrong (what differs), or not run

The changed file is imported as a module of upstream's own package. Loss and every gradient are compared in fp32:

    eager    bit for bit, with all other outputs
    seams    fused experts, the loss in chunks, the formulas of norm and rotary: within 1e-4, or what rounding explains
    run      the attention and kernels of a run, with the batch as the trainer passes it: the same tolerance

A difference is told if the proof that `patchgen verify` makes fails as well, and wrong if that proof would pass. A file that is
equal here is told if an observed fact (`observe/`) limits its layouts. `mutants_on_ranks.py` compares on two ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from patchgen import model_configs, pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.kernels.elementwise import formulas
from patchgen.mutation.edits import Mutant
from patchgen.runtime import registry, seams
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.failures import reraise_machine_failure
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.loss import upstream_labels
from patchgen.runtime.verify import told, verify_model
from patchgen.runtime.verify.changed_modules import changed_module, executed_lines
from patchgen.runtime.verify.changed_upstream import raises_too, set_attention, training_attention
from patchgen.runtime.verify.comparison import (
    Difference,
    Step,
    compare_gradients,
    compare_outputs,
    name_of_worst,
    train_step,
)
from patchgen.runtime.verify.conditioning import beyond_rounding
from patchgen.runtime.verify.inputs import NUM_ITEMS, Case, text_cases
from patchgen.runtime.verify.kept_state import state_kept
from patchgen.runtime.verify.model_pair import build_model, config_class_of, paired, perturb
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media
from patchgen.runtime.verify.reference_model import training_choices
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import set_router_loss, small_config
from patchgen.runtime.verify.training_inputs import TokenSampler, num_labels, text_documents
from patchgen.upstream import Upstream

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

REFUSED, TOLD, EQUAL, WRONG, NOT_RUN = "refused", "told", "equal", "wrong", "not run"
TOLERANCE = 1e-4
DOUBLE_TOLERANCE = 1e-6
"""Upstream's norms and softmax compute in fp32 also in a model of float64; a difference of formulas stays as large as it was."""
FORMULA = "formula"  # the reference formula of a seam, without a compiler
FORMULAS = {"rms_norm": formulas.rms_norm, "rotary": formulas.rotary}
KERNELS = {"fused_moe": "torch", "causal_lm_loss": "chunked", **dict.fromkeys(FORMULAS, FORMULA)}


@dataclass(frozen=True)
class Verdict:
    """The result of a mutant: `kind`, and the refusal, what is told, what differs, or why it did not run."""

    kind: str
    detail: str = ""
    by: str = ""
    """The pass that refused it, or what tells it: `told.PROOF`, `told.FACT` or `told.TWO_RANKS`."""
    differs: str = ""
    """If told or wrong: what differs in the judge's own comparisons; empty if nothing does."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """If equal: the generated files, by name."""
    compared: tuple[str, ...] = ()
    """If equal: the comparisons that were made."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """If equal: those that could not be made, and why."""


@dataclass(frozen=True)
class Check:
    """One comparison of the generated class with the changed one.

    Attributes:
        way: "eager", "seams" or "run".
        case: the input of the generated class.
        expected: the name of the case that the changed class runs.
        attention: of the generated class.
        kernels: implementations of seams; the others are eager.
    """

    way: str
    case: Case
    expected: str
    attention: Names = "eager"
    kernels: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.case.name}, {self.way}"


class Judge:
    """Judges changed sources of one model.

    Attributes:
        head: the class that is compared.
        observes: whether steps of an equal class are observed, which takes as long as comparing it; else it counts as equal.
        left_out: comparisons in which even the unchanged file is unequal, and what differs there.
    """

    def __init__(self, origin: Upstream, head: str | None = None, *, observes: bool = True) -> None:
        self.origin, self.observes = origin, observes
        config = model_configs.config_for(origin.model)
        # Hit counts in a config are a second safety net; here the passes themselves are tested.
        self._config = replace(config, expect={k: v for k, v in config.expect.items() if not isinstance(v, int)})
        self._baseline = baseline = pipeline.generate(origin, self._config)
        self.head = head or head_of(baseline, origin)
        upstream_class = getattr(importlib.import_module(origin.module), self.head)
        self._small = _config_of(upstream_class)
        self._cases = _cases(upstream_class, self._small)
        self._checks, self.left_out = self._passing_checks(upstream_class, baseline)

    def executed(self) -> set[int]:
        """The lines of upstream's file that a training step runs."""
        module = importlib.import_module(self.origin.module)
        with executed_lines(inspect.getfile(module)) as lines:
            model = build_model(getattr(module, self.head), self._small)
            for case in self._cases:
                _step(model, case)
        return lines

    def verdict(self, mutant: Mutant) -> Verdict:
        """Generates from the changed source, and compares the result with the changed source itself."""
        with changed_module(self.origin.module, mutant.text, mutant.modules) as module:
            try:
                changed = getattr(module.load(), self.head)
                config = self._small if changed.config_class is type(self._small) else _config_of(changed)
                upstream = build_model(changed, config)
                perturb(upstream)
                expected = {case.name: _finite_step(upstream, case) for case in self._cases}
            except Exception as error:  # changed code may raise anything
                return Verdict(NOT_RUN, one_line(error))
            if any(name.isdigit() for step in expected.values() for name in step.outputs):
                return Verdict(NOT_RUN, "it returns a tuple, in which no run finds the loss")
            try:
                generated = pipeline.generate(replace(self.origin, text=mutant.text), self._config)
            except PatchgenError as error:
                return Verdict(REFUSED, one_line(error), refusing_pass(str(error)))
            folder = module.folder / "generated"
            provenance.write(generated, folder, force=True)
            left_out = dict(self.left_out)
            different = self._different(upstream, config, folder, expected, left_out)
            if different and self._reads_uninitialised_memory(upstream):
                return Verdict(NOT_RUN, "reads uninitialised memory")
            is_asked = bool(different) or self.observes
            tells = self._told(changed, folder, config, is_different=bool(different)) if is_asked else None
        if tells is not None:
            return Verdict(TOLD, tells.words, tells.by, different)
        if different:
            return Verdict(WRONG, different, differs=different)
        compared = tuple(check.name for check in self._checks if check.name not in left_out)
        if not compared:
            return Verdict(NOT_RUN, "; ".join(f"{name}: {reason}" for name, reason in left_out.items()))
        return Verdict(EQUAL, files=generated.files, compared=compared, left_out=left_out)

    def _told(
        self, changed: type[PreTrainedModel], folder: Path, config: PreTrainedConfig, *, is_different: bool
    ) -> told.Told | None:
        """What tells the change: of a class that differs its proof, of an equal one what is observed in its steps."""
        try:
            generated_class = getattr(registry.read_model(folder).load(), self.head)
        except Exception as error:  # as upstream's changed class, which was loaded, does not
            reraise_machine_failure(error)
            return told.Told(told.PROOF, f"cannot be loaded: {one_line(error)}")
        if not is_different:
            found = told.observed(changed, generated_class, config)
            return told.beyond(found, self._usual) if found.facts else None
        found = told.findings(changed, generated_class, variants=(verify_model.BASE,))
        if not (found.words or found.facts):
            found = told.findings(changed, generated_class)
        return told.beyond(found, self._usual) if found.words or found.facts else None

    @functools.cached_property
    def _usual(self) -> told.Findings:
        """What the proof says of the unchanged file."""
        with changed_module(self.origin.module, self.origin.text, {}) as module:
            provenance.write(self._baseline, module.folder / "generated", force=True)
            generated_class = getattr(registry.read_model(module.folder / "generated").load(), self.head)
            return told.findings(getattr(module.load(), self.head), generated_class)

    def _reads_uninitialised_memory(self, upstream: PreTrainedModel) -> bool:
        """Whether upstream's step is not finite once torch fills the memory that it allocates with NaN."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills memory (`torch.utils.deterministic`)
        try:
            for case in self._cases:
                _finite_step(upstream, case)
        except _NotFinite:
            return True
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        return False

    def _different(
        self,
        upstream: PreTrainedModel,
        config: PreTrainedConfig,
        folder: Path,
        expected: Mapping[str, Step],
        left_out: dict[str, str],
    ) -> str:
        """What differs in the generated class in `folder`; empty if nothing does. Adds to `left_out` what cannot be compared."""
        try:
            pair = paired(upstream, getattr(registry.read_model(folder).load(), self.head), config)
        except Exception as error:  # upstream's changed class was built without one
            reraise_machine_failure(error)
            return f"cannot be built: {one_line(error)}"
        if pair.problems:
            return pair.problems[0]
        for check in self._checks:
            try:
                different = _difference(check, pair.generated, upstream, expected[check.expected], self._cases)
            except _NotComparable as reason:
                left_out[check.name] = str(reason)
                continue
            if different:
                return f"{check.name}: {different}"
        return ""

    def _passing_checks(
        self, upstream_class: type[PreTrainedModel], baseline: pipeline.Generated
    ) -> tuple[tuple[Check, ...], dict[str, str]]:
        """The comparisons in which the unchanged file is equal, and what differs in the others."""
        with changed_module(self.origin.module, self.origin.text, {}) as module:
            provenance.write(baseline, module.folder / "generated", force=True)
            generated_class = getattr(registry.read_model(module.folder / "generated").load(), self.head)
            attention, kernels, _ = training_choices(upstream_class, generated_class, self._small)
            upstream = build_model(upstream_class, self._small)
            perturb(upstream)
            pair = paired(upstream, generated_class, self._small)
            if pair.problems:
                raise ValueError(f"{self.head} cannot be compared: {pair.problems[0]}")
            expected = {case.name: _step(upstream, case) for case in self._cases}
            passing, left_out = [], {}
            for check in _checks(self._cases, attention, KERNELS | kernels):
                try:
                    different = _difference(check, pair.generated, upstream, expected[check.expected], self._cases)
                except _NotComparable as reason:
                    different = str(reason)
                if different:
                    left_out[check.name] = different
                else:
                    passing.append(check)
            if not passing:  # every mutant would be equal
                check_name, different = next(iter(left_out.items()))
                raise ValueError(f"{self.head} cannot be compared: {check_name}: {different}")
        return tuple(passing), left_out


def _checks(cases: tuple[Case, ...], attention: Names, kernels: Mapping[str, str]) -> Iterator[Check]:
    """Every case eager, the first and the last with kernels, all but the first and padded ones as in a run.

    Not every case in every way: a step takes as long as generating a file.
    """
    for case in cases:
        yield Check("eager", case, case.name)
    for case in (cases[0], cases[-1]):
        yield Check("seams", case, case.name, kernels=KERNELS)
    for case in cases[1:]:
        mask = case.batch.get("attention_mask")
        if mask is not None and not mask.all():
            continue  # outputs at padding are undefined, and layers that mix tokens read them
        is_text = case.batch.keys() <= {"input_ids", "labels", "position_ids", "num_items_in_batch"}
        batch = slice_batch(dict(case.batch), sp=1, sp_rank=0) if is_text else case.batch
        yield Check("run", replace(case, batch=batch), case.name, attention, kernels)


def _with_labels_of(generated_class: type, case: Case) -> Case:
    """A case as a run passes it, with the labels that the head's loss compares logits with: not every head shifts them."""
    batch = dict(case.batch)
    if batch.get("shift_labels") is None or upstream_labels(generated_class, batch) is batch:
        return case
    return replace(case, batch={**batch, "shift_labels": batch["labels"]})


@seams.registered(FORMULAS, FORMULA)
def _difference(
    check: Check, generated: PreTrainedModel, upstream: PreTrainedModel, expected: Step, cases: tuple[Case, ...]
) -> str:
    """What differs in one comparison; empty if nothing does. `_NotComparable` if upstream raises the same error."""
    set_attention(generated, check.attention)
    check = replace(check, case=_with_labels_of(type(generated), check.case))
    try:
        with all_eager(), seams.using(**check.kernels):
            actual = _step(generated, check.case)
    except Exception as error:
        reraise_machine_failure(error)

        def upstream_step() -> None:
            with training_attention(upstream, check.attention), all_eager():
                _step(upstream, check.case)

        if check.attention != "eager" and raises_too(upstream_step, error):
            raise _NotComparable(f"upstream's changed class fails, too: {one_line(error)}") from error
        return one_line(error)
    beyond = _beyond(actual, expected, TOLERANCE if check.kernels else 0.0)
    if not beyond or not check.kernels:
        return _worst(beyond)
    upstream_case = next(case for case in cases if case.name == check.expected)

    def reference(model: torch.nn.Module) -> Step:
        with all_eager():
            return _step(model, upstream_case)

    beyond = beyond_rounding(beyond, actual, expected, upstream, reference)
    if beyond and check.attention != "eager":
        upstream_case = check.case
        # Upstream may refuse a packed row with its lengths: then the difference from its own case counts.
        with training_attention(upstream, check.attention), contextlib.suppress(ValueError):
            expected = reference(upstream)
            # Where upstream's loss is not finite (the root of a negative scale, say), ours need not be.
            finite = expected.outputs["loss"].isfinite()
            beyond = _beyond(actual, expected, TOLERANCE) if finite else {}
            beyond = beyond_rounding(beyond, actual, expected, upstream, reference)
    return "" if beyond and _agree_in_double(check, generated, upstream, upstream_case) else _worst(beyond)


def _agree_in_double(check: Check, generated: PreTrainedModel, upstream: PreTrainedModel, upstream_case: Case) -> bool:
    """Whether the difference is a rounding error of a sum that cancels after all: then float64 has none.

    In a run both models have its attention, since implementations round differently: what it computes is not judged here.
    """
    is_run = check.attention != "eager"
    conditions = training_attention(upstream, check.attention) if is_run else contextlib.nullcontext()
    try:
        generated.double()
        upstream.double()
        with all_eager(), seams.using(**check.kernels):
            actual = _in_double(_step(generated, check.case))
        with all_eager(), conditions:
            return not _beyond(actual, _in_double(_step(upstream, upstream_case)), DOUBLE_TOLERANCE)
    except Exception as error:  # not every kernel takes float64: then nothing excuses the difference
        reraise_machine_failure(error)
        return False
    finally:
        generated.float()
        upstream.float()


def _in_double(step: Step) -> Step:
    """A step with outputs in float64: losses of a model of float64 may be computed in fp32."""
    return replace(step, outputs={name: output.double() for name, output in step.outputs.items()})


def _beyond(actual: Step, expected: Step, tolerance: float) -> dict[str, Difference]:
    """The gradients and the loss (with a tolerance of 0 all outputs) that differ by more than `tolerance`, relative."""
    outputs = {k: v for k, v in compare_outputs(actual, expected).items() if not tolerance or k == "loss"}
    differences = {**outputs, **{f"gradient of {k}": v for k, v in compare_gradients(actual, expected).items()}}
    return {
        name: difference
        for name, difference in differences.items()
        if not (difference.is_equal or difference.relative <= tolerance)
    }


def _worst(beyond: Mapping[str, Difference]) -> str:
    if not beyond:
        return ""
    name = name_of_worst(beyond)
    return f"{name} differs by {beyond[name].relative:.1e}"


def _step(model: torch.nn.Module, case: Case) -> Step:
    """A step of which the model keeps nothing: both models take every step from the same state."""
    with state_kept(model):
        return train_step(model, case)


class _NotComparable(ValueError):
    """A comparison for which upstream's own class is no reference."""


class _NotFinite(ValueError):
    """A step whose outputs or gradients are not finite."""


def _finite_step(model: torch.nn.Module, case: Case) -> Step:
    with all_eager():
        step = _step(model, case)
    gradients = [gradient for gradient in step.gradients.values() if gradient is not None]
    if not all(tensor.isfinite().all() for tensor in (*step.outputs.values(), *gradients)):
        raise _NotFinite("outputs or gradients are not finite")
    if not any(gradient.any() for gradient in gradients):
        raise ValueError("no parameter has a gradient")
    return step


def _config_of(model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """A small config, with the router loss if the model has one."""
    config = small_config(config_class_of(model_class)).config
    set_router_loss(config, True)
    return config


def _cases(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Case, ...]:
    """The cases; the last, if the loss takes it, with the number of labels as upstream's trainer passes it: a loss that ignores
    this number is another loss. Its row is the longest document of a proof: some code runs on long rows alone."""
    texts = {case.name: case for case in text_cases(config, model_class)}
    step = texts.pop("step", None)
    if step is not None:
        longest = max(text_documents(TokenSampler(config)).rows, key=lambda row: row["input_ids"].shape[1])
        items = {NUM_ITEMS: torch.tensor(2 * num_labels(longest))} if NUM_ITEMS in step.batch else {}
        step = replace(step, batch={**step.batch, **longest, **items})
    if takes_media(model_class):
        media = media_cases(build_model(model_class, config)).cases
        return (texts["plain"], *media, *([step] if step is not None else []))
    if step is None:
        return tuple(texts.values())
    if "packed" in texts:
        # A run passes position ids; whether a model computes them differently is the subject of its proof.
        ids = step.batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        step = replace(step, batch={**step.batch, "position_ids": positions})
    return (*texts.values(), step)


def head_of(generated: pipeline.Generated, origin: Upstream) -> str:
    """The head that is compared: the first that takes media, else the first."""
    heads = json.loads(generated.provenance)["heads"]
    module = importlib.import_module(origin.module)
    return next((head for head in heads if takes_media(getattr(module, head))), heads[0])


def refusing_pass(message: str) -> str:
    """The pass that a refusal names, or how it begins."""
    parts = message.split("'")
    return parts[1] if message.startswith("The pass '") else message.split(":")[0][:40]


def one_line(error: object) -> str:
    kind = "" if isinstance(error, PatchgenError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:240]
