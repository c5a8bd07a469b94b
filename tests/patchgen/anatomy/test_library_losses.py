"""Which loss of transformers a class has: by its name, compared with transformers' own rule."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from patchgen.anatomy.library_losses import FORMS, KEYS, type_by_name

NAMES = (
    *LOSS_MAPPING,
    *(f"Own{key}" for key in LOSS_MAPPING),
    *(
        "XTTSForConditionalGeneration",
        "OwnForTDT",
        "OwnForRNNT",
        "OwnForInstanceSegmentation",
        "OwnForSegmentationForCTC",
    ),
    *("OwnLMHeadModel", "ForMaskedLMAndForCausalLM"),
)


def test_the_keys_are_those_of_transformers():
    assert list(LOSS_MAPPING) == list(KEYS)
    shifts = {key: {ForCausalLMLoss: "", ForMaskedLMLoss: "aligned"}.get(loss) for key, loss in LOSS_MAPPING.items()}
    assert {key: form for key, form in shifts.items() if form is not None} == FORMS


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_class_gives_the_loss_that_transformers_gives_it(name: str):
    loss = type(name, (PreTrainedModel,), {})(PreTrainedConfig()).loss_function
    form = {ForCausalLMLoss: "", ForMaskedLMLoss: "aligned"}.get(loss)
    assert FORMS.get(type_by_name(name)) == form
