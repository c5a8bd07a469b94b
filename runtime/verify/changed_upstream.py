"""Upstream's changed class called as a run calls it: the reference where eager attention is none, and whether it fails as the
generated class does."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from transformers.utils.generic import is_flash_attention_requested

from patchgen.runtime.attention_kinds import Names
from patchgen.runtime.failures import reraise_machine_failure

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from patchgen.runtime.verify.reference_model import ReferenceModel


def set_attention(model: PreTrainedModel, names: Names) -> None:
    model.set_attn_implementation(names if isinstance(names, str) else dict(names))


def raises_too(step: Callable[[], object], error: Exception) -> bool:
    """Whether a step of upstream's model raises the same error: of the same type and message, but for numbers in it."""
    try:
        step()
    except Exception as upstream_error:  # changed code may raise anything
        reraise_machine_failure(upstream_error)
        return type(upstream_error) is type(error) and _without_numbers(upstream_error) == _without_numbers(error)
    return False


def _without_numbers(error: Exception) -> str:
    """The message of an error with N for each number: sizes, versions and addresses depend on the layout."""
    return re.sub(r"0x[0-9a-f]+|\d+", "N", str(error))


@contextlib.contextmanager
def training_attention(upstream: PreTrainedModel, attention: Names) -> Iterator[None]:
    """Upstream's model with the attention of a run, taking the lengths of media as flash attention does.

    A change may be in code that only another attention runs, or in one of two branches of upstream's file.
    """
    module = vars(sys.modules[type(upstream).__module__])
    flash_checks = {name: value for name, value in module.items() if value is is_flash_attention_requested}
    try:
        set_attention(upstream, attention)
        module.update(dict.fromkeys(flash_checks, lambda *_, **__: True))
        yield
    finally:
        upstream.set_attn_implementation("eager")
        module.update(flash_checks)


@contextlib.contextmanager
def training_conditions(reference: ReferenceModel) -> Iterator[None]:
    """Upstream's model with the attention of a run, and with a mask for its router loss."""
    module = vars(sys.modules[type(reference.model).__module__])
    before = {name: module[name] for name in reference.router_functions if inspect.isfunction(module.get(name))}
    module.update({name: _with_mask(function) for name, function in before.items()})
    try:
        with training_attention(reference.model, reference.attention):
            yield
    finally:
        module.update(before)


def _with_mask(function: Callable) -> Callable:
    """A router loss that gets a mask of ones where it gets none, as on a rank that has padding."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def masked(*args: object, **kwargs: object) -> object:
        bound = signature.bind(*args, **kwargs)
        if "attention_mask" in signature.parameters and bound.arguments.get("attention_mask") is None:
            bound.arguments["attention_mask"] = torch.ones(1, len(bound.arguments["gate_logits"][0]), dtype=torch.long)
        return function(*bound.args, **bound.kwargs)

    return masked
