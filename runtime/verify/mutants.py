"""Verdicts on changed upstream sources: the generator refuses them, or what it makes of them equals them.

    from patchgen.runtime.verify import mutants

    judge = mutants.Judge(upstream.load("qwen3_moe"))
    judge.verdict(mutant)              # refused (by which pass), equal, wrong (what differs), or not_run

The changed file is imported as a module of upstream's own package, so its relative imports hold. Compared are loss,
logits and every gradient in fp32: eager bit for bit; with the fused experts, the chunked loss and the formulas of norm
and rotary within 1e-4.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import json
import linecache
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING

import torch

from patchgen import model_configs, pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.kernels import elementwise
from patchgen.mutation.edits import Mutant
from patchgen.runtime import registry, seams
from patchgen.runtime.verify.comparison import Step, compare_gradients, compare_outputs, train_step
from patchgen.runtime.verify.inputs import Case, text_cases
from patchgen.runtime.verify.model_pair import ModelPair, build_model, build_pair, perturb
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media
from patchgen.runtime.verify.seam_proof import all_eager
from patchgen.runtime.verify.small_config import small_config
from patchgen.upstream import Upstream

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REFUSED, EQUAL, WRONG, NOT_RUN = "refused", "equal", "wrong", "not run"
TOLERANCE = 1e-4
NUM_ROUNDINGS = 10  # how many times upstream's own rounding error a difference may be
FORMULA = "formula"  # seams by their formula, without a compiler
KERNELS = {"fused_moe": "torch", "causal_lm_loss": "chunked", "rms_norm": FORMULA, "rotary": FORMULA}


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: `kind`, and the pass that refused it, what differs, or why it did not run."""

    kind: str
    detail: str = ""
    by: str = ""
    """Of a refusal: the pass."""


class Judge:
    """Holds the generator to its promise on changed sources of one model."""

    def __init__(self, origin: Upstream, head: str | None = None) -> None:
        self.origin = origin
        own = model_configs.config_for(origin.model)
        # What a config pins is a second net; here the passes themselves are tried.
        self._config = replace(own, expect={k: v for k, v in own.expect.items() if not isinstance(v, int)})
        baseline = pipeline.generate(origin, self._config)
        facts = provenance_of(baseline)
        self.head = head or _head(facts, origin)
        upstream_class = getattr(importlib.import_module(origin.module), self.head)
        self._small = small_config(upstream_class.config_class).config
        self._cases = _cases(upstream_class, self._small)
        self._number = 0
        seams.register("rms_norm", FORMULA)(elementwise.rms_norm)
        seams.register("rotary", FORMULA)(elementwise.rotary)

    def executed(self) -> set[int]:
        """The lines of upstream's file that a training step runs."""
        module = importlib.import_module(self.origin.module)
        model = build_model(getattr(module, self.head), self._small)
        with _lines_run(module.__file__) as lines:
            for case in self._cases:
                train_step(model, case)
        return lines

    def verdict(self, mutant: Mutant) -> Verdict:
        """Generates from the changed source, and compares the result with the changed source itself."""
        self._number += 1
        with tempfile.TemporaryDirectory() as folder, _modules(self.origin, mutant, folder, self._number) as name:
            try:
                changed = getattr(importlib.import_module(name), self.head)
                upstream = build_model(changed, self._small)
                perturb(upstream)
                expected = [_finite_step(upstream, case) for case in self._cases]
            except Exception as error:  # whatever changed code may raise
                return Verdict(NOT_RUN, _one_line(error))
            try:
                generated = pipeline.generate(replace(self.origin, text=mutant.text), self._config)
            except PatchgenError as error:
                return Verdict(REFUSED, _one_line(error), _refusing_pass(str(error)))
            return self._compared(changed, expected, generated, Path(folder) / "generated")

    def _compared(
        self, changed: type[PreTrainedModel], steps: list[Step], generated: pipeline.Generated, folder: Path
    ) -> Verdict:
        provenance.write(generated, folder, force=True)
        try:
            ours = getattr(registry.read_model(folder).load(), self.head)
            pair = build_pair(changed, ours, self._small)
        except Exception as error:  # whatever upstream's code can raise, it did not raise there
            return Verdict(WRONG, f"cannot be built: {_one_line(error)}")
        if pair.problems:
            return Verdict(WRONG, pair.problems[0])
        for case, expected in zip(self._cases, steps, strict=True):
            for kernels in ({}, KERNELS):
                with all_eager(), seams.using(**kernels):
                    try:
                        actual = train_step(pair.generated, case)
                    except Exception as error:
                        return Verdict(WRONG, f"{case.name}, {_name(kernels)}: {_one_line(error)}")
                different = _difference(actual, expected, TOLERANCE if kernels else 0.0)
                if different and kernels:
                    different = _beyond_rounding(pair, case, actual, expected, different)
                if different:
                    return Verdict(WRONG, f"{case.name}, {_name(kernels)}: {different}")
        return Verdict(EQUAL)


