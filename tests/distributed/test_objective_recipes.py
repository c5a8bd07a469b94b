"""The toy recipes of objectives, cut to a few steps: they learn, on two ranks as on one, from the data's own loaders."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import cases_trainer as cases
import pytest
import torch
import transformers
from rounding import require_equal_up_to_rounding

from patchgen import pipeline, provenance, upstream
from patchgen.runtime.checkpoint import load_pretrained
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.train.model import build_on_meta
from patchgen.runtime.train.recipe import load, to_dict

ROWS = 40
RECIPES = Path(__file__).parents[2] / "recipes"


def few_rows(folder: Path, name: str) -> Path:
    """The first rows of a recipe's data in a file: tokenizing all of them takes longer than the steps."""
    (source,) = load(RECIPES / f"{name}.yaml").data.sources
    rows = [record.fields() for record, _ in itertools.islice(open_source(source).read(), ROWS)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("name", ["dpo_toy", "reward_toy", "classification_toy"])
def test_toy_recipes_learn_alike(name, tmp_path, one_rank, two_ranks):
    found = {}
    for place, pool in {"one": one_rank, "two": two_ranks}.items():
        changes = {
            "data.sources.0.path": str(few_rows(tmp_path, name)),
            "data.cache_dir": str(tmp_path / "cache"),
            "data.tokens_per_batch": 256,
            "train.steps": 4,
            "train.batches_per_step": 2,
            "model.overrides.num_hidden_layers": 1,
            "checkpoint.export": False,
            "log.directory": str(tmp_path / place),
        }
        values = to_dict(load(RECIPES / f"{name}.yaml", changes))
        found[place] = pool.run(cases.train, values)[0][0]
    require_equal_up_to_rounding(found["two"], found["one"])
    assert found["one"][-1] < found["one"][0] - 0.02, found


@pytest.fixture(scope="module")
def t5(tmp_path_factory) -> Path:
    """The folder that a user generates an encoder-decoder into."""
    folder = tmp_path_factory.mktemp("models")
    generated = pipeline.generate(upstream.load("t5"), heads=["T5ForConditionalGeneration"])
    provenance.write(generated, folder / "t5")
    return folder


@pytest.mark.parametrize(
    ("name", "shares", "auto", "told"),
    [
        ("token_classification_toy", None, "AutoModelForTokenClassification", "logits"),
        ("question_answering_toy", {"parallel.sp": 2}, "AutoModelForQuestionAnswering", "end_logits"),
        ("embedding_toy", None, "AutoModel", "last_hidden_state"),
        ("encoder_decoder_toy", {}, "AutoModelForSeq2SeqLM", "logits"),
    ],
)
def test_other_heads_train_and_load_in_plain_transformers(name, shares, auto, told, t5, tmp_path, one_rank, two_ranks):
    """The export by its Auto class against the head that was trained; where two ranks share the work, loss by loss, too."""
    changes = {
        "data.sources.0.path": str(few_rows(tmp_path, name)),
        "data.cache_dir": str(tmp_path / "cache"),
        "data.tokens_per_batch": 256,
        "train.steps": 3,
        "train.batches_per_step": 2,
        "log.directory": str(tmp_path / "one"),
    }
    if name == "encoder_decoder_toy":
        changes["model.generated"] = str(t5)
    losses = one_rank.run(cases.train, to_dict(load(RECIPES / f"{name}.yaml", changes)))[0][0]
    assert len(set(losses)) == 3, "the numbers must differ, or equality says little"
    if shares is not None:
        others = changes | shares | {"checkpoint.export": False, "log.directory": str(tmp_path / "two")}
        shared = two_ranks.run(cases.train, to_dict(load(RECIPES / f"{name}.yaml", others)))[0][0]
        # The third loss of a fresh t5 says little: on one rank it moves by 4.5e-4 where the second moved by 8e-6 (a learning
        # rate of 2e-3 * (1 + 1e-5)).
        require_equal_up_to_rounding(shared[:2], losses[:2])
    export = tmp_path / "one" / "export"
    plain, loaded = getattr(transformers, auto).from_pretrained(export, output_loading_info=True, dtype=torch.float32)
    assert type(plain).__module__.startswith("transformers.") and not any(loaded.values()), loaded
    trained = build_on_meta(
        load(RECIPES / f"{name}.yaml", {**changes, "model.source": str(export), "model.overrides": {}})
    )
    model = type(trained)._from_config(plain.config, attn_implementation="patchgen_sdpa", dtype=torch.float32)
    assert list(load_pretrained(model, export).initialised) == []
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    more = {"decoder_input_ids": ids} if plain.config.is_encoder_decoder else {}
    with torch.no_grad():
        outputs = [one.eval()(input_ids=ids, **more)[told] for one in (model, plain)]
    require_equal_up_to_rounding(*outputs)
