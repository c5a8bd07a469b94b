"""The first step of `patchgen train` on two ranks against one: loss and gradient norm, of a small form of each committed model.

By the trainer, with what a run does before its first step: the decisions on attention and documents, the checks of slices and of
routers, weights from a checkpoint, packing. Comparisons of the model alone take none of these.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import cases_trainer
import pytest
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from trainer_models import WORDS
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from patchgen import pipeline, provenance, upstream
from patchgen.runtime import launch, registry
from patchgen.runtime.doctor.rank_step import measure_step
from patchgen.runtime.doctor.step_checks import single_step, step_on_ranks
from patchgen.runtime.train import model as models
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import Recipe, from_dict
from patchgen.runtime.verify.committed_models import committed
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.ranks import RankPool
from patchgen.runtime.verify.reference_model import training_config

RANKS = 2
LAYOUTS = ({"sp": 2}, {"ep": 2}, {})
FAST = (
    ("nemotron_h", {"sp": 2}),
    ("qwen3_vl", {"sp": 2}),
)  # of infinite numbers, and of rows with images in the check
CASES = [
    pytest.param(
        name, layout, id=f"{name}-{layout or 'fsdp'}", marks=[] if (name, layout) in FAST else pytest.mark.slow
    )
    for name in committed()
    for layout in LAYOUTS
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_the_first_step_on_ranks_is_that_on_one(name, layout, tmp_path):
    recipe, has_experts = small_run(name, tmp_path)
    if "ep" in layout and not has_experts:
        pytest.skip("no experts")
    recipe = replace(recipe, parallel=replace(recipe.parallel, **layout))
    recipe = single_step(preflight.decide_trainable(recipe), RANKS)
    on_ranks = step_on_ranks(recipe, RANKS)
    groups = models.parallel_config(recipe.parallel, RANKS).num_batches
    alone = replace(recipe, parallel=replace(recipe.parallel, sp=1, ep=1))
    with launch.process_group() as device:
        expected = measure_step(alone, device, tmp_path, groups=groups)
    assert on_ranks.loss == pytest.approx(expected.loss, rel=1e-5)
    assert on_ranks.norm == pytest.approx(expected.norm, rel=1e-4)


SELECTING = (
    "deepseek_v4",
    *[pytest.param(name, marks=pytest.mark.slow) for name in ("deepseek_v32", "glm_moe_dsa", "qwen4_exp_text")],
)
"""Types whose attention selects its keys, or counts blocks of them along the row."""


@pytest.mark.parametrize("name", SELECTING)
def test_ten_steps_of_attention_that_selects_its_keys_are_the_same_in_each_layout(name, tmp_path, one_rank, two_ranks):
    """Losses of packed rows, with layers computed again in the backward: on one rank, on slices, and with experts divided too."""
    if name not in committed():
        provenance.write(pipeline.generate(upstream.load(name)), tmp_path / "generated" / name)
    recipe, _ = small_run(name, tmp_path, tmp_path / "generated")
    recipe = replace(
        recipe,
        train=replace(recipe.train, steps=10),
        optim=replace(recipe.optim, lr=1e-3, warmup_steps=0, schedule="constant"),
    )
    recipe = preflight.decide_trainable(recipe)

    def losses(pool: RankPool, run: str, layout: dict) -> list[float]:
        section = replace(recipe.parallel, activation_checkpointing="full", **layout)
        log = replace(recipe.log, directory=str(tmp_path / run))
        return pool.run(cases_trainer.losses_of, replace(recipe, parallel=section, log=log), timeout=300)[0]

    alone = losses(one_rank, "alone", {})
    assert alone[-1] < alone[0]
    assert losses(two_ranks, "slices", {"sp": 2}) == pytest.approx(alone, rel=1e-5)
    assert losses(two_ranks, "slices and experts", {"sp": 2, "ep": 2}) == pytest.approx(alone, rel=1e-5)


def small_run(name: str, place: Path, models: Path | None = None) -> tuple[Recipe, bool]:
    """A recipe for random weights of a small form on made-up text, and whether the model has experts; with generated `models`."""
    generated = registry.find_model(name, models if models is not None and models.is_dir() else None)
    head = next((head for head in generated.heads if head.endswith("ForCausalLM")), generated.heads[0])
    upstream_class = getattr(generated.upstream(), head)
    config, tokenizer = training_config(upstream_class, GivenConfig()), byte_tokenizer()
    _set_tokens(config, tokenizer)
    model = build_model(upstream_class, config)
    perturb(model)
    model.save_pretrained(place / "checkpoint")
    tokenizer.save_pretrained(place / "checkpoint")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(1, 20))) for _ in range(40)]
    (place / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    recipe = from_dict(
        {
            "model": {
                "source": str(place / "checkpoint"),
                "dtype": "float32",
                "generated": str(generated.directory.parent) if models is not None else None,
            },
            "data": {
                "sources": [{"path": str(place / "rows.jsonl")}],
                "tokens_per_batch": 160,
                "cache_dir": str(place / "cache"),
            },
            "train": {"steps": 2},
        }
    )
    return recipe, any("experts" in parameter for parameter, _ in model.named_parameters())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte, which every type's own class of tokenizers reads."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def _set_tokens(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    """Special tokens of the tokenizer; placeholders of images, videos and sounds above its own, so that no text has them."""
    text, placeholder = config.get_text_config(decoder=True), len(tokenizer)
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    parts = {id(part): part for part in (config, text, *inner)}.values()
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    for part in parts:
        for field, value in list(vars(part).items()):
            if field in special:
                setattr(part, field, special[field])
            elif isinstance(value, int) and field.endswith(("_token_id", "_token_index")):
                setattr(part, field, placeholder)
                placeholder += 1
    for part in parts:
        for field in ("vocab_size", "vocab_size_per_layer_input"):
            if hasattr(part, field):
                setattr(part, field, placeholder + 64)  # a proof draws from ids that no token has