def _name(kernels: dict[str, str]) -> str:
    return "seams" if kernels else "eager"


def _difference(actual, expected, tolerance: float) -> str:
    outputs = {k: v for k, v in compare_outputs(actual, expected).items() if not tolerance or k == "loss"}
    found = {**outputs, **{f"gradient of {k}": v for k, v in compare_gradients(actual, expected).items()}}
    worst = max(found.items(), key=lambda item: item[1].relative, default=None)
    if worst is None or worst[1].is_equal or worst[1].relative <= tolerance:
        return ""
    return f"{worst[0]} differs by {worst[1].relative:.1e}"


def _beyond_rounding(pair: ModelPair, case: Case, actual: Step, expected: Step, different: str) -> str:
    """`different`, unless upstream's own step in fp32 is as far from its step in fp64 as ours is: a sum that cancels."""
    upstream = copy.deepcopy(pair.upstream).double()
    with all_eager():
        exact = train_step(upstream, case)
    bar, own = _distances(expected, exact), _distances(actual, exact)
    worse = [name for name, distance in own.items() if distance > TOLERANCE + NUM_ROUNDINGS * bar[name]]
    return different if worse else ""


def _distances(step: Step, exact: Step) -> dict[str, float]:
    """Relative distances of the loss and of every gradient from a step in fp64."""
    wide = {k: v.double() for k, v in step.outputs.items()}
    gradients = {k: v.double() if v is not None else None for k, v in step.gradients.items()}
    found = compare_gradients(replace(step, gradients=gradients), exact)
    found["loss"] = compare_outputs(replace(step, outputs=wide), exact)["loss"]
    return {name: difference.relative for name, difference in found.items()}


def _finite_step(model: torch.nn.Module, case: Case):
    with all_eager():
        step = train_step(model, case)
    if not all(tensor.isfinite().all() for tensor in step.outputs.values()):
        raise ValueError("outputs are not finite")
    if not any(g is not None and g.any() for g in step.gradients.values()):
        raise ValueError("no parameter has a gradient")
    return step


def _cases(model_class: type, config) -> tuple[Case, ...]:
    cases = text_cases(config, model_class)
    if takes_media(model_class):
        return (
            *(c for c in cases if c.name in ("plain", "step")),
            *media_cases(build_model(model_class, config)).cases,
        )
    return cases


def provenance_of(generated: pipeline.Generated) -> dict:
    return json.loads(generated.provenance)


def _head(facts: dict, origin: Upstream) -> str:
    module = importlib.import_module(origin.module)
    heads = facts["heads"]
    return next((head for head in heads if takes_media(getattr(module, head))), heads[0])


def _refusing_pass(message: str) -> str:
    parts = message.split("'")
    return parts[1] if message.startswith("The pass '") else message.split(":")[0][:40]


def _one_line(error: object) -> str:
    kind = "" if isinstance(error, PatchgenError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:240]


@contextlib.contextmanager
def _modules(origin: Upstream, mutant: Mutant, folder: str, number: int) -> Iterator[str]:
    """The changed source, and the modules that it imports, as modules of upstream's package; yields its name."""
    name = f"{origin.module}_changed_{number}"
    sources = {name: mutant.text} | {f"{origin.package}.{k}": text for k, text in mutant.modules.items()}
    importlib.import_module(origin.package)
    for module, text in sources.items():
        file = Path(folder) / f"{module.rpartition('.')[2]}.py"
        file.write_text(text, encoding="utf-8")
    sys.meta_path.insert(0, finder := _Finder(dict.fromkeys(sources), Path(folder)))
    try:
        yield name
    finally:
        sys.meta_path.remove(finder)
        for module in sources:
            sys.modules.pop(module, None)
        linecache.checkcache()


class _Finder:
    """Finds modules of given names in a folder."""

    def __init__(self, names: dict[str, None], folder: Path) -> None:
        self._names, self._folder = names, folder

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None):
        if name not in self._names:
            return None
        return importlib.util.spec_from_file_location(name, self._folder / f"{name.rpartition('.')[2]}.py")


@contextlib.contextmanager
def _lines_run(file: str) -> Iterator[set[int]]:
    """Collects the lines of a file that run inside the block."""
    lines: set[int] = set()

    def on_line(frame: FrameType, event: str, _: object):
        if event == "line":
            lines.add(frame.f_lineno)
        return on_line

    def on_call(frame: FrameType, event: str, _: object):
        return on_line if frame.f_code.co_filename == file else None

    sys.settrace(on_call)
    try:
        yield lines
    finally:
        sys.settrace(None)
