"""Verdicts on changed upstream sources: the generator refuses them, or what it makes of them equals them.

    from patchgen.runtime.verify import mutants

    judge = mutants.Judge(upstream.load("qwen3_moe"))
    judge.verdict(mutant)              # refused (by which pass), equal, wrong (what differs), or not_run

The changed file is imported as a module of upstream's own package, so its relative imports hold. Compared are loss, logits
and every gradient in fp32:

    eager    bit for bit
    seams    fused experts, the loss in chunks, the formulas of norm and rotary: within 1e-4, or what rounding moves
    run      the attention and kernels that a run takes, with the batch as the trainer hands it over: the same

`mutants_on_ranks.py` compares on two ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers.utils.generic import is_flash_attention_requested

from patchgen import model_configs, pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.kernels.elementwise import formulas
from patchgen.mutation.edits import Mutant
from patchgen.runtime import registry, seams
from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.verify.changed_modules import importable, lines_run
from patchgen.runtime.verify.comparison import Step, compare_gradients, compare_outputs, train_step
from patchgen.runtime.verify.conditioning import SHAKES, is_rounding, shaken_step
from patchgen.runtime.verify.inputs import Case, text_cases
from patchgen.runtime.verify.model_pair import build_model, config_class_of, paired, perturb
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.yardstick import choices
from patchgen.upstream import Upstream

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

REFUSED, EQUAL, WRONG, NOT_RUN = "refused", "equal", "wrong", "not run"
TOLERANCE = 1e-4
IN_DOUBLE = 1e-8
FORMULA = "formula"  # seams by their formula, without a compiler
KERNELS = {"fused_moe": "torch", "causal_lm_loss": "chunked", "rms_norm": FORMULA, "rotary": FORMULA}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `kind`, and the pass that refused it, what differs, or why it did not run."""

    kind: str
    detail: str = ""
    by: str = ""
    """Of a refusal: the pass."""
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of an equal one: what was generated, by the names of files."""


@dataclass(frozen=True)
class Check:
    """One comparison of the generated class with the changed one.

    Attributes:
        way: "eager", "seams" or "run".
        case: what the generated class is given.
        expected: the name of the case that says what comes out.
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
    """Holds the generator to its promise on changed sources of one model.

    Attributes:
        head: the class that is compared.
        left_out: comparisons in which the unchanged file is unequal already, and what differs there.
    """

    def __init__(self, origin: Upstream, head: str | None = None) -> None:
        self.origin = origin
        own = model_configs.config_for(origin.model)
        # What a config pins is a second net; here the passes themselves are tried.
        self._config = replace(own, expect={k: v for k, v in own.expect.items() if not isinstance(v, int)})
        baseline = pipeline.generate(origin, self._config)
        self.head = head or _head(json.loads(baseline.provenance)["heads"], origin)
        upstream_class = getattr(importlib.import_module(origin.module), self.head)
        self._small = _config_of(upstream_class)
        self._cases = _cases(upstream_class, self._small)
        seams.register("rms_norm", FORMULA)(formulas.rms_norm)
        seams.register("rotary", FORMULA)(formulas.rotary)
        self._checks, self.left_out = self._what_holds(upstream_class, baseline)

    def executed(self) -> set[int]:
        """The lines of upstream's file that a training step runs."""
        module = importlib.import_module(self.origin.module)
        with lines_run(inspect.getfile(module)) as lines:
            model = build_model(getattr(module, self.head), self._small)
            for case in self._cases:
                train_step(model, case)
        return lines

    def verdict(self, mutant: Mutant) -> Verdict:
        """Generates from the changed source, and compares the result with the changed source itself."""
        with importable(self.origin.module, mutant.text, mutant.modules) as module:
            try:
                changed = getattr(module.load(), self.head)
                config = self._small if changed.config_class is type(self._small) else _config_of(changed)
                upstream = build_model(changed, config)
                perturb(upstream)
                expected = {case.name: _finite_step(upstream, case) for case in self._cases}
            except Exception as error:  # whatever changed code may raise
                return Verdict(NOT_RUN, _one_line(error))
            try:
                generated = pipeline.generate(replace(self.origin, text=mutant.text), self._config)
            except PatchgenError as error:
                return Verdict(REFUSED, _one_line(error), _refusing_pass(str(error)))
            provenance.write(generated, module.folder / "generated", force=True)
            different = self._different(upstream, config, module.folder / "generated", expected)
            if different and self._reads_what_nobody_wrote(upstream):
                return Verdict(NOT_RUN, "reads memory that nobody wrote")
        return Verdict(WRONG, different) if different else Verdict(EQUAL, files=generated.files)

    def _reads_what_nobody_wrote(self, upstream: PreTrainedModel) -> bool:
        """Whether upstream's step has no number once torch fills what it allocates with none."""
        before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)  # which fills (`torch.utils.deterministic`)
        try:
            for case in self._cases:
                _finite_step(upstream, case)
        except _NoNumber:
            return True
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        return False

    def _different(
        self, upstream: PreTrainedModel, config: PreTrainedConfig, folder: Path, expected: Mapping[str, Step]
    ) -> str:
        """What the generated class in `folder` computes otherwise; empty where nothing."""
        try:
            pair = paired(upstream, getattr(registry.read_model(folder).load(), self.head), config)
        except Exception as error:  # whatever upstream's code can raise, it did not raise there
            return f"cannot be built: {_one_line(error)}"
        if pair.problems:
            return pair.problems[0]
        for check in self._checks:
            if different := _found(check, pair.generated, upstream, expected[check.expected], self._cases):
                return f"{check.name}: {different}"
        return ""

    def _what_holds(
        self, upstream_class: type[PreTrainedModel], baseline: pipeline.Generated
    ) -> tuple[tuple[Check, ...], dict[str, str]]:
        """The comparisons in which the unchanged file is equal, and what differs in the others."""
        with importable(self.origin.module, self.origin.text, {}) as module:
            provenance.write(baseline, module.folder / "generated", force=True)
            ours = getattr(registry.read_model(module.folder / "generated").load(), self.head)
            attention, kernels, _ = choices(upstream_class, ours, self._small)
            upstream = build_model(upstream_class, self._small)
            perturb(upstream)
            pair = paired(upstream, ours, self._small)
            if pair.problems:
                raise ValueError(f"{self.head} cannot be compared: {pair.problems[0]}")
            expected = {case.name: train_step(upstream, case) for case in self._cases}
            holds, others = [], {}
            for check in _checks(self._cases, attention, KERNELS | kernels):
                different = _found(check, pair.generated, upstream, expected[check.expected], self._cases)
                if different:
                    others[check.name] = different
                else:
                    holds.append(check)
        return tuple(holds), others


