"""Refactorings of upstream that change what a pass may take for granted: refused, left alone, or told to a run on ranks."""

from __future__ import annotations

import functools

import pytest
from generation_cases import anatomy_of, default_config, edited, load

from patchgen import pipeline, source
from patchgen.anatomy import Role, study
from patchgen.anatomy.towers import is_divided
from patchgen.errors import PassMismatch
from patchgen.model_configs import config_for

DOUBLED = "def doubled(function):\n    return lambda *args: 2 * function(*args)\n\n\n"
OTHER_NORM = "def softer(self, x):\n    return x\n\n\n"
ROTATE = "def rotate_half(x):"
APPLY = '@use_kernel_forward_from_hub("rotary_pos_emb")\ndef apply_rotary'
NORM = "class Gemma3RMSNorm(nn.Module):"
CONVOLVED = "            hidden_states = causal_conv1d_fn(hidden_states, self.conv.weight.squeeze(1), self.conv.bias, **kwargs)\n"
BLOCK = "        hidden_states = hidden_states + self.mlp(self.norm2(hidden_states))\n"
PROJECTED = "        attn_output = self.proj(attn_output)\n"
IN_LOOP = "            if layer_num in self.deepstack_visual_indexes:\n"
MERGED = "        x = self.linear_fc2(self.act_fn(self.linear_fc1(x)))\n        return x\n"
CHUNKS = "        padded_embed = nn.functional.gelu(self.conv2(padded_embed)).transpose(1, 2)\n"
BUILT = "        self.vocab_size = config.vocab_size\n        self.lm_head"
MEAN = "hidden_states = hidden_states - hidden_states.mean(0, keepdim=True)\n"
INTERFACE = "        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface("
ROUTED = "        final_hidden_states = self.experts("
PENALTY = ((ROUTED, "        penalty = self.experts.gate_up_proj.norm()\n" + ROUTED),)
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
    ("gemma3", "a helper replaced below its class", ((ROTATE, OTHER_NORM + "Gemma3RMSNorm._norm = softer\n\n\n" + ROTATE),), "Gemma3RMSNorm: a norm of another formula"),
    ("gemma3", "a helper replaced by setattr", ((ROTATE, OTHER_NORM + 'setattr(Gemma3RMSNorm, "_norm", softer)\n\n\n' + ROTATE),), "Gemma3RMSNorm: a norm of another formula"),
    ("llama", "a wrapped rotation", ((ROTATE, DOUBLED + "@doubled\n" + ROTATE),), "apply_rotary_pos_emb: a rotary embedding of another formula"),
    ("llama", "a rotation replaced below", ((APPLY, "rotate_half = torch.neg\n\n\n" + APPLY),), "apply_rotary_pos_emb: a rotary embedding of another formula"),
    ("llama", "a rotation wrapped below", ((APPLY, DOUBLED + "rotate_half = doubled(rotate_half)\n\n\n" + APPLY),), "apply_rotary_pos_emb: a rotary embedding of another formula"),
    ("llama", "torch's attention by a local name", ((INTERFACE, "        attend = nn.functional.scaled_dot_product_attention\n        value_states = attend(query_states, key_states, value_states)\n" + INTERFACE),), "calls nn.functional.scaled_dot_product_attention itself"),
    ("llama", "torch's attention from a table", (("def repeat_kv(", 'ATTEND = {"sdpa": torch.nn.functional.scaled_dot_product_attention}\n\n\ndef repeat_kv('), (INTERFACE, '        value_states = ATTEND["sdpa"](query_states, key_states, value_states)\n' + INTERFACE)), "calls torch.nn.functional.scaled_dot_product_attention itself"),
    ("qwen3_moe", "a penalty of stacks", PENALTY, "Qwen3MoeSparseMoeBlock reads self.experts.gate_up_proj, of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a penalty by another name", ((ROUTED, "        stacks = self.experts\n        penalty = stacks.down_proj.norm()\n" + ROUTED),), "reads stacks.down_proj, of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a penalty of all parameters", ((ROUTED, "        penalty = sum(p.norm() for p in self.experts.parameters())\n" + ROUTED),), "reads self.experts.parameters, of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a penalty of a layer", (("        hidden_states = self.mlp(hidden_states)\n", "        penalty = sum(p.norm() for p in self.mlp.parameters())\n        hidden_states = self.mlp(hidden_states)\n"),), "Qwen3MoeDecoderLayer reads self.mlp.parameters, of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a stack by its path", ((ROUTED, '        penalty = self.get_parameter("experts.gate_up_proj").norm()\n' + ROUTED),), "Qwen3MoeSparseMoeBlock reads self.get_parameter, of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a stack by a computed name", ((ROUTED, "        penalty = getattr(self.experts, self.stack).norm()\n" + ROUTED),), "reads getattr(self.experts, self.stack), of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a stack by a getter", (("import torch\n", "import operator\n\nimport torch\n"), (ROUTED, '        penalty = operator.attrgetter("experts.gate_up_proj")(self).norm()\n' + ROUTED)), "reads operator.attrgetter('experts.gate_up_proj'), of which a rank would hold a part: not expert-parallel"),
    ("qwen3_moe", "a stack by its module's dictionary", ((ROUTED, '        penalty = vars(self.experts)["_parameters"]["down_proj"].norm()\n' + ROUTED),), "reads vars(self.experts), of which a rank would hold a part: not expert-parallel"),
    ("qwen3_vl", "another formula of grids by another name", ((ENCODED, ENCODED.replace("image_grid_thw", "grids")), (SIZES, SIZES.replace("image_grid_thw", "grids").replace("2)", "2 + 2)"))), "grids.prod(-1) // self.visual.spatial_merge_size ** 2 + 2 is not the features of each grid"),
    ("qwen3_vl", "sizes that merge by the sides of a patch", (("split_sizes = " + SIZES, "merge = self.visual.patch_size[0] * self.visual.patch_size[1]\n        split_sizes = (image_grid_thw.prod(-1) // merge).tolist()"),), "image_grid_thw.prod(-1) // merge is not the features of each grid"),
    ("qwen3_vl", "sizes with a number added", ((SIZES, SIZES.replace("2)", "2 + 2)")),), "image_grid_thw.prod(-1) // self.visual.spatial_merge_size ** 2 + 2 is not the features of each grid"),
    ("qwen3_vl", "sizes that merge frames", ((SIZES, SIZES.replace("spatial", "temporal")),), "image_grid_thw.prod(-1) // self.visual.temporal_merge_size ** 2 is not the features of each grid"),
    ("qwen3_vl", "sizes of frames", ((SIZES, SIZES.replace("thw.prod", "thw[:, 1:].prod")),), "image_grid_thw[:, 1:].prod(-1) // self.visual.spatial_merge_size ** 2 is not the features of each grid"),
    ("qwen3_vl", "a block that mixes patches", ((BLOCK, BLOCK + "        " + MEAN),), "Qwen3VLVisionModel is computed whole"),
    ("qwen3_vl", "an attention that mixes patches", ((PROJECTED, "        attn_output = attn_output + attn_output.flip(0)\n" + PROJECTED),), "Qwen3VLVisionModel is computed whole"),
    ("qwen3_vl", "a loop that mixes patches", ((IN_LOOP, "            " + MEAN + IN_LOOP),), "Qwen3VLVisionModel is computed whole"),
    ("qwen3_vl", "a merger in the loop that mixes groups", ((MERGED, MERGED.replace("return x", "return x - x.mean(0)")),), "Qwen3VLVisionModel is computed whole"),
    ("qwen2_5_vl", "an attention that divides by its length", ((PROJECTED, "        attn_output = attn_output / len(attn_output)\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen3_vl", "a loop that changes rows in place", ((IN_LOOP, "            hidden_states.sub_(hidden_states.mean(0))\n" + IN_LOOP),), "Qwen3VLVisionModel is computed whole"),
)  # fmt: skip
# Of the same rules; each reads a large file anew.
MORE = (
    ("qwen3_vl", "an MLP that mixes patches", (("        return self.linear_fc2(self.act_fn(self.linear_fc1(hidden_state)))", "        hidden_state = hidden_state / hidden_state.abs().amax(0)\n        return self.linear_fc2(self.act_fn(self.linear_fc1(hidden_state)))"),), "Qwen3VLVisionModel is computed whole"),
    ("qwen3_vl", "an attention that counts patches", ((PROJECTED, "        attn_output = attn_output / seq_length\n" + PROJECTED),), "Qwen3VLVisionModel is computed whole"),
    ("qwen2_5_vl", "an attention that reads one patch", ((PROJECTED, "        attn_output = attn_output - attn_output[:1]\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen2_5_vl", "an attention that rolls patches", ((PROJECTED, "        attn_output = torch.cat([attn_output[1:], attn_output[:1]])\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen2_5_vl", "an attention that multiplies patches", ((PROJECTED, "        attn_output = attn_output @ (attn_output.T @ attn_output)\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen2_5_vl", "an attention that turns patches", ((PROJECTED, "        attn_output = attn_output.transpose(0, 1).reshape(seq_length, -1)\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen2_5_vl", "an attention that reads rows in another form", ((PROJECTED, "        attn_output = attn_output.reshape(-1, seq_length).reshape(seq_length, -1)\n" + PROJECTED),), "Qwen2_5_VisionTransformerPretrainedModel is computed whole"),
    ("qwen3_vl", "a loop that mixes rows under another name", ((IN_LOOP, "            other = hidden_states.roll(1, 0)\n            hidden_states = other\n" + IN_LOOP),), "Qwen3VLVisionModel is computed whole"),
)  # fmt: skip


@functools.cache
def upstream(model: str):
    return load(model)


def changed(model: str, edits: tuple[tuple[str, str], ...]):
    """Upstream's file, as it is where there are no edits."""
    return edited(upstream(model), *edits) if edits else upstream(model)


@pytest.mark.parametrize(
    ("model", "title", "edits", "note"),
    [
        pytest.param(*case, id=f"{case[0]}: {case[1]}", marks=marks)
        for cases, marks in ((LEFT, ()), (MORE, pytest.mark.slow))
        for case in cases
    ],
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


QUERIES = "        query_states = query_states.transpose(0, 1).unsqueeze(0)\n"
MERGERS = "                Qwen3VLVisionPatchMerger(\n"


@pytest.mark.parametrize(
    ("edit", "divided"),
    [
        ((PROJECTED, "        attn_output = attn_output.mul(2)\n" + PROJECTED), True),
        ((PROJECTED, "        attn_output = attn_output.div(seq_length)\n" + PROJECTED), False),
        ((PROJECTED, "        attn_output = attn_output / cu_seqlens.numel()\n" + PROJECTED), False),
        ((PROJECTED, "        attn_output = attn_output - sum(attn_output)\n" + PROJECTED), False),
        ((PROJECTED, "        attn_output = nn.functional.layer_norm(attn_output, attn_output.shape)\n" + PROJECTED), False),
        ((PROJECTED, "        attn_output = attn_output.where(attn_output)\n" + PROJECTED), False),
        ((QUERIES, "        query_states = query_states.transpose(0, 1)\n        query_states = query_states.reshape(seq_length, self.num_heads, -1)\n" + QUERIES), False),
        ((MERGERS, MERGERS.replace("Qwen3VLVisionPatchMerger", "nn.BatchNorm1d")), False),
    ],
    ids=["times a number", "divided by the number of rows", "divided by a count of lengths", "a builtin sum over rows", "a norm over rows", "where with a condition alone", "queries read as other rows", "a batch norm as merger"],
)  # fmt: skip
@pytest.mark.sampled(3)
def test_a_tower_is_divided_only_where_all_that_it_does_keeps_rows_apart(edit: tuple[str, str], divided: bool):
    one = edited(upstream("qwen3_vl"), edit)
    anatomy = study(source.parse(one.text, one.path), one)
    assert is_divided(anatomy, anatomy.classes["Qwen3VLVisionModel"]) is divided


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
def test_a_second_convolution_along_the_sequence_is_refused(edit: str):
    with pytest.raises(PassMismatch, match="every operation along the sequence in a call of its own name"):
        pipeline.generate(edited(upstream("lfm2"), (CONVOLVED, edit)), default_config("lfm2"))


@pytest.mark.parametrize("mixed", ["padded_embed.mean(0)", "padded_embed.roll(1, 0)", "len(padded_embed)"])
@pytest.mark.sampled(3)
def test_chunks_of_sound_that_are_mixed_are_convolved_whole(mixed: str):
    def text(*edits) -> str:
        return pipeline.generate(changed("qwen2_5_omni", edits), config_for("qwen2_5_omni")).text

    assert "ops.chunk_rows" in text() and "ops.chunk_rows" not in text(
        (CHUNKS, CHUNKS + f"        padded_embed = padded_embed - {mixed}\n")
    )


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


def test_experts_that_others_read_are_not_divided():
    generated = pipeline.generate(changed("qwen3_moe", PENALTY), default_config("qwen3_moe"))
    named = "Qwen3MoeSparseMoeBlock reads self.experts.gate_up_proj, of which a rank would hold a part"
    assert "experts={}" in generated.text and f'"Qwen3MoeExperts": "{named}"' in generated.text


def test_shared_experts_beside_the_exchange_keep_their_keyword_argument():
    call = "self.shared_experts({})"
    edits = ((call.format("residuals"), call.format("x=residuals")),)
    generated = pipeline.generate(changed("deepseek_v3", edits), default_config("deepseek_v3"))
    assert "ops.beside_experts(lambda: self.shared_experts(x=residuals))" in generated.text


def test_a_dispatcher_by_another_name_is_refused():
    name = "use_experts_implementation"
    edits = ((f"import {name}", f"import {name} as dispatched"), (f"@{name}", "@dispatched"))
    with pytest.raises(PassMismatch, match=f"decorator by its name, @{name}"):
        pipeline.generate(changed("qwen3_moe", edits), default_config("qwen3_moe"))


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
