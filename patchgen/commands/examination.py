"""One model type, generated and proven: what decides a row of records/coverage.json."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from patchgen import emit, model_configs, pipeline, provenance, upstream
from patchgen.errors import PatchgenError

if TYPE_CHECKING:
    from patchgen.pipeline import Generated
    from patchgen.runtime.verify.proof import Proof

PROVEN, EAGER_ONLY, GENERATED, FAILED = "proven", "proven, eager only", "generated", "failed"
"""The first three equal those of `runtime/verify/verdict.py`, which belongs to the runtime."""
Row = dict[str, Any]  # of the record, or a part of one
TEXT = "text"
MAX_REASON = 240
"""Characters of a reason in a row."""
CAUSAL_MAP = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
# Kernels that need no compiler: every seam is compared in `patchgen verify`, a sweep compares these.
COMPARED_IMPLEMENTATIONS = ("torch", "chunked")
PASSES_NOT_COUNTED = ("prune", "absolute_imports", "checkpoint_mapping")


def set_worker_environment() -> None:
    """Sets the environment variables of a worker process."""
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


def generated_digest(model_type: str, version: str) -> str:
    """The digest of what generation gives now."""
    return generate(model_type, version)[2]


def examine(model_type: str, version: str, *, takes_media: bool = False, known: str = "") -> Row:
    """Generates and proves one model type; the row has its status and, if it is not proven, the reason.

    Args:
        takes_media: whether the head that takes images, videos or audio is proven, instead of the causal one.
        known: the digest of generated text whose proof is current: if generation gives the same text, it is not proven
            again, and the row has only the facts of the generation.
    """
    from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS

    start = time.perf_counter()
    models, refusal, models_digest = generate(model_type, version)
    if not models:
        return row(model_type, FAILED, refusal, generated=models_digest, seconds=time.perf_counter() - start)
    facts = _facts(model_type, models)
    if models_digest == known:
        return {"model_type": model_type, **facts, "generated": models_digest}
    generation = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        try:
            outcome = _prove(model_type, write(models, Path(folder)), takes_media=takes_media)
        except UPSTREAM_REFUSALS as error:  # the head that takes media is not found
            outcome = {"status": GENERATED, "reason": short_reason(error)}
    seconds = time.perf_counter() - start
    return row(model_type, **facts, **outcome, generated=models_digest, seconds=seconds, generation_seconds=generation)


def _facts(model_type: str, models: list[Generated]) -> Row:
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


def _prove(model_type: str, directory: Path, *, takes_media: bool) -> Row:
    from patchgen.runtime.verify.reference_model import head_with_media
    from patchgen.runtime.verify.report import training_record
    from patchgen.runtime.verify.verify_model import judge

    head = head_with_media(directory) if takes_media else upstream.open_release().auto_map(CAUSAL_MAP).get(model_type)
    type_verdict, proof = judge(directory, implementations=COMPARED_IMPLEMENTATIONS, head=head)
    if proof is None:
        return {"status": type_verdict.status, "reason": type_verdict.reason}
    return {
        "status": type_verdict.status,
        "reason": type_verdict.reason,
        "loss_difference": max((case.loss.relative for case in proof.cases), default=0.0),
        "gradient_difference": max((case.gradient.relative for case in proof.cases), default=0.0),
        "inputs": _inputs(proof),
        "refused_inputs": proof.refused_inputs,
        "inputs_without_rule": _without_rule(model_type, directory, proof) if takes_media else [],
        "training": training_record(proof.training) if proof.training is not None else None,
    }


def _without_rule(model_type: str, directory: Path, proof: Proof) -> list[str]:
    """The inputs of the head that no packing rule covers; a proven type must not have any."""
    from patchgen.runtime.registry import read_model
    from patchgen.runtime.verify.input_names import without_rule

    return without_rule(getattr(read_model(directory).load(), proof.head), model_type, proof.inputs)


def _inputs(proof: Proof) -> list[str]:
    """The inputs with images, video or audio on which both classes were compared."""
    from patchgen.commands.models_page import MEDIA_CASES

    return [kind for kind in MEDIA_CASES if any(case.name == kind for case in proof.cases)]


def row(model_type: str, status: str, reason: str, **facts: object) -> Row:
    """A row of the record; facts that are not given are empty."""
    values: Row = {
        "model_type": model_type,
        "status": status,
        "reason": reason,
        "hits": {},
        "notes": 0,
        "config_lines": 0,
        "changed_lines": 0,
        "moe": False,
        "family": TEXT,
        "inputs": [],
        "refused_inputs": {},
        "inputs_without_rule": [],
        "training": None,
        "loss_difference": None,
        "gradient_difference": None,
        "seconds": 0.0,
        "generation_seconds": 0.0,
        **facts,
    }
    return {name: round(one, 2) if name.endswith("seconds") else one for name, one in values.items()}


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
