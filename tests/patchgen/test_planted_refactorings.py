"""Refactorings of upstream that change what a pass may take for granted: refused, left alone, or told to a run on ranks."""

from __future__ import annotations

import functools

import pytest
from generation_cases import anatomy_of, default_config, edited, load

from patchgen import pipeline
from patchgen.anatomy import Role

DOUBLED = "def doubled(function):\n    return lambda *args: 2 * function(*args)\n\n\n"
ROTATE = "def rotate_half(x):"
NORM = "class Gemma3RMSNorm(nn.Module):"
CONVOLVED = "            hidden_states = causal_conv1d_fn(hidden_states, self.conv.weight.squeeze(1), self.conv.bias, **kwargs)\n"

BUILT = "        self.vocab_size = config.vocab_size\n        self.lm_head"
INTERFACE = "        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface("
SIZES = "(image_grid_thw.prod(-1) // self.visual.spatial_merge_size**2).tolist()"
ENCODED = """        image_grid_thw: torch.LongTensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple | BaseModelOutputWithDeepstackFeatures:
        pixel_values = pixel_values.type(self.visual.dtype)
        vision_output: BaseModelOutputWithDeepstackFeatures = self.visual(
            pixel_values, grid_thw=image_grid_thw,"""
# model, title, edits, what the note says
LEFT = (
    ("gemma3", "a wrapped helper of a norm", ((NORM, DOUBLED + NORM), ("    def _norm(self, x):", "    @doubled\n    def _norm(self, x):")), "Gemma3RMSNorm: a norm of another formula"),
    ("llama", "a wrapped rotation", ((ROTATE, DOUBLED + "@doubled\n" + ROTATE),), "apply_rotary_pos_emb: a rotary embedding of another formula"),
    ("llama", "torch's attention by a local name", ((INTERFACE, "        attend = nn.functional.scaled_dot_product_attention\n        value_states = attend(query_states, key_states, value_states)\n" + INTERFACE),), "calls nn.functional.scaled_dot_product_attention itself"),
    ("llama", "torch's attention from a table", (("def repeat_kv(", 'ATTEND = {"sdpa": torch.nn.functional.scaled_dot_product_attention}\n\n\ndef repeat_kv('), (INTERFACE, '        value_states = ATTEND["sdpa"](query_states, key_states, value_states)\n' + INTERFACE)), "calls torch.nn.functional.scaled_dot_product_attention itself"),
    ("qwen3_vl", "another formula of grids by another name", ((ENCODED, ENCODED.replace("image_grid_thw", "grids")), (SIZES, SIZES.replace("image_grid_thw", "grids").replace("2)", "2 + 2)"))), "grids.prod(-1) // self.visual.spatial_merge_size ** 2 + 2 is not the features of each grid"),
    ("qwen3_vl", "sizes that merge by the sides of a patch", (("split_sizes = " + SIZES, "merge = self.visual.patch_size[0] * self.visual.patch_size[1]\n        split_sizes = (image_grid_thw.prod(-1) // merge).tolist()"),), "image_grid_thw.prod(-1) // merge is not the features of each grid"),
    ("qwen3_vl", "sizes with a number added", ((SIZES, SIZES.replace("2)", "2 + 2)")),), "image_grid_thw.prod(-1) // self.visual.spatial_merge_size ** 2 + 2 is not the features of each grid"),
    ("qwen3_vl", "sizes that merge frames", ((SIZES, SIZES.replace("spatial", "temporal")),), "image_grid_thw.prod(-1) // self.visual.temporal_merge_size ** 2 is not the features of each grid"),
    ("qwen3_vl", "sizes of frames", ((SIZES, SIZES.replace("thw.prod", "thw[:, 1:].prod")),), "image_grid_thw[:, 1:].prod(-1) // self.visual.spatial_merge_size ** 2 is not the features of each grid"),
)  # fmt: skip


@functools.cache
def upstream(model: str):
    return load(model)


def changed(model: str, edits: tuple[tuple[str, str], ...]):
    """Upstream's file, as it is where there are no edits."""
    return edited(upstream(model), *edits) if edits else upstream(model)


@pytest.mark.parametrize(
    ("model", "title", "edits", "note"),
    [pytest.param(*case, id=f"{case[0]}: {case[1]}") for case in LEFT],
)
@pytest.mark.sampled(3)
def test_what_is_not_known_is_left_alone_with_a_note(model: str, title: str, edits, note: str):
    generated = pipeline.generate(edited(upstream(model), *edits), default_config(model))
    notes = [one for step in generated.steps for one in step.outcome.notes]
    assert any(note in one for one in notes), notes


