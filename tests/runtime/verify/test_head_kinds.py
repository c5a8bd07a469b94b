"""Which kind of head a class of upstream is."""

from __future__ import annotations

import pytest

from patchgen.runtime.verify import head_kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("SeamlessM4TModel", head_kinds.CONDITIONAL),  # with a head, labels and a loss, though AutoModel builds it
        ("SeamlessM4Tv2Model", head_kinds.CONDITIONAL),
        ("T5ForConditionalGeneration", head_kinds.CONDITIONAL),
        ("T5Model", head_kinds.BASE),
        ("Blip2Model", head_kinds.BASE),  # takes labels and tokens of a decoder, and hands on the outputs of its parts
        ("ParakeetForRNNT", head_kinds.BASE),  # its labels are of a transducer
        ("Gemma3Model", head_kinds.BASE),  # takes labels and returns no loss
        ("Llama4ForConditionalGeneration", None),
        ("BertForTokenClassification", head_kinds.TOKEN),
    ],
)
def test_the_kind_is_that_of_the_labels_that_a_class_takes(name: str, kind: str | None):
    assert head_kinds.kind_of(name) == kind
