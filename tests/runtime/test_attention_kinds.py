"""One attention per kind of layer: chosen by what each asks for, and the numbers are those of one attention for all."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from rounding import require_equal_up_to_rounding
from transformers import AutoModelForCausalLM, Gemma4TextConfig
from transformers.models.llama4.configuration_llama4 import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4ForCausalLM

from patchgen.kernels import choices
from patchgen.runtime import attention, attention_kinds
from patchgen.runtime.attention_backends import BACKENDS
from patchgen.runtime.attention_calls import FLOAT32
from patchgen.runtime.attention_kinds import Kind
from patchgen.runtime.parallel import report
from patchgen.runtime.train import attention_choice, model
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.training_path import prove_training_path

FAST = "patchgen_flash_attention_2"
LENGTHS = torch.tensor([0, 9, 24], dtype=torch.int32)
PACKED = {
    "input_ids": torch.arange(1, 25)[None],
    "position_ids": torch.cat([torch.arange(9), torch.arange(15)])[None],
    "cu_seq_lens_q": LENGTHS,
    "cu_seq_lens_k": LENGTHS,
    "max_length_q": 15,
    "max_length_k": 15,
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    attention.register()


@pytest.fixture(autouse=True)
def anew():
    choices.reset()
    yield
    choices.reset()


@pytest.fixture
def plant(monkeypatch):
    """Makes a fast attention that runs here, by the formula, and cannot do everything; counts its calls by module's heads."""

    def planted(*features: str, max_head: int | None = None) -> Counter:
        calls: Counter = Counter()

        def compute(q, k, v, request):
            assert set(request.features) <= set(features), "a backend gets what it can do and nothing else"
            assert max_head is None or max(q.shape[-1], v.shape[-1]) <= max_head
            calls[request.features, q.shape[-1]] += 1
            return BACKENDS["patchgen_eager"].function(q, k, v, request)

        able = replace(
            BACKENDS[FAST],
            function=compute,
            features=frozenset({*features, FLOAT32}),
            unavailable=lambda: None,
            has_cpu_backward=True,
            max_head=max_head,
        )
        monkeypatch.setitem(BACKENDS, FAST, able)
        attention.register()
        return calls

    yield planted
    monkeypatch.undo()
    attention.register()


def built(config, names):
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=names, experts_implementation="eager"
    )
    return made.eval()


def kinds_in(config, **inputs) -> tuple[Kind, ...]:
    one = built(config, "patchgen_eager")
    with attention.recording() as recorded, torch.no_grad():
        one(**inputs, use_cache=False)
    return attention_kinds.recorded_kinds(one, recorded)


def step(config, names) -> dict[str, torch.Tensor]:
    """Logits and gradients of packed rows."""
    one = built(config, names).train()
    out = one(**PACKED, labels=PACKED["input_ids"], use_cache=False)
    out.loss.backward()
    return {
        "logits": out.logits.detach(),
        **{name: p.grad for name, p in one.named_parameters() if p.grad is not None},
    }


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        require_equal_up_to_rounding(found[name], tensor, what=name, units=256)


# ------------------------------------------------------------------------------------------------ kinds of layers


def test_layers_that_slide_and_layers_with_sinks_are_kinds_of_their_own(plant):
    """gpt_oss asks for sinks in all layers; a window is asked for in half of them."""
    config = small_config("gpt_oss").config
    kinds = kinds_in(config, **PACKED)
    assert kinds == (
        Kind("model.layers.*.self_attn, full_attention", "", ("sinks",)),
        Kind("model.layers.*.self_attn, sliding_attention", "", ("sliding window", "sinks")),
    )
    plant("sliding window")
    assert attention_kinds.choose(kinds, config, device_type="cpu") == "patchgen_eager"
    calls = plant("sinks")
    names = attention_kinds.choose(kinds, config, device_type="cpu")
    assert names == attention.BY_LAYER
    require_equal(step(config, names), step(config, "patchgen_eager"))
    assert set(calls) == {(("sinks",), config.head_dim)}, "layers with a window go elsewhere"
    told = attention_kinds.explain(kinds, names)
    assert f"attention    {FAST}    model.layers.*.self_attn, full_attention (sinks)" in told
    assert "attention    patchgen_eager    model.layers.*.self_attn, sliding_attention (sliding window, sinks)" in told
    assert f"not {FAST}: cannot do sliding window" in told