def _checks(cases: tuple[Case, ...], attention: Names, kernels: Mapping[str, str]) -> Iterator[Check]:
    """Every case eager, and each with kernels once: a step costs as much as the reading of a file."""
    for case in cases:
        yield Check("eager", case, case.name)
    for case in (cases[0], cases[-1]):
        yield Check("seams", case, case.name, kernels=KERNELS)
    for case in cases[1:]:
        mask = case.batch.get("attention_mask")
        if mask is not None and not mask.all():
            continue  # what padding computes is nobody's, and tokens that are mixed would see it
        is_text = case.batch.keys() <= {"input_ids", "labels", "position_ids", "num_items_in_batch"}
        handed = replace(case, batch=slice_batch(dict(case.batch), sp=1, sp_rank=0)) if is_text else case
        yield Check("run", handed, case.name, attention, kernels)


def _as_transformers_takes(names: Names) -> str | dict:
    return names if isinstance(names, str) else dict(names)


def _found(
    check: Check, generated: PreTrainedModel, upstream: PreTrainedModel, expected: Step, cases: tuple[Case, ...]
) -> str:
    """What differs in one comparison; empty where nothing."""
    generated.set_attn_implementation(_as_transformers_takes(check.attention))
    try:
        with all_eager(), seams.using(**check.kernels):
            actual = train_step(generated, check.case)
    except Exception as error:
        return "" if check.attention != "eager" and _fails_too(upstream, check, error) else _one_line(error)
    beyond = _beyond(actual, expected, TOLERANCE if check.kernels else 0.0)
    if not beyond or not check.kernels:
        return _worst(beyond)
    given = next(case for case in cases if case.name == check.expected)

    def reference(model: torch.nn.Module) -> Step:
        with all_eager():
            return train_step(model, given)

    beyond = _beyond_rounding(beyond, actual, expected, upstream, reference)
    if beyond and check.attention != "eager":
        given = check.case
        # Upstream may not take a packed row with its lengths: then what it computes otherwise stands.
        with attending_as_a_run(upstream, check.attention), contextlib.suppress(ValueError):
            expected = reference(upstream)
            # A scale below zero, say, has no square root: where upstream has no number there, ours need not.
            finite = expected.outputs["loss"].isfinite()
            beyond = _beyond(actual, expected, TOLERANCE) if finite else {}
            beyond = _beyond_rounding(beyond, actual, expected, upstream, reference)
    return "" if beyond and _agree_in_double(check, generated, upstream, given) else _worst(beyond)


