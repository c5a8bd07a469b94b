"""Which loss of transformers a class has: by its name, compared with transformers' own rule."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from patchgen.anatomy.library_losses import FORMS, LOSS_FILE, forms_in, type_by_name
from patchgen.upstream import open_release

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


FUNCTIONS = {ForCausalLMLoss: "", ForMaskedLMLoss: "aligned"}


def test_the_types_are_those_of_transformers_in_its_order():
    forms = forms_in(open_release().read(LOSS_FILE) or "")
    assert list(forms.items()) == [(key, FUNCTIONS.get(loss)) for key, loss in LOSS_MAPPING.items()]
    assert forms_in("LOSSES = {}") == FORMS  # a release without the table


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_class_gives_the_loss_that_transformers_gives_it(name: str):
    loss = type(name, (PreTrainedModel,), {})(PreTrainedConfig()).loss_function
    forms = forms_in(open_release().read(LOSS_FILE) or "")
    assert forms[type_by_name(name, forms)] == FUNCTIONS.get(loss)
