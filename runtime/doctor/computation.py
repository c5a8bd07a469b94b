"""Does the model compute the same for packed documents as for single ones, and with kernels as without; do routers use fp32?"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from patchgen.runtime import seams
from patchgen.runtime.doctor import calls, traces
from patchgen.runtime.doctor.finding import Check, Finding, failed, first_names, not_checked, passed
from patchgen.runtime.doctor.kernel_calls import count_kernel_calls
from patchgen.runtime.doctor.samples import Sample
from patchgen.runtime.parallel import sharding

if TYPE_CHECKING:
    from patchgen.runtime.doctor.patient import Patient

MAX_DOCUMENTS = 4
MIN_VALUES = 16
"""Fewer values may all fit into bfloat16 by chance."""


class Packing(Check):
    """A document has the same logits in a packed row and alone."""

    name = "packing"

    def run(self, patient: Patient) -> Finding:
        documents = patient.documents[:MAX_DOCUMENTS]
        if len(documents) == 1:
            documents = _halves(documents[0])
        if len(documents) == 1:
            return not_checked("there is a single document, which cannot be cut in two.")
        packed = calls.logits(patient.model, patient.rows(documents), patient.kernels)
        tolerance, start, worst = patient.expected_trace.logits_tolerance, 0, (0.0, 0)
        for number, document in enumerate(documents):
            alone = calls.logits(patient.model, patient.rows([document]), patient.kernels)
            difference = calls.difference(packed[start : start + len(alone)], alone)
            worst = max(worst, (difference, number))
            start += len(alone)
        difference, number = worst
        if difference > tolerance:
            return failed(
                f"Document {number + 1} of {len(documents)} ({documents[number].record}) has other logits in a packed row than "
                f"alone: the relative difference is {difference:.1e}, and rounding explains {tolerance:.0e}. It sees the other "
                "documents.",
                "The attention, or another layer that mixes tokens, does not stop where documents end: leave model.attention "
                "out; if the modeling file computes attention itself, it must take cu_seq_lens_q, or "
                "model.separate_documents: true keeps documents in rows of their own.",
            )
        return passed(
            f"{len(documents)} documents have the same logits in one row as alone; relative difference {difference:.0e}."
        )


def _halves(sample: Sample) -> list[Sample]:
    """A text sample cut into two documents; one with media, or with fewer than 4 tokens, is returned as it is."""
    fields = sample.fields
    if (
        set(fields) != {"input_ids", "labels", "position_ids"}
        or fields["position_ids"].ndim > 1
        or len(sample.ids) < 4
    ):
        return [sample]
    middle = len(sample.ids) // 2
    first = {name: value[:middle] for name, value in fields.items()}
    second = {name: value[middle:] for name, value in fields.items()}
    second["position_ids"] = second["position_ids"] - second["position_ids"][0]
    return [replace(sample, fields=part) for part in (first, second)]


class Kernels(Check):
    """Each kernel that a run selects is called by every module with its seam, and computes what eager code does."""

    name = "kernels"

    def run(self, patient: Patient) -> Finding:
        kernels = {
            seam: name for seam, name in patient.kernels.items() if name != seams.EAGER
        }  # eager code calls none
        counts, inactive = count_kernel_calls(patient.model, patient.row, kernels)
        for seam, paths in inactive.items():
            if paths:
                return failed(
                    f"{seam} = '{kernels[seam]}' is inactive: {first_names(paths)} ran without calling it.",
                    "The branch with the seam was not taken: generate the modeling file again (`patchgen generate`), and check "
                    "experts_implementation in the config.",
                )
        return self._against_eager(patient, {seam: by_module.total() for seam, by_module in counts.items()})

    @staticmethod
    def _against_eager(patient: Patient, counts: dict[str, int]) -> Finding:
        model, kernels = patient.model, patient.kernels
        summary = ", ".join(f"{seam} '{kernels[seam]}' {count} x" for seam, count in counts.items()) or "no kernels"
        summary = f"attention '{model.config._attn_implementation}', {summary}"
        tolerance = calls.tolerance(patient.dtype)
        with calls.eager_attention(model):
            eager_loss = calls.loss(model, patient.row, {})
        difference = abs(patient.loss - eager_loss) / max(abs(eager_loss), 1e-12)
        actual = traces.record_with_kernels(model, patient.probe, traces.recorded_paths(model), kernels)
        divergence = patient.expected_trace.first_divergence(actual)
        not_compared = patient.expected_trace.not_compared(actual)
        if divergence is not None:
            return failed(
                f"{summary}: {divergence.path} is the first whose output differs from eager code by more than rounding; "
                f"relative difference {divergence.relative_difference:.1e}.{not_compared}",
                "Choose eager or another implementation of that seam (kernels), or another model.attention, and report it.",
            )
        if not difference <= tolerance:
            return failed(
                f"{summary}: the loss is {patient.loss:.5f}, and {eager_loss:.5f} by eager code.{not_compared}",
                "Every compared layer agrees, so the difference is in the loss kernel: set kernels.causal_lm_loss: eager.",
            )
        return passed(
            f"{summary}; the loss differs by {difference:.0e} from eager code, no compared layer by more than {tolerance:.0e}."
            + not_compared
        )


class Router(Check):
    """Routers compute in the precision of the run, not below it."""

    name = "router"

    def run(self, patient: Patient) -> Finding:
        paths = sorted({path.rpartition(".")[0] for path in sharding.expert_paths(patient.model)})
        if not paths:
            return not_checked("the model has no experts.")
        if patient.dtype != torch.float32:
            return not_checked(
                f"the run computes in {str(patient.dtype).removeprefix('torch.')}, as its routers then do."
            )
        for path, values in router_outputs(patient, paths):
            if values.numel() >= MIN_VALUES and torch.equal(values, values.bfloat16().float()):
                return failed(
                    f"{path} computes in float32, but all {values.numel()} of its values fit into bfloat16: they were "
                    "rounded on the way, and tokens near a tie go to other experts.",
                    "Remove the cast from the router's forward in the modeling file, or from the code that wraps it.",
                )
        return passed(f"The routers of {len(paths)} layers compute in float32.")


def router_outputs(patient: Patient, experts: list[str]) -> list[tuple[str, Tensor]]:
    """The non-constant fp32 outputs of the modules next to the experts of each layer, and the routing weights passed to the
    experts, with paths."""
    model, outputs = patient.model, []

    def record(path: str, values: Iterable[Any]) -> None:
        for value in values:
            is_fp32 = isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() > 0
            if is_fp32 and bool((value != value.flatten()[0]).any()):
                outputs.append((path, value.detach()))

    def record_output(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        record(path, output if isinstance(output, tuple | list) else [output])

    def record_inputs(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        record(f"the routing of {path}", [*args[1:], *kwargs.values()])

    with contextlib.ExitStack() as hooks:
        for block, experts_path in {path.rpartition(".")[0]: path for path in experts}.items():
            for name, module in model.get_submodule(block).named_children():
                if (path := f"{block}.{name}") != experts_path:
                    hooks.enter_context(module.register_forward_hook(functools.partial(record_output, path)))
            hook = functools.partial(record_inputs, experts_path)
            hooks.enter_context(model.get_submodule(experts_path).register_forward_pre_hook(hook, with_kwargs=True))
        calls.loss(model, patient.row, patient.kernels)
    return outputs
