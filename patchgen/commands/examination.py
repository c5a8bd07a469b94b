"""One model type, generated and proven: what decides a row of records/coverage.json."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen import emit, executed_code, model_configs, pipeline, provenance, upstream
from patchgen.errors import PatchgenError

if TYPE_CHECKING:
    from patchgen.pipeline import Generated
    from patchgen.runtime.verify.proof import Proof
    from patchgen.runtime.verify.record_types import CoverageRow, GenerationFacts, RowProofFacts, TrainingRecord
    from patchgen.runtime.verify.verdict import Verdict

PROVEN, EAGER_ONLY, GENERATED, FAILED = "proven", "proven, eager only", "generated", "failed"
"""The first three equal those of `runtime/verify/verdict.py`, which belongs to the runtime."""
TEXT = "text"
MAX_REASON = 240
"""Characters of a reason in a row."""
CAUSAL_MAP = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Kernels that need no compiler: a sweep compares only these, `patchgen verify` every implementation of a seam.
COMPARED_IMPLEMENTATIONS = ("torch", "chunked")
PASSES_NOT_COUNTED = ("prune", "absolute_imports", "checkpoint_mapping")


@dataclass(frozen=True)
class Examined:
    """What a sweep found out about a model type.

    Attributes:
        generated_digest: the digest of the generated text, or of the refusal in its place.
        row: None where generation gives the text that the present row is about: the row stays, with these facts.
        code: what its process has called (`executed_code.functions`).
    """

    model_type: str
    generated_digest: str
    facts: GenerationFacts
    row: CoverageRow | None
    code: frozenset[str] = frozenset()


def set_worker_environment() -> None:
    """Sets the environment variables of a worker process, and has it end with the process that started it."""
    from patchgen.runtime.parent_process import end_with_parent

    end_with_parent()
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["OMP_NUM_THREADS"] = "1"


def digest(text: str) -> str:
    """The hash of generated text, or of the refusal in its place."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def generate(model_type: str, version: str, heads: Sequence[str] = ()) -> tuple[list[Generated], str, str]:
    """The generated model with the models that it builds by default, the reason if it is refused, and the digest of either."""
    try:
        models = pipeline.generate_whole(upstream.load(model_type, version), heads=heads)
    except PatchgenError as error:
        reason = short_reason(error)
        return [], reason, digest(f"refused: {reason}")
    return models, "", digest("".join(model.text for model in models))


def write(models: list[Generated], folder: Path) -> Path:
    """Writes a model and its parts into a folder each; returns the model's."""
    for model in models:
        provenance.write(model, folder / model.model, force=True)
    return folder / models[0].model


def generated_digest(model_type: str, version: str, heads: Sequence[str] = ()) -> str:
    """The digest of what generation gives now."""
    return generate(model_type, version, heads)[2]


def examine(model_type: str, version: str, *, takes_media: bool = False, known_digest: str = "") -> Examined:
    """Generates and proves one model type; the row has its status and, if it is not proven, the reason.

    Args:
        takes_media: whether the head that takes images, videos or audio is proven, instead of the causal one.
        known_digest: the digest of the generated text of a current row, whatever its status: if generation gives the same text,
            it is not proven again.
    """
    from patchgen.runtime.failures import reraise_machine_failure
    from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS

    start = time.perf_counter()
    models, refusal, models_digest = generate(model_type, version)
    if not models:
        return unproven(model_type, FAILED, refusal, models_digest, seconds=time.perf_counter() - start)
    facts = _facts(model_type, models)
    if models_digest == known_digest:
        return Examined(model_type, models_digest, facts, row=None)
    generation = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        try:
            type_verdict, proof = _prove(model_type, write(models, Path(folder)), takes_media=takes_media)
            status, reason = type_verdict.status, type_verdict.reason
        except UPSTREAM_REFUSALS as error:  # while the head, or its packing rules, are looked up
            reraise_machine_failure(error)
            status, reason, proof = GENERATED, short_reason(error), None
    seconds = time.perf_counter() - start
    proven = row(model_type, status, reason, facts, proof, seconds=seconds, generation_seconds=generation)
    return Examined(model_type, models_digest, facts, proven, executed_code.functions())


def unproven(model_type: str, status: str, reason: str, models_digest: str, *, seconds: float = 0.0) -> Examined:
    """A type of which nothing but a reason is known: refused, or lost with its process."""
    found = row(model_type, status, reason, seconds=seconds)
    return Examined(model_type, models_digest, _nothing_generated(), found)


