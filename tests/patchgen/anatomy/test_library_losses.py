"""Which loss of transformers a class has: by its name, compared with transformers' own rule."""

from __future__ import annotations

import pytest
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss, ForMaskedLMLoss

from patchgen.anatomy.library_losses import LOSS_FILE, forms_in, type_by_name
from patchgen.errors import Missed
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


TABLE = 'LOSS_MAPPING: dict = {"ForMaskedLM": ForMaskedLMLoss, "ForCTC": ForCTCLoss}\n'


@pytest.mark.parametrize(
    "text",
    [
        "",
        "LOSSES = {}",
        "LOSS_MAPPING = dict(ForMaskedLM=ForMaskedLMLoss)",
        TABLE.replace("{", "{**OTHERS, "),
        TABLE.replace('"ForCTC"', "CTC"),
        f'{TABLE}LOSS_MAPPING["ForCTC"] = ForMaskedLMLoss',
        f"{TABLE}LOSS_MAPPING.update(OTHERS)",
        f"if NEW:\n    {TABLE}",
    ],
)
def test_a_table_that_is_not_read_tells_no_form(text: str):
    """Else a loss of classes would be taken for that of the next token."""
    with pytest.raises(Missed, match="LOSS_MAPPING"):
        forms_in(text)
    assert forms_in(TABLE) == {"ForMaskedLM": "aligned", "ForCTC": None}


@pytest.mark.parametrize("name", NAMES)
def test_the_name_of_a_class_gives_the_loss_that_transformers_gives_it(name: str):
    loss = type(name, (PreTrainedModel,), {})(PreTrainedConfig()).loss_function
    forms = forms_in(open_release().read(LOSS_FILE) or "")
    assert forms[type_by_name(name, forms)] == FUNCTIONS.get(loss)