def test_layers_with_larger_heads_get_another_attention(plant):
    """gemma4's full layers have larger heads than those that slide."""
    config = Gemma4TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=32, sliding_window=4, hidden_size_per_layer_input=0,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0, vocab_size_per_layer_input=40,
    )  # fmt: skip
    places = attention_choice._layer_groups(type(built(config, "eager")), config.to_json_string(use_diff=False))
    kinds = tuple(
        replace(kind, head_size=places[kind.layers].head_size, count=places[kind.layers].count)
        for kind in kinds_in(config, **PACKED)
    )
    assert {kind.layers.partition(", ")[2]: kind.head_size for kind in kinds} == {
        "full_attention": 32,
        "sliding_attention": 16,
    }
    calls = plant("sliding window", max_head=16)
    names = attention_kinds.choose(kinds, config, device_type="cpu")
    assert names == attention.BY_LAYER
    require_equal(step(config, names), step(config, "patchgen_eager"))
    assert {size for _, size in calls} == {16}
    assert f"not {FAST}: cannot do heads of 32" in attention_kinds.explain(kinds, names)
    plant("sliding window", max_head=32)
    assert attention_kinds.choose(kinds, config, device_type="cpu") == FAST, "one that takes all is named as before"


def test_masks_in_chunks_are_drawn_where_other_layers_run_a_flash_kernel(plant):
    """Upstream draws none under a name with `flash` in it."""
    config = Llama4TextConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, attention_chunk_size=4, num_local_experts=2,
        layer_types=["chunked_attention", "full_attention"], no_rope_layers=[1, 0], pad_token_id=0,
    )  # fmt: skip
    calls = plant()
    inputs = {"input_ids": PACKED["input_ids"]}
    kinds = kinds_in(config, **inputs)
    assert [kind.features for kind in kinds] == [("overlays",), ()]
    names = attention_kinds.choose(kinds, config, device_type="cpu")
    logits = {}
    for name in (names, "patchgen_eager"):
        torch.manual_seed(0)
        one = Llama4ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name)
        logits[name] = one.eval()(**inputs, use_cache=False).logits
    require_equal_up_to_rounding(logits[attention.BY_LAYER], logits["patchgen_eager"], what="logits")
    assert sum(calls.values()) == 1


def test_a_tower_beside_a_language_model_has_a_name_of_its_own(plant):
    """By the config that it reads, so that a tower under flash hands over the lengths of its pictures."""
    config = small_config("qwen2_5_vl").config
    text = Kind("model.language_model.layers.*.self_attn", "text_config", ("soft cap",))
    tower = Kind("model.visual.blocks.*.attn", "vision_config", ())
    plant()
    names = attention_kinds.choose((text, tower), config, device_type="cpu")
    assert names == {"": "patchgen_eager", "text_config": "patchgen_eager", "vision_config": FAST}
    head, _ = model.find_head_and_config(config)
    one = head._from_config(copy.deepcopy(config), attn_implementation=names)
    assert one.model.visual.config._attn_implementation == FAST
    assert one.model.language_model.config._attn_implementation == "patchgen_eager"
    assert attention_kinds.named_in(one.config) == names
    same = replace(tower, features=("soft cap",))
    assert attention_kinds.choose((text, same), config, device_type="cpu") == "patchgen_eager"


def test_names_of_configs_within_configs():
    nested = {"": "a", "text_config": {"": "b", "inner": "c"}, "vision_config": "d"}
    found = {
        path: attention_kinds.name_for(nested, path) for path in ("", "text_config", "text_config.inner", "other")
    }
    assert found == {"": "a", "text_config": "b", "text_config.inner": "c", "other": "a"}
    assert (
        attention_kinds._nested({"": "a", "text_config": "b", "text_config.inner": "c", "vision_config": "d"})
        == nested
    )
    assert attention_kinds.all_names(nested) == ("a", "b", "c", "d")


# ----------------------------------------------------------------------------------------------------- in a run


