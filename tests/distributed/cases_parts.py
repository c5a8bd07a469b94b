"""A head whose language model is of another generated file, on ranks; see test_parts.py."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from patchgen.runtime.parts import parts_of
from patchgen.runtime.verify import media_ranks, reference_model
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.small_config import small_config

HEAD = "LlavaForConditionalGeneration"


def compare(folder: str, text_type: str, names: list[str], **layout: object) -> list[dict]:
    """The batches through Llava around a text model of that type: loss and worst gradient against upstream's on one rank."""
    own = reference_model.training_config

    def around(upstream_class: type, given: GivenConfig) -> object:
        config = own(upstream_class, given)
        config.text_config = small_config(text_type).config
        config.text_config.use_cache = False
        return config

    with mock.patch.object(reference_model, "training_config", around):
        reference = reference_model.ReferenceModel(reference_model.find_generated(Path(folder)), HEAD)
    file = next(file.__name__ for _, _, file in parts_of(reference.generated()))
    if not file.endswith(f"modeling_{text_type}"):
        raise AssertionError(f"the language model is of {file}, not of the generated file of {text_type}")
    experts = len(reference.generated().get_parallel_plan().expert_parameters)
    return [media_ranks.compare_case(reference, name, **layout) | {"experts": experts} for name in names]
