"""What one process computes as upstream does and two ranks do not: `patchgen verify` says so, and `train` before ranks start."""

from __future__ import annotations

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from patchgen.commands import generation
from patchgen.runtime import registry
from patchgen.runtime.compatibility import digest
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import RecipeError, from_dict
from patchgen.runtime.verify import code_sets, report, two_ranks, verdict
from patchgen.runtime.verify.layout import TWO_RANKS
from patchgen.runtime.verify.ranks import RankPool
from patchgen.runtime.verify.two_ranks import LayoutResult
from patchgen.runtime.verify.verify_model import verify_model

SOURCE = Path(__file__).parents[1] / "patchgen" / "data" / "list_moe"
HEAD = "ListMoeForCausalLM"
NORM = "        return self.norm(hidden_states)\n"
RESULT = "        return CausalLMOutputWithPast("
LOOP = "        for layer in self.layers:\n            hidden_states = layer(hidden_states)\n"
PLANTS = {
    "state of one rank": (
        NORM,
        "        if self.training:\n"
        '            self.seen = getattr(self, "seen", 1.0) + hidden_states.detach().abs().mean()\n'
        f"            return self.norm(hidden_states) * self.seen\n{NORM}",
    ),
    "a term of one rank in the loss": (
        RESULT,
        f"        if loss is not None:\n            loss = loss + hidden_states.float().pow(2).mean()\n{RESULT}",
    ),
    "a gradient by its own norm": (
        NORM,
        "        if hidden_states.requires_grad:\n"
        f"            hidden_states.register_hook(lambda gradient: gradient / gradient.norm())\n{NORM}",
    ),
    "an error of the runtime in a step": (
        LOOP,
        "        if input_ids is not None and len(input_ids.unique()) == 1:\n"
        "            from patchgen.runtime.parallel import ParallelConfig\n"
        f"            ParallelConfig.for_world(2, sp=3)\n{LOOP}",
    ),
    "experts that some tokens skip": (
        LOOP,
        "        for layer in self.layers:\n"
        "            if input_ids is None or len(input_ids.unique()) > 1:\n"
        "                hidden_states = layer(hidden_states)\n",
    ),
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clean")
    shutil.copytree(SOURCE, root / "code", ignore=shutil.ignore_patterns("__pycache__"))
    generation.generate(["list_moe"], False, None, root / "code", root / "generated", dry_run=False, force=False)
    return root


def with_plant(clean: Path, place: Path, plant: tuple[str, str] | None = None) -> registry.GeneratedModel:
    """The generated model and the file that it was made from, both with the same change."""
    shutil.copytree(clean, place, ignore=shutil.ignore_patterns("__pycache__"))
    code, folder = place / "code" / "modeling_list_moe.py", place / "generated" / "list_moe"
    for file in (code, folder / code.name) if plant else ():
        assert file.read_text().count(plant[0]) == 1, file
        file.write_text(file.read_text().replace(*plant))
    provenance = json.loads((folder / "provenance.json").read_text())
    provenance["upstream"]["sha256"] = digest(code)
    (folder / "provenance.json").write_text(json.dumps(provenance))
    return replace(registry.read_model(folder), source=code)


def compared(pool: RankPool, model: registry.GeneratedModel, layout: str = "fsdp2") -> LayoutResult:
    found = two_ranks.compare_layout(pool, model, HEAD, TWO_RANKS[layout], has_media=False, separates=True)
    return two_ranks.result_of(found)


def test_the_sound_model_agrees_in_each_layout(clean, tmp_path, request):
    model = with_plant(clean, tmp_path / "sound")
    pool = request.getfixturevalue("two_ranks")
    found = {layout: compared(pool, model, layout) for layout in TWO_RANKS}
    assert [found[layout].reason for layout in TWO_RANKS] == [""] * len(TWO_RANKS) and found["ep2"].applies
    assert all(0 <= found[layout].difference < 1e-4 for layout in TWO_RANKS)
    assert verdict.on_two_ranks({layout: one.reason for layout, one in found.items()}).status == verdict.PROVEN


@pytest.mark.parametrize("plant", PLANTS)
def test_what_each_rank_does_by_its_own_data_is_told(clean, tmp_path, plant):
    model = with_plant(clean, tmp_path / "planted", PLANTS[plant])
    pool = RankPool(2, collective_timeout=15.0)
    try:
        found = compared(pool, model)
    finally:
        pool.close()
    assert found.reason and not found.reason.startswith(verdict.REFUSED), found
    told = verdict.on_two_ranks({"fsdp2": found.reason})
    assert told.words.startswith("proven, one rank only: FSDP on two ranks: ")


OUTSIDE = (
    "        hidden_states = self.norm(hidden_states)\n",
    "        weight = self.layers[0].mlp.down_proj.weight\n"
    "        hidden_states = self.norm(hidden_states + 0.0 * weight.sum())\n",
)


def test_verify_and_train_say_the_same_of_a_file_that_one_rank_alone_can_train(tmp_path, monkeypatch):
    """A weight that is used outside its layer, which FSDP has divided by then."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    committed, folder = registry.find_model("llama"), tmp_path / "generated" / "llama"
    folder.mkdir(parents=True)
    text = committed.file.read_text()
    assert text.count(OUTSIDE[0]) == 1
    (folder / committed.file.name).write_text(text.replace(*OUTSIDE))
    shutil.copy(committed.directory / "provenance.json", folder)
    model = registry.read_model(folder)
    proof = verify_model(model, variants=("base",), implementations=())
    assert verdict.of(proof).status == verdict.PROVEN, "in one process"
    told = verdict.of(two_ranks.complete(proof, model))
    assert told.status == verdict.ONE_RANK and "DTensor" in told.reason, told

    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=folder.parent))
    recipe = from_dict(
        {
            "model": {"source": "llama"},
            "data": {"tokens_per_batch": 64},
            "train": {"steps": 2},
            "log": {"directory": str(tmp_path / "run")},
        }
    )
    preflight.decide_trainable(recipe)
    with pytest.raises(RecipeError) as refusal:
        preflight.decide_trainable(recipe, world=2)
    assert str(refusal.value) == f"model.source = 'llama': {told.words}"

    def compared_again(*_arguments: object, **options: object) -> dict:
        assert not options["layouts"], "what was compared is not compared again"
        return {}

    monkeypatch.setattr(preflight, "compare_on_two_ranks", compared_again)
    with pytest.raises(RecipeError, match="proven, one rank only: FSDP on two ranks: "):
        preflight.decide_trainable(recipe, world=4)

    releases = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    made_with = code_sets.made_with({"patchgen.runtime.ops:"}, releases)
    on_ranks = code_sets.made_with({"patchgen.runtime.parallel.sequence:gather_heads"}, releases)
    report.write_proof(proof, folder, made_with, made_on_ranks_with=on_ranks)
    assert report.read_two_ranks(folder, model.file, proof.head) == {
        layout: verdict.one_line(found.reason) for layout, found in proof.two_ranks.items()
    }
    report.write_proof(proof, folder, made_with, made_on_ranks_with=on_ranks | {"prover": "older"})
    assert report.read_two_ranks(folder, model.file, proof.head) is None, "of other code"


def test_a_layout_that_is_wrong_is_refused_alone():
    """FSDP agrees; ranks that share experts do not, and a shared sequence is refused by its check."""
    reasons = {"fsdp2": "", "ep2": "loss 1.0, upstream 2.0", "sp2": "refused at the start of a run: other logits"}
    found = verdict.on_two_ranks(reasons)
    assert found.words == "proven, without ep: experts shared by two ranks: loss 1.0, upstream 2.0"
    assert verdict.on_two_ranks(reasons | {"ep2": ""}).status == verdict.PROVEN
    assert verdict.on_two_ranks({"fsdp2": "refused: by the runtime"}).status == verdict.ONE_RANK