def test_a_run_chooses_by_kind_and_its_proof_runs_what_it_chose(plant):
    head, config = model.find_head_and_config(small_config("gpt_oss").config)
    plant("sinks")
    names = attention_choice.choose(None, head, config)
    assert names == attention.BY_LAYER
    path = prove_training_path(head, head, config, media=False)
    assert not path.failures
    assert (path.attention, path.compared_attention) == (attention.BY_LAYER, attention.BY_LAYER)
    told = attention_choice.explain(head, config, names)
    assert f"attention    {FAST}    1 layer: model.layers.*.self_attn, full_attention (sinks, heads of 16)" in told
    with pytest.raises(RecipeError, match="is unknown. There are: "):
        attention_choice.choose({"": "patchgen_eager", "text_config": "patchgen_eagre"}, head, config)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"text_config": "patchgen_eager"}, r"^model.attention names .* text_config only. To fix: add an entry \"\""),
        (
            {"": "patchgen_eager", "text_config": {"inner": "patchgen_eager"}},
            r"^model.attention.text_config names .* inner",
        ),
        ({}, "^model.attention names the attention of no config only"),
        ({"": "patchgen_eager", "text_config": "eagre"}, "^model.attention.text_config = 'eagre' is unknown"),
        ({"": {"": 3}}, r'^model.attention\[""\]\[""\] = 3 is unknown'),
        ({"": "patchgen_flash_attention_4"}, r'^model.attention\[""\] = .* cannot run here'),
    ],
)
def test_a_mapping_of_attention_is_refused_by_its_key(names, told, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RecipeError, match=told):
        attention_choice.require_available(names)


def test_what_the_report_of_a_start_says(plant):
    """The live model's names, and for each kind of layer what serves it and why nothing faster does."""
    plant("sinks")
    recipe = from_dict({"model": {"source": "gpt_oss", "attention": attention.BY_LAYER}, "data": {}})
    kinds = model._attention_by_layer(recipe)
    assert f"{FAST}    18 layers: model.layers.*.self_attn, full_attention (sinks, float32, heads of 64)" in kinds
    one = model.build_on_meta(recipe)
    text = report.describe(one, None, attention_kinds=kinds)
    assert f"attention        {attention.BY_LAYER}" in text and "36 GptOssAttention" in text
    assert "    not patchgen_flash_attention_2: cannot do sliding window" in "\n".join(text.split("  attention    "))
    named = from_dict({"model": {"source": "gpt_oss", "attention": "patchgen_eager"}, "data": {}})
    assert model._attention_by_layer(named) == "", "one name for all is told in the line of the attention"


def test_what_each_call_took_is_told_after_a_step(plant):
    plant("sinks")
    config = small_config("gpt_oss").config
    step(config, attention.BY_LAYER)
    lines = report.auto_choices().splitlines()
    assert [line for line in lines if f"auto took {FAST} in GptOssAttention, sinks for [16]" in line]
    assert [line for line in lines if "auto took patchgen_eager in GptOssAttention, sliding window, sinks for" in line]
    choices.reset()
    step(config, "patchgen_eager")
    assert report.auto_choices() == "", "what was named is not told as chosen"


def test_layers_that_a_small_form_did_not_run_are_taken_to_ask_for_everything_that_others_do():
    head, config = model.find_head_and_config(small_config("qwen2_5_vl").config)
    text = Kind("model.language_model.layers.*.self_attn, full_attention", "text_config", ("soft cap",))
    kinds = attention_choice.kinds_of(head, config, (text,))
    assert {kind.config: kind.features for kind in kinds} == {
        "text_config": ("soft cap",),
        "vision_config": ("soft cap",),
    }


def test_the_choice_compiles_into_one_graph(plant):
    plant("sinks")
    config = small_config("gpt_oss").config
    layer = built(config, attention.BY_LAYER).model.layers[0].self_attn
    rows = torch.randn(1, 6, config.hidden_size)
    places = (torch.ones(1, 6, config.head_dim // 2), torch.zeros(1, 6, config.head_dim // 2))
    eager = layer(rows, position_embeddings=places, attention_mask=None)[0]
    found = torch.compile(layer, backend="eager", fullgraph=True)(
        rows, position_embeddings=places, attention_mask=None
    )[0]
    require_equal_up_to_rounding(found, eager, what="compiled", units=16)
