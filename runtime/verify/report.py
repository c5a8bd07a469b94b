"""The record of a proof: `verify.json` next to the generated file. What is printed of one is in `proof_table`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers
from packaging.version import Version

from patchgen.runtime import mended_upstream, registry
from patchgen.runtime.attention_kinds import Kind
from patchgen.runtime.compatibility import digest
from patchgen.runtime.verify import code_sets, given_config, verdict
from patchgen.runtime.verify.comparison import Difference
from patchgen.runtime.verify.observe import facts
from patchgen.runtime.verify.proof import Proof
from patchgen.runtime.verify.training_path import TrainingPath

if TYPE_CHECKING:
    from patchgen.runtime.verify.record_types import (
        DifferenceRecord,
        LayoutResultRecord,
        MadeWith,
        ProofFacts,
        ProofRecord,
        TrainingRecord,
    )
    from patchgen.runtime.verify.two_ranks import LayoutResult

FILE_NAME = "verify.json"


def write_proof(
    proof: Proof, directory: Path, made_with: MadeWith, *, made_on_ranks_with: MadeWith | None = None
) -> Path:
    """Writes `verify.json` into `directory` and returns its path.

    Its content depends on the proof alone: no times, no paths. Other releases that the same generated file was proven with
    are kept; the installed one is listed if the eager comparison passes.

    Args:
        made_with: the sources and releases that the proof depends on.
        made_on_ranks_with: those of the comparison on two ranks, if the proof has one.
    """
    path = directory / FILE_NAME
    record: ProofRecord = {**proof_record(proof), "made_with": made_with}
    if proof.two_ranks is not None and made_on_ranks_with is not None:
        record["two_ranks"] = {
            "layouts": {name: _layout_record(found) for name, found in proof.two_ranks.items()},
            "made_with": made_on_ranks_with,
        }
    if mended := mended_methods(directory):
        record["mended"] = mended
    if copies := _copied_files(directory, proof.model):
        record["copies"] = copies
    if path.is_file():
        before: ProofRecord = code_sets.read(path)
        if before.get("sha256") == proof.file_sha256:
            others = set(before["transformers"]) - {transformers.__version__}
            record["transformers"] = sorted(others.union(record["transformers"]), key=Version)
    path.write_text(code_sets.dumps(record, indent=2))
    return path


def mended_methods(directory: Path) -> list[str]:
    """What `GeneratedModel.upstream` mends for the model in a folder, in the installed release: "Class.method", each once."""
    if not (directory / "provenance.json").is_file():
        return []
    model = registry.read_model(directory)
    if model.is_from_user_file:
        return []
    mends = mended_upstream.applied_mends(model.upstream_module, model.mends)
    return list(dict.fromkeys(mend.target for mend in mends))


def _copied_files(directory: Path, model: str) -> dict[str, str]:
    """Hashes of what lies beside a generated file and decides what is proven: a configuration of the user's own, values of the
    small config."""
    files = [file for file in sorted(directory.glob("*.py")) if file.name != f"modeling_{model}.py"]
    files += [path] if (path := directory / given_config.FILE_NAME).is_file() else []
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def proof_record(proof: Proof) -> ProofFacts:
    """The content of `verify.json`, without what the proof depends on."""
    result = verdict.of(proof)
    record: ProofFacts = {
        "model": proof.model,
        "head": proof.head,
        "status": result.status,
        "reason": result.reason,
        "upstream": proof.upstream_version,
        "sha256": proof.file_sha256,
        "transformers": [transformers.__version__] if proof.is_equal else [],
        "torch": torch.__version__.partition("+")[0],
        "config": _plain_fields(proof.overrides),
        "cases": [
            {
                "case": case.name,
                "variant": case.variant,
                "loss": _difference_record(case.loss),
                "logits": _difference_record(case.logits),
                "outputs": _difference_record(case.outputs),
                "gradient": _difference_record(case.gradient),
                "parameters": case.num_parameters,
                "without_gradient": len(case.without_gradient),
            }
            for case in proof.cases
        ],
        "seams": [
            {
                "seam": seam.seam,
                "implementation": seam.implementation,
                "status": seam.status,
                "calls": seam.calls,
                "loss": _difference_record(seam.loss),
                "gradient": _difference_record(seam.gradient),
                "reason": seam.reason,
            }
            for seam in proof.seams
        ],
        "without_gradient": list(proof.without_gradient),
        "refused_variants": proof.refused_variants,
        "refused_inputs": proof.refused_inputs,
        "not_compared": proof.not_compared,
        "foreign_classes": proof.foreign_classes,
        "failures": proof.failures,
        "training": training_record(proof.training) if proof.training is not None else None,
    }
    if proof.left_out:
        record["left_out"] = proof.left_out
    if proof.changed_inputs:
        record["changed_inputs"] = list(proof.changed_inputs)
    if proof.not_run:
        record["not_run"] = list(proof.not_run)
    return record


def read_training(directory: Path, file: Path, head: str) -> TrainingRecord | None:
    """The training path in the record next to a generated file; None unless the record proves this file and head in one process
    with the installed releases and the present code."""
    record = _current_record(directory, file, head)
    return record.get("training") if record is not None else None


def read_two_ranks(directory: Path, file: Path, head: str) -> dict[str, str] | None:
    """Layout of two ranks -> why it does not agree, from the same record; None unless it was compared with the present code."""
    record = _current_record(directory, file, head)
    found = record.get("two_ranks") if record is not None else None
    if record is None or found is None:
        return None
    releases = [
        {name: made[name] for name in code_sets.RELEASES} for made in (record["made_with"], found["made_with"])
    ]
    is_current = releases[0] == releases[1] and code_sets.is_current(found["made_with"])
    return {name: layout["reason"] for name, layout in found["layouts"].items()} if is_current else None


def _current_record(directory: Path, file: Path, head: str) -> ProofRecord | None:
    """The record next to a generated file, if it proves this file and head in one process, now and here."""
    path = directory / FILE_NAME
    if not path.is_file():
        return None
    record: ProofRecord = code_sets.read(path)
    made_with: Mapping[str, object] = record.get("made_with", {})
    is_current = (
        record.get("status") in verdict.PROVEN_IN_ONE_PROCESS
        and code_sets.is_current(made_with)
        and made_with.get("transformers") == transformers.__version__  # `transformers` has earlier releases, too
        and record["head"] == head
        and record["sha256"] == digest(file)
        and record.get("copies", {}) == _copied_files(directory, record["model"])
        and record["torch"] == torch.__version__.partition("+")[0]
    )
    return record if is_current else None


def read_kinds(training: TrainingRecord) -> tuple[Kind, ...]:
    """What each kind of layer requires of its attention, from the record of a training path."""
    return tuple(Kind(kind["layers"], kind["config"], tuple(kind["asked"])) for kind in training["asked"])


def training_record(path: TrainingPath) -> TrainingRecord:
    """The record of the comparison of the training path."""
    record: TrainingRecord = {
        "attention": path.attention,
        "compared_with": path.compared_attention,
        "asked": [
            {"layers": kind.layers, "config": kind.config, "asked": list(kind.features)}
            for kind in path.attention_kinds
        ],
        "separates_documents": path.separates_documents,
        "seams": dict(path.seams),
        "checks": {
            check.name: {
                "loss": one_digit(check.loss.relative),
                "logits": one_digit(check.logits.relative),
                "gradient": one_digit(check.gradient.relative),
            }
            for check in path.checks
        },
        "failures": list(path.failures),
        "left_out": dict(path.left_out),
    }
    if path.facts:
        record["observed"] = facts.to_records(path.facts)
    return record


def _layout_record(found: LayoutResult) -> LayoutResultRecord:
    difference = "" if found.difference is None else one_digit(found.difference)
    return {"difference": difference, "reason": verdict.one_line(found.reason), "applies": found.applies}


def _difference_record(difference: Difference) -> DifferenceRecord:
    return {
        "equal": difference.is_equal,
        "absolute": one_digit(difference.absolute),
        "relative": one_digit(difference.relative),
    }


def one_digit(difference: float) -> str:
    """Records keep one digit: rounding differs between machines."""
    return f"{difference:.0e}" if difference else "0"


def _plain_fields(overrides: Mapping[str, object]) -> dict[str, object]:
    return {str(key): _plain(value) for key, value in sorted(overrides.items(), key=lambda item: str(item[0]))}


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return _plain_fields(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
