"""Towers are marked wherever they are built, and checks pass slices however they are called."""

from __future__ import annotations

import pytest
from generation_cases import anatomy_of, applied

from patchgen.errors import PassMismatch
from patchgen.passes.fill_back import FillBack, embedding_names

BEFORE = FillBack.EXAMPLES[0].before
TOWER = "self.vision_tower = AutoModel.from_config(config.vision_config)"


def test_a_tower_that_is_built_in_a_branch_is_marked_there():
    branch = f"if config.vision_config is not None:\n            {TOWER}\n        else:\n            self.vision_tower = None"
    written = applied(FillBack(), BEFORE.replace(TOWER, branch)).module.text
    assert written.count("            ops.mark_replicated(self.vision_tower)\n        else:") == 1
    assert written.count("mark_replicated") == 1


def test_a_tower_that_is_built_otherwise_is_missed():
    with pytest.raises(PassMismatch, match="self.vision_tower"):
        applied(FillBack(), BEFORE.replace(TOWER, TOWER.replace(" =", ": nn.Module =")))


def test_upstreams_check_is_known_by_its_import():
    renamed = BEFORE.replace("torch_compilable_check(", "check(")
    for module, is_known in (("transformers.utils", True), ("elsewhere", False)):
        text = f"from {module} import torch_compilable_check as check\n{renamed}"
        assert ("check(ops.is_sliced() or mask.sum()" in applied(FillBack(), text).module.text) == is_known


def test_a_check_by_keyword_lets_slices_pass():
    text = BEFORE.replace("torch_compilable_check(mask", "torch_compilable_check(cond=mask").replace(
        "'no match'", "msg='no match'"
    )
    assert text.count("msg=") == 1
    written = applied(FillBack(), text).module.text
    assert "cond=ops.is_sliced() or mask.sum() == image_features.shape[0], msg='no match'" in written


@pytest.mark.parametrize(
    ("check", "passes"),
    [
        ("count = mask.sum()\n        if count != image_features.size(0):", "count != image_features.size(0)"),
        (
            "rows = image_features.to(inputs_embeds.device)\n        if mask.sum() != len(rows):",
            "mask.sum() != len(rows)",
        ),
        ("if image_features.shape[0] != image_features.numel():", None),  # of features alone, whatever they are called
        ("num_tokens = 3\n        if num_tokens > self.config.most:", None),
        ("if input_ids is None and image_features is None:", None),
    ],
)
def test_a_check_of_what_tokens_say_against_what_they_do_not_lets_slices_pass(check: str, passes: str | None):
    method = f"{check}\n            raise ValueError('no match')\n        return mask"
    text = BEFORE.replace("return mask", method)
    assert text != BEFORE
    written = applied(FillBack(), text).module.text
    assert written.count("not ops.is_sliced() and (") == (passes is not None)
    assert passes is None or f"if not ops.is_sliced() and ({passes}):" in written


@pytest.mark.parametrize(
    "filled",
    [
        "inputs_embeds[mask[..., 0]] = image_features",
        "inputs_embeds = torch.where(mask, image_features[mask.cumsum(1)], inputs_embeds)",
        "inputs_embeds = merge(inputs_embeds, mask, image_features)",
        "inputs_embeds += mask * image_features",
        "inputs_embeds.index_copy_(1, mask, image_features)",
    ],
)
def test_features_that_are_filled_in_by_other_means_refuse_slices(filled: str):
    scatter = "inputs_embeds = inputs_embeds.masked_scatter(mask, image_features)"
    assert scatter in BEFORE
    outcome = applied(FillBack(), BEFORE.replace(scatter, filled))
    assert 'ops.require_whole_sequence("the inputs of this model")' in outcome.module.text
    assert "other means than masked_scatter" in outcome.hits[0].what


def test_embeddings_without_features_are_no_site():
    scatter = "inputs_embeds = inputs_embeds.masked_scatter(mask, image_features)"
    text = BEFORE.replace(scatter, "inputs_embeds = inputs_embeds.to(image_features.dtype)")
    assert not applied(FillBack(), text).hits


def test_features_that_a_method_of_the_model_fills_in_are_a_slices_own():
    scatter = "inputs_embeds = inputs_embeds.masked_scatter(mask, image_features)"
    method = "    def fill(self, rows, mask, found):\n        rows = rows.masked_scatter(mask, found)\n        return rows\n\n"
    text = BEFORE.replace(scatter, "inputs_embeds = self.fill(inputs_embeds, mask, image_features)")
    written = applied(FillBack(), text.replace("    def forward", f"{method}    def forward")).module.text
    assert "rows = rows.masked_scatter(mask, ops.local_features(found, mask))" in written


def test_embeddings_have_each_name_that_they_are_given():
    lines = (
        "rows = inputs_embeds\n        other = mask\n        return self.language_model(inputs_embeds=inputs_embeds)"
    )
    anatomy = anatomy_of(BEFORE.replace("return self.language_model(inputs_embeds=inputs_embeds)", lines))
    forward = anatomy.classes["ExampleModel"].methods["forward"]
    assert embedding_names(anatomy, forward, {"language_model"}) == {"inputs_embeds", "rows"}