def _fails_too(upstream: PreTrainedModel, check: Check, error: Exception) -> bool:
    """Whether upstream's model, under the attention of a run, ends in the same error: it cannot be trained so either."""
    try:
        with attending_as_a_run(upstream, check.attention), all_eager():
            train_step(upstream, check.case)
    except Exception as own:  # whatever changed code may raise
        return type(own) is type(error)
    return False


@contextlib.contextmanager
def attending_as_a_run(upstream: PreTrainedModel, attention: Names) -> Iterator[None]:
    """Upstream's model under the attention of a run, which takes lengths of media as flash attention does.

    A change may lie in what only another attention runs, and where upstream's file holds two forms of one computation, in one
    of the two.
    """
    module = vars(sys.modules[type(upstream).__module__])
    asks = {name: value for name, value in module.items() if value is is_flash_attention_requested}
    upstream.set_attn_implementation(_as_transformers_takes(attention))
    module.update(dict.fromkeys(asks, lambda *_, **__: True))
    try:
        yield
    finally:
        upstream.set_attn_implementation("eager")
        module.update(asks)


def _agree_in_double(check: Check, generated: PreTrainedModel, upstream: PreTrainedModel, given: Case) -> bool:
    """Whether what differs is rounding after all, of a sum that cancels: in float64 there is then nothing of it."""
    try:
        generated.double()
        upstream.double()
        with all_eager(), seams.using(**check.kernels):
            actual = train_step(generated, check.case)
        with all_eager():
            return not _beyond(actual, train_step(upstream, given), IN_DOUBLE)
    except Exception:  # not every kernel takes float64: then nothing excuses what differs
        return False
    finally:
        generated.float()
        upstream.float()


def _beyond(actual: Step, expected: Step, tolerance: float) -> dict[str, float]:
    """What differs by more than `tolerance`, with its relative difference; of the outputs the loss, and all where it is 0."""
    outputs = {k: v for k, v in compare_outputs(actual, expected).items() if not tolerance or k == "loss"}
    found = {**outputs, **{f"gradient of {k}": v for k, v in compare_gradients(actual, expected).items()}}
    return {name: one.relative for name, one in found.items() if not (one.is_equal or one.relative <= tolerance)}


def _worst(beyond: Mapping[str, float]) -> str:
    if not beyond:
        return ""
    name = max(beyond, key=beyond.__getitem__)
    return f"{name} differs by {beyond[name]:.1e}"


def _beyond_rounding(
    beyond: Mapping[str, float],
    actual: Step,
    expected: Step,
    upstream: PreTrainedModel,
    reference: Callable[[torch.nn.Module], Step],
) -> dict[str, float]:
    """`beyond` without what upstream's own result moves by when its weights move by their last bit."""
    if not beyond:
        return {}
    shaken = [shaken_step(upstream, reference, seed) for seed in range(SHAKES)]
    return {name: one for name, one in beyond.items() if not is_rounding(name, actual, expected, shaken)}


class _NoNumber(ValueError):
    """A step that gives no finite number."""


def _finite_step(model: torch.nn.Module, case: Case) -> Step:
    with all_eager():
        step = train_step(model, case)
    gradients = [gradient for gradient in step.gradients.values() if gradient is not None]
    if not all(tensor.isfinite().all() for tensor in (*step.outputs.values(), *gradients)):
        raise _NoNumber("outputs or gradients are not finite")
    if not any(gradient.any() for gradient in gradients):
        raise ValueError("no parameter has a gradient")
    return step


def _config_of(model_class: type[PreTrainedModel]) -> PreTrainedConfig:
    """A small config, with the router loss where there is one."""
    config = small_config(config_class_of(model_class)).config
    for one in (config, config.get_text_config(decoder=True)):
        if hasattr(one, "output_router_logits"):
            one.output_router_logits = True
    return config


def _cases(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[Case, ...]:
    """The last one as upstream's trainer hands it in: a loss that drops the number of labels is another loss."""
    known = {case.name: case for case in text_cases(config, model_class)}
    step = known.pop("step", None)
    if takes_media(model_class):
        media = media_cases(build_model(model_class, config)).cases
        return (known["plain"], *media, *([step] if step is not None else []))
    if step is None:
        return tuple(known.values())
    if "packed" in known:
        # A run counts positions itself: those that a model would count otherwise are what its proof says, not this.
        ids = step.batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        step = replace(step, batch={**step.batch, "position_ids": positions})
    return (*known.values(), step)


def _head(heads: list[str], origin: Upstream) -> str:
    module = importlib.import_module(origin.module)
    return next((head for head in heads if takes_media(getattr(module, head))), heads[0])


def _refusing_pass(message: str) -> str:
    parts = message.split("'")
    return parts[1] if message.startswith("The pass '") else message.split(":")[0][:40]


def _one_line(error: object) -> str:
    kind = "" if isinstance(error, PatchgenError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:240]
