"""What the generator's tests share: upstream objects of a given text, edits that must apply, the hits of a run."""

from __future__ import annotations

import ast
import textwrap
from dataclasses import replace

from patchgen import pipeline, source, upstream
from patchgen.anatomy import Anatomy, study
from patchgen.config_classes import ConfigClass, SubConfig
from patchgen.errors import EmissionError, PassMismatch
from patchgen.model_configs import ModelConfig
from patchgen.passes.absolute_imports import AbsoluteImports
from patchgen.passes.base import Outcome, Pass
from patchgen.source import bound_names
from patchgen.upstream import Upstream

EXAMPLE_CONFIGS = {
    "ExampleConfig": ConfigClass(
        "ExampleConfig",
        "example",
        {"text_config": SubConfig("ExampleTextConfig"), "any_config": SubConfig("AutoConfig")},
    ),
    "ExampleTextConfig": ConfigClass("ExampleTextConfig", "example_text"),
}


def written(text: str, **facts: object) -> Upstream:
    """An upstream file of that text, as if it stood in transformers/models/example."""
    facts.setdefault("configs", EXAMPLE_CONFIGS)
    return Upstream(
        model="example",
        text=textwrap.dedent(text),
        origin="a test",
        version=None,
        module="transformers.models.example.modeling_example",
        path="transformers/models/example/modeling_example.py",
        **facts,
    )


def applied(kind: Pass, text: str, **facts: object) -> Outcome:
    """The outcome of one pass on a text."""
    origin = written(text, **facts)
    return kind.apply(source.parse(origin.text, origin.path), anatomy_of(text, **facts))


def anatomy_of(text: str, **facts: object) -> Anatomy:
    origin = written(text, **facts)
    return study(source.parse(_with_imports(origin.text), origin.path), origin)


# What a short text may leave out.
IMPORTS = {
    "torch": "import torch",
    "nn": "from torch import nn",
    "F": "import torch.nn.functional as F",
    "ACT2FN": "from transformers.activations import ACT2FN",
    "AutoModel": "from transformers import AutoModel",
    "is_flash_attention_requested": "from transformers.modeling_flash_attention_utils import is_flash_attention_requested",
    "ALL_ATTENTION_FUNCTIONS": "from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS",
    "use_experts_implementation": "from transformers.integrations import use_experts_implementation",
    "accepts_precomputed_kwargs": "from transformers.utils.generic import accepts_precomputed_kwargs",
    "auto_docstring": "from transformers.utils import auto_docstring",
    "torch_compilable_check": "from transformers.utils import torch_compilable_check",
    "GenerationMixin": "from transformers import GenerationMixin",
    "CausalLMOutputWithPast": "from transformers.modeling_outputs import CausalLMOutputWithPast",
}


def _with_imports(text: str) -> str:
    """The text with the usual imports of what it reads and does not bind; below it, so that lines keep their numbers."""
    tree = ast.parse(text)
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = sorted(read - {name for statement in tree.body for name in bound_names(statement)})
    lines = [IMPORTS[name] for name in missing if name in IMPORTS]
    lines += [f"from transformers import {name}" for name in missing if name.endswith("PreTrainedModel")]
    return "\n".join([text, *lines, ""])


def with_absolute_imports(origin: Upstream) -> str:
    """An upstream text after the one pass that every file needs, and nothing else."""
    module = source.parse(origin.text, origin.path)
    return AbsoluteImports().apply(module, study(module, origin)).module.text


def edited(origin: Upstream, *edits: tuple[str, str]) -> Upstream:
    """The upstream with its text edited; an edit whose text is not there would test nothing, so it is an error."""
    text = origin.text
    for old, new in edits:
        assert old in text, f"the edit does not apply to {origin.path}: {old!r}"
        text = text.replace(old, new)
    assert text != origin.text
    return replace(origin, text=text)


def hits_of(generated: pipeline.Generated) -> dict[str, tuple[int, int]]:
    """Pass -> (hits, sites that upstream serves)."""
    return {step.name: (len(step.outcome.hits), len(step.outcome.upstream)) for step in generated.steps}


def default_config(model: str) -> ModelConfig:
    """A config that states nothing, so that a test sees what the passes themselves notice."""
    roots = {"qwen3_omni_moe": ("Qwen3OmniMoeThinkerForConditionalGeneration",)}
    return ModelConfig(model=model, roots=roots.get(model, ()))


def refused_or_hits(origin: Upstream, config: ModelConfig | None = None) -> dict[str, tuple[int, int]] | Exception:
    """The hits, or the refusal: a pass that missed, or a result that would not stand alone."""
    try:
        return hits_of(pipeline.generate(origin, config))
    except (PassMismatch, EmissionError) as error:
        return error


def load(model: str) -> Upstream:
    return upstream.load(model)