@pytest.mark.parametrize(
    ("edit", "form"),
    [
        ((BUILT, f'        self.loss_type = "ForMaskedLM"\n{BUILT}'), '"aligned"'),
        ((BUILT, f'        self.loss_type = "ForCausalLM"\n{BUILT}'), None),
        ((BUILT, f"        self.loss_type = None\n{BUILT}"), None),
    ],
    ids=["masked", "causal", "none"],
)
def test_the_library_loss_that_a_head_names_decides_which_labels_it_takes(edit: tuple[str, str], form: str | None):
    text = pipeline.generate(edited(upstream("llama"), edit), default_config("llama")).text
    assert (f"loss_form = {form}" in text) if form else ("loss_form" not in text)


def test_a_head_that_names_no_loss_takes_that_of_its_class_name():
    """Labels that are read above the logits may become inputs, as a decoder's do; a check of their shape reads no value."""
    check = "        if labels is not None and labels.shape != input_ids.shape:\n            raise ValueError\n"
    logits = "        logits = self.lm_head(outputs.last_hidden_state)\n"
    one = edited(upstream("eurobert"), (logits, check + logits))
    text = pipeline.generate(one, default_config("eurobert")).text
    assert check in text and 'loss_form = "aligned"' in text


@pytest.mark.parametrize(
    "edit",
    [
        CONVOLVED + "            C = F.conv1d(C, self.conv.weight, padding=1, groups=C.shape[1])\n",
        CONVOLVED + "            C = self.conv(C)\n",
        CONVOLVED + "            convolve = F.conv1d\n            C = convolve(C, self.conv.weight, padding=1)\n",
        CONVOLVED + "            convolve = self.conv\n            C = convolve(C)\n",
        CONVOLVED
        + "            convolve = causal_conv1d_fn\n            C = convolve(C, self.conv.weight.squeeze(1))\n",
    ],
    ids=[
        "torch's function",
        "the module",
        "torch's function by another name",
        "the module by another name",
        "the same function by another name",
    ],
)
@pytest.mark.sampled(5)
def test_a_second_convolution_along_the_sequence_refuses_slices(edit: str):
    text = pipeline.generate(edited(upstream("lfm2"), (CONVOLVED, edit)), default_config("lfm2")).text
    assert 'ops.refuse_slices("Lfm2ShortConv")' in text


def test_videos_that_a_decorator_changes_are_not_encoded_with_images():
    decorated = '    @accepts_precomputed_kwargs(modality="video")\n'
    model = "@auto_docstring\nclass Qwen3VLModel("
    plain, wrapped = (
        pipeline.generate(changed("qwen3_vl", edits), default_config("qwen3_vl")).text
        for edits in ((), ((model, DOUBLED + model), (decorated, "    @doubled\n" + decorated)))
    )
    assert "ops.encode_vision" in plain and "ops.encode_vision" not in wrapped


def test_a_count_of_placeholders_is_known_by_where_it_stands():
    count = "n_image_tokens * inputs_embeds.shape[-1] == image_features.numel(),"
    other = "special_image_mask.sum() == len(image_features),"
    generated = pipeline.generate(edited(upstream("qwen3_vl"), (count, other)), default_config("qwen3_vl"))
    assert f"ops.is_sliced() or {other}" in generated.text


def test_shared_experts_beside_the_exchange_keep_their_keyword_argument():
    call = "self.shared_experts({})"
    edits = ((call.format("residuals"), call.format("x=residuals")),)
    generated = pipeline.generate(changed("deepseek_v3", edits), default_config("deepseek_v3"))
    assert "ops.beside_experts(lambda: self.shared_experts(x=residuals))" in generated.text


def test_a_dispatcher_by_another_name_asks_our_register():
    name = "use_experts_implementation"
    edits = ((f"import {name}", f"import {name} as dispatched"), (f"@{name}", "@dispatched"))
    generated = pipeline.generate(changed("qwen3_moe", edits), default_config("qwen3_moe"))
    assert "@dispatched(experts_interface=ops.experts_interface)" in generated.text


ATTENTION = """
class ExampleAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.q_proj = nn.Linear(4, 4)

    def scaled_dot_product_attention(self, x):
        return x

    def forward(self, x):
        return {call}
"""


@pytest.mark.parametrize(
    ("top", "call", "reason"),
    [
        ("", "self.scaled_dot_product_attention(x)", None),
        ("import torch.nn.functional as G", "G.scaled_dot_product_attention(x, x, x)", "calls torch's"),
        ("from torch.nn.functional import scaled_dot_product_attention as attend", "attend(x, x, x)", "calls torch's"),
        ("from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as TABLE", 'TABLE["sdpa"](x)', "interface"),
        ("ALL_ATTENTION_FUNCTIONS = {}", 'ALL_ATTENTION_FUNCTIONS["sdpa"](x)', None),
    ],
)
def test_attention_is_what_a_name_stands_for(top: str, call: str, reason: str | None):
    roles = anatomy_of(top + ATTENTION.format(call=call)).classes["ExampleAttention"].roles
    assert (reason or "") in roles.get(Role.ATTENTION, "") and (Role.ATTENTION in roles) == (reason is not None)