def _nothing_generated() -> GenerationFacts:
    return {"hits": {}, "notes": 0, "config_lines": 0, "changed_lines": 0, "moe": False}


def _facts(model_type: str, models: list[Generated]) -> GenerationFacts:
    generated = models[0]
    name = model_type if model_type.isidentifier() else model_type.replace("-", "_")
    hits = {step.name: len(step.outcome.hits) for step in generated.steps if step.outcome.hits}
    config = Path(model_configs.__file__).parent / f"{name}.py"
    return {
        "hits": {name: count for name, count in hits.items() if name not in PASSES_NOT_COUNTED},
        "notes": sum(len(step.outcome.notes) for step in generated.steps),
        "config_lines": len(config.read_text().splitlines()) if config.is_file() else 0,
        "changed_lines": emit.changed_lines(generated.diff),
        "moe": any(step.name == "fused_experts" and step.outcome.hits for model in models for step in model.steps),
    }


def _prove(model_type: str, directory: Path, *, takes_media: bool) -> tuple[Verdict, RowProofFacts | None]:
    """The verdict, and what was compared; None if nothing was."""
    from patchgen.runtime.verify.comparison import worst_of
    from patchgen.runtime.verify.proof import BF16
    from patchgen.runtime.verify.reference_model import head_with_media
    from patchgen.runtime.verify.verify_model import judge

    head = head_with_media(directory) if takes_media else upstream.open_release().auto_map(CAUSAL_MAP).get(model_type)
    type_verdict, proof = judge(directory, implementations=COMPARED_IMPLEMENTATIONS, head=head)
    if proof is None:
        return type_verdict, None
    in_fp32 = [case for case in proof.cases if case.name != BF16]  # that one is judged in units of upstream's error
    return type_verdict, {
        "inputs": _inputs(proof),
        "refused_inputs": proof.refused_inputs,
        "inputs_without_rule": _without_rule(model_type, directory, proof) if takes_media else [],
        "training": _training(proof),
        "loss_difference": worst_of(case.loss for case in in_fp32).relative,
        "gradient_difference": worst_of(case.gradient for case in in_fp32).relative,
    }


def _training(proof: Proof) -> TrainingRecord | None:
    """The record of the training path, without what was observed and has no effect."""
    from patchgen.runtime.verify.report import training_record

    if proof.training is None:
        return None
    return training_record(replace(proof.training, facts=tuple(fact for fact in proof.training.facts if fact.effect)))


def _without_rule(model_type: str, directory: Path, proof: Proof) -> list[str]:
    """The inputs of the head that no packing rule covers; a proven type must not have any."""
    from patchgen.runtime.registry import read_model
    from patchgen.runtime.verify.input_names import inputs_without_rule

    return inputs_without_rule(getattr(read_model(directory).load(), proof.head), model_type, proof.inputs)


def _inputs(proof: Proof) -> list[str]:
    """The inputs with images, video or audio on which both classes were compared."""
    from patchgen.commands.models_page import MEDIA_CASES

    return [kind for kind in MEDIA_CASES if any(case.name == kind for case in proof.cases)]


def row(
    model_type: str,
    status: str,
    reason: str,
    facts: GenerationFacts | None = None,
    proof: RowProofFacts | None = None,
    *,
    family: str = TEXT,
    seconds: float = 0.0,
    generation_seconds: float = 0.0,
) -> CoverageRow:
    """A row of the record; facts that are not given are empty."""
    nothing_proven: RowProofFacts = {
        "inputs": [],
        "refused_inputs": {},
        "inputs_without_rule": [],
        "training": None,
        "loss_difference": None,
        "gradient_difference": None,
    }
    return {
        "model_type": model_type,
        "status": status,
        "reason": reason,
        **(facts or _nothing_generated()),
        "family": family,
        **(proof or nothing_proven),
        "seconds": round(seconds, 2),
        "generation_seconds": round(generation_seconds, 2),
    }


def short_reason(error: object) -> str:
    """The first sentence of a message; of a `PassMismatch`, also what it expected and found, or the sign of the missing site."""
    lines = [line.strip() for line in str(error).strip().splitlines()] or [type(error).__name__]
    fields = {line.split()[0]: line.split(maxsplit=1)[-1] for line in reversed(lines[1:]) if line}
    if "expected" in fields:
        detail = f"expected {fields['expected']}, found {fields.get('closest', 'none')}"
    else:
        detail = fields.get("sign", "")
    first = lines[0].partition(". It expects")[0]
    return " ".join((f"{first}: {detail}" if detail else lines[0]).split())[:MAX_REASON]
