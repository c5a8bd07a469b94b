"""Does plain transformers compute the same logits from the checkpoint and from an export?

One model is in memory at a time: the outputs of the generated model's layers are recorded before it is released.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from patchgen.runtime import registry
from patchgen.runtime.checkpoint import export_pretrained
from patchgen.runtime.doctor import calls, traces
from patchgen.runtime.doctor.finding import Check, Finding, failed, first_names, not_checked, passed
from patchgen.runtime.doctor.patient import MissingPart
from patchgen.runtime.train import architecture
from patchgen.runtime.train import model as models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient

RUNTIME_FIELDS = ("labels", "shift_labels", "position_ids", "real_tokens")
"""Fields of a batch that plain transformers computes itself, or does not take."""
BFLOAT16_ROUNDING = 2.0**-8


class Export(Check):
    """An export loads completely in plain transformers and computes the same."""

    name = "export"

    def run(self, patient: Patient) -> Finding:
        upstream = upstream_class(patient)
        model, expected_trace = patient.model, patient.expected_trace
        if patient.layerwise is not None:
            return _export_in_parts(patient)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if size > 0.9 * (free := shutil.disk_usage(patient.scratch).free):
            return not_checked(
                f"the export takes {size / 2**30:.1f} GiB, and {patient.scratch} has {free / 2**30:.1f} GiB free."
            )
        folder = patient.scratch / "export"
        export_pretrained(model, folder, source=models.weights_folder(patient.recipe.model))
        inputs, paths = plain_inputs(patient), list(expected_trace.expected.outputs)
        del model
        patient.release()
        # The export contains its config, unless that is of a composite model around this one.
        config = None if type(patient.config) is type(patient.blueprint.config) else patient.blueprint.config
        plain_trace, missing = _trace_of(upstream, folder, patient, inputs, paths, config)
        shutil.rmtree(folder)
        if missing:
            return failed(f"Upstream's {upstream.__name__} does not find {missing} in the export.", ADVICE)
        subject = f"The export, loaded by upstream's {upstream.__name__},"
        return _compare(patient, expected_trace, plain_trace, subject, is_rounded=patient.is_quantised)


class PlainTransformers(Check):
    """The checkpoint in plain transformers computes what it computes in the generated model."""

    name = "plain transformers"

    def run(self, patient: Patient) -> Finding:
        if patient.checkpoint is None:
            return not_checked("the weights are random: there is no checkpoint to load.")
        upstream, expected_trace = upstream_class(patient), patient.expected_trace
        inputs, paths = plain_inputs(patient), list(expected_trace.expected.outputs)
        patient.release()
        # Upstream's own loader refuses a checkpoint with fewer rows than the model, and needs packages for quantised ones.
        if patient.grown or patient.is_quantised or not patient.fits_in_memory(patient.blueprint):
            plain_trace = _trace_in_layers(upstream, patient, inputs, paths)
            summary = f"Upstream's {upstream.__name__}, with the checkpoint's weights loaded one layer after another,"
            return _compare(patient, expected_trace, plain_trace, summary)
        folder = models.weights_folder(patient.recipe.model)
        assert folder is not None, "patient.checkpoint is not None"
        plain_trace, missing = _trace_of(upstream, folder, patient, inputs, paths, patient.blueprint.config)
        if missing:
            return not_checked(f"upstream's {upstream.__name__} does not find {missing} in {folder}.")
        return _compare(
            patient, expected_trace, plain_trace, f"The checkpoint, loaded by upstream's {upstream.__name__},"
        )


def _export_in_parts(patient: Patient) -> Finding:
    """The export of a model that is larger than memory: its tensors are converted from the checkpoint's and compared."""
    if patient.weights is None:
        return not_checked("the weights are random and larger than memory: there is no checkpoint to compare with.")
    wrong = list(patient.weights.export_differences())
    if wrong:
        return failed(" ".join(wrong[:3]) + (f" And {len(wrong) - 3} more." if len(wrong) > 3 else ""), ADVICE)
    return passed(
        "An export has the checkpoint's tensors, by name, shape and value; because the model is larger than memory, it was not "
        "written, nor loaded in plain transformers."
    )


def _trace_in_layers(
    upstream: type[PreTrainedModel], patient: Patient, inputs: dict[str, Any], paths: Sequence[str]
) -> traces.Trace:
    """The trace of upstream's class, with as many layers in memory as fit."""
    with torch.device("meta"):
        model = upstream._from_config(
            copy.deepcopy(patient.blueprint.config), attn_implementation="eager", dtype=patient.dtype
        )
    options = {**models.allowed_differences(patient.recipe, patient.blueprint), "seed": patient.recipe.train.seed}
    patient.load_layerwise(model, options)
    return traces.record_plain(model, inputs, paths)


ADVICE = (
    "The modeling file or its conversion of weights differs from upstream's: generate it again (`patchgen generate`), and check "
    "the named module: gate and up, transposed matrices, casts."
)


def upstream_class(patient: Patient) -> type[PreTrainedModel]:
    """Upstream's class of the model.

    Raises:
        MissingPart: the model was generated from a file whose location is unknown.
    """
    head = type(patient.blueprint)
    try:
        return getattr(architecture.generated_model_of(head).upstream(), head.__name__)
    except registry.NoUpstreamError as error:
        raise MissingPart(str(error)) from error


def plain_inputs(patient: Patient) -> dict[str, Any]:
    """The probe, reduced to the arguments that plain transformers takes."""
    return {name: value for name, value in patient.probe.items() if name not in RUNTIME_FIELDS}


def _trace_of(
    upstream: type[PreTrainedModel],
    folder: Path,
    patient: Patient,
    inputs: dict[str, Any],
    paths: Sequence[str],
    config: PreTrainedConfig | None,
) -> tuple[traces.Trace, str]:
    """The trace of upstream's class with the weights of a folder, and the first parameters that the folder lacks (empty: none).

    Args:
        config: used instead of the folder's; None: the folder's.
    """
    loaded: Any = upstream.from_pretrained(
        folder,
        config=copy.deepcopy(config),
        dtype=patient.dtype,
        attn_implementation="eager",
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, info = loaded  # a pair, which upstream's annotation omits
    model = model.to(patient.device)
    # Includes new parts that the recipe allows: upstream initialises them to other random values.
    return traces.record_plain(model, inputs, paths), first_names(sorted(info["missing_keys"]))


def _compare(
    patient: Patient,
    generated_trace: traces.ExpectedTrace,
    plain: traces.Trace,
    subject: str,
    *,
    is_rounded: bool = False,
) -> Finding:
    divergence, not_compared = generated_trace.first_divergence(plain), generated_trace.not_compared(plain)
    difference = calls.difference(plain.logits, generated_trace.expected.logits)
    if divergence is None:
        how = f"within a relative difference of {difference:.0e}" if difference else "bit for bit"
        return passed(f"{subject} computes the same logits {how}.{not_compared}")
    is_bfloat16_rounding = divergence.relative_difference < BFLOAT16_ROUNDING and patient.dtype == torch.float32
    if is_bfloat16_rounding and is_rounded:
        return passed(
            f"{subject} computes the same logits within {difference:.0e}: it has the numbers of quantised weights in bfloat16."
        )
    note = " (a rounding error of bfloat16: one side casts to it)" if is_bfloat16_rounding else ""
    return failed(
        f"{subject} computes something else: {divergence.path} is the first that "
        f"differs, with a relative difference of {divergence.relative_difference:.1e}{note}; "
        f"that of the logits is {difference:.1e}.{not_compared}",
        ADVICE,
    )
