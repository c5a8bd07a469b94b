"""Sequence classifiers over generated models: what is exported loads in plain transformers and scores alike.

Upstream's classifiers that add something to the generic one are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from rounding import require_equal_up_to_rounding
from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

from patchgen.runtime import attention, registry
from patchgen.runtime.checkpoint import export_pretrained, load_pretrained
from patchgen.runtime.objectives.heads import UnknownHeadError, head_of, head_over
from patchgen.runtime.verify.small_config import small_config


def heads() -> list[tuple[str, str]]:
    """The generated heads for whose config transformers has a sequence classifier."""
    served = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING._model_mapping)
    return [
        (one.name, head) for one in registry.generated_models() for head in one.heads if set(one.model_types) & served
    ]


@pytest.mark.parametrize(("name", "head"), heads())
def test_exports_load_in_plain_transformers_or_the_head_is_refused(name, head, tmp_path):
    attention.register()
    causal = getattr(registry.find_model(name).load(), head)
    config = copy.deepcopy(small_config(causal.config_class).config)
    config.num_labels = 3
    upstream = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    if "forward" in vars(upstream):
        with pytest.raises(UnknownHeadError, match=f"{upstream.__name__} overrides forward"):
            head_over("classification", causal, config)
        return
    kind = head_over("classification", causal, config)
    torch.manual_seed(0)
    start = causal._from_config(copy.deepcopy(config), dtype=torch.float32)
    export_pretrained(start, tmp_path / "causal")
    model = kind._from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    told = load_pretrained(
        model, tmp_path / "causal", allow_missing=model.new_weights, allow_unexpected=model.causal_only
    )
    assert list(told.initialised) == ["score.weight"] and head_of(model) is model.score
    export_pretrained(model, tmp_path / "scores")
    plain, told = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "scores", output_loading_info=True, attn_implementation="eager", dtype=torch.float32
    )
    assert type(plain).__module__.startswith("transformers.") and not any(told.values()), told
    ids = torch.randint(3, config.get_text_config().vocab_size, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        require_equal_up_to_rounding(model(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)
