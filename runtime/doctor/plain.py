"""Does plain transformers compute the same logits, of the checkpoint as it is and of what would be exported?

One model is in memory at a time: ours writes down what its layers compute and makes room.
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
from patchgen.runtime.doctor.finding import Check, Finding, failed, few, not_checked, passed
from patchgen.runtime.doctor.patient import Needs
from patchgen.runtime.train import architecture
from patchgen.runtime.train import model as models

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from patchgen.runtime.doctor.patient import Patient

OURS = ("labels", "shift_labels", "position_ids", "real_tokens")
"""Fields that plain transformers finds itself, or that it does not know."""
BFLOAT16_ROUNDS = 2.0**-8


class Export(Check):
    """What is exported loads in plain transformers, whole, and computes the same."""

    name = "export"

    def run(self, patient: Patient) -> Finding:
        upstream = upstream_class(patient)
        model, yardstick = patient.model, patient.yardstick
        if patient.layerwise is not None:
            return _there_and_back(patient)
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if size > 0.9 * (free := shutil.disk_usage(patient.scratch).free):
            return not_checked(f"it takes {size / 2**30:.1f} GiB, and {patient.scratch} has {free / 2**30:.1f} GiB.")
        folder = patient.scratch / "export"
        export_pretrained(model, folder, source=models.weights_folder(patient.recipe.model))
        inputs, paths = plain_inputs(patient), list(yardstick.expected.outputs)
        del model
        patient.release()
        # Its own config is part of what is exported; that of a whole around this model is not a config of this class.
        own = None if type(patient.config) is type(patient.blueprint.config) else patient.blueprint.config
        found, missing = _trace_of(upstream, folder, patient, inputs, paths, own)
        shutil.rmtree(folder)
        if missing:
            return failed(f"upstream's class does not find {missing} in the export.", ADVICE)
        return _compared(patient, yardstick, found, f"The export, loaded by upstream's {upstream.__name__},")


class PlainTransformers(Check):
    """The checkpoint, loaded by plain transformers, computes what the generated model computes of it."""

    name = "plain transformers"

    def run(self, patient: Patient) -> Finding:
        if patient.checkpoint is None:
            return not_checked("the weights are random: there is no checkpoint to load.")
        upstream, yardstick = upstream_class(patient), patient.yardstick
        inputs, paths = plain_inputs(patient), list(yardstick.expected.outputs)
        patient.release()
        if not patient.has_room(patient.blueprint):
            found = _trace_in_layers(upstream, patient, inputs, paths)
            told = (
                f"Upstream's {upstream.__name__}, of which one layer after another was given the checkpoint's weights,"
            )
            return _compared(patient, yardstick, found, told)
        folder = models.weights_folder(patient.recipe.model)
        assert folder is not None, "the place of the weights was found above"
        found, missing = _trace_of(upstream, folder, patient, inputs, paths, patient.blueprint.config)
        if missing:
            return not_checked(f"upstream's {upstream.__name__} does not find {missing} in {folder}.")
        return _compared(patient, yardstick, found, f"The checkpoint, loaded by upstream's {upstream.__name__},")


def _there_and_back(patient: Patient) -> Finding:
    """The export of a model that is never whole: its tensors, made of the checkpoint's without the model."""
    if patient.weights is None:
        return not_checked("the weights are random and larger than memory: there is no checkpoint to compare with.")
    wrong = list(patient.weights.export_differences())
    if wrong:
        return failed(" ".join(wrong[:3]) + (f" And {len(wrong) - 3} more." if len(wrong) > 3 else ""), ADVICE)
    return passed(
        "An export has the checkpoint's tensors again, by name, shape and value; larger than memory, it was not written, nor "
        "loaded in plain transformers."
    )


def _trace_in_layers(
    upstream: type[PreTrainedModel], patient: Patient, inputs: dict[str, Any], paths: Sequence[str]
) -> traces.Trace:
    """What upstream's class computes, one layer in memory at a time."""
    with torch.device("meta"):
        model = upstream._from_config(
            copy.deepcopy(patient.blueprint.config), attn_implementation="eager", dtype=patient.dtype
        )
    options = {**models.may_differ(patient.recipe, patient.blueprint), "seed": patient.recipe.train.seed}
    patient.in_layers(model, options)
    return traces.record_plain(model, inputs, paths)


ADVICE = (
    "The modeling file or its conversion of weights is not upstream's: generate it again (`patchgen generate`), and look at the "
    "module that is named: gate and up, the way matrices lie, casts."
)


def upstream_class(patient: Patient) -> type[PreTrainedModel]:
    """Upstream's class of the model.

    Raises:
        Needs: the model was made from a file of which nobody says where it lies.
    """
    head = type(patient.blueprint)
    try:
        return getattr(architecture.generated_of(head).upstream(), head.__name__)
    except registry.NoUpstreamError as error:
        raise Needs(str(error)) from error


def plain_inputs(patient: Patient) -> dict[str, Any]:
    """One sample as plain code hands it over."""
    return {name: value for name, value in patient.probe.items() if name not in OURS}


def _trace_of(
    upstream: type[PreTrainedModel],
    folder: Path,
    patient: Patient,
    inputs: dict[str, Any],
    paths: Sequence[str],
    config: PreTrainedConfig | None,
) -> tuple[traces.Trace, str]:
    """What upstream's class computes with the weights of a folder, and which of its parameters were not there.

    Args:
        config: instead of the folder's own.
    """
    loaded: Any = upstream.from_pretrained(
        folder,
        config=copy.deepcopy(config),
        dtype=patient.dtype,
        attn_implementation="eager",
        output_loading_info=True,
        trust_remote_code=False,
    )
    model, told = loaded  # a pair, which upstream's signature does not say
    model = model.to(patient.device)
    # New parts that the recipe allows are among them: upstream's random values of them are not ours.
    return traces.record_plain(model, inputs, paths), few(sorted(told["missing_keys"]))


def _compared(patient: Patient, ours: traces.Yardstick, plain: traces.Trace, told: str) -> Finding:
    found = ours.first_divergence(plain)
    share = calls.difference(plain.logits, ours.expected.logits)
    if found is None:
        how = f"to {share:.0e} of their size" if share else "bit for bit"
        return passed(f"{told} computes the same logits {how}.")
    rounded = found.share < BFLOAT16_ROUNDS and patient.dtype == torch.float32
    what = " (as much as bfloat16 rounds: something is computed in it there)" if rounded else ""
    return failed(
        f"{told} computes otherwise: {found.path} is the first, by {found.share:.1e} of its size{what}; the logits differ by "
        f"{share:.1e}.",
        ADVICE,
    )
