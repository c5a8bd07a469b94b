"""`patchgen train` refuses what is not proven as a run computes: in the proof's words, before any rank, however it starts."""

from __future__ import annotations

import functools
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import BartForConditionalGeneration, LlamaConfig, LlamaForCausalLM

from patchgen import pipeline, provenance, upstream
from patchgen.commands import training
from patchgen.errors import ConfigError
from patchgen.runtime import attention, launch, parallel, registry
from patchgen.runtime.attention_masks import UnsupportedError
from patchgen.runtime.train import model as models
from patchgen.runtime.train import preflight
from patchgen.runtime.train.recipe import ModelConfig, RecipeError, from_dict
from patchgen.runtime.verify import slices, source_units, verdict
from patchgen.runtime.verify.given_config import GivenConfig
from patchgen.runtime.verify.small_config import small_config
from patchgen.runtime.verify.verify_model import judge

STAND_INS = Path(__file__).parents[1] / "verify"
SEES_THE_FUTURE = (
    "            attention_mask,\n            dropout",
    "            attention_mask if self.config._attn_implementation == 'eager' else None,\n"
    "            is_causal=self.config._attn_implementation == 'eager',\n"
    "            dropout",
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def planted(tmp_path, monkeypatch, home):
    """The folder of generated models holds one whose attention sees later tokens in a run."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    from stand_in import write_stand_in

    folder = write_stand_in(tmp_path / "generated", "llama", edits=(SEES_THE_FUTURE,))
    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=folder.parent))
    return folder


def recipe_of(source: str, directory: Path, **model: object) -> dict:
    return {
        "model": {"source": source, **model},
        "data": {"tokens_per_batch": 64},
        "train": {"steps": 2, "batches_per_step": 2},
        "log": {"directory": str(directory)},
    }


def test_it_is_refused_in_the_proofs_words_before_any_rank(planted, tmp_path, monkeypatch):
    found, _ = judge(planted, head=None, implementations=preflight.IMPLEMENTATIONS)
    assert found.status == verdict.EAGER_ONLY and "a later token changes earlier logits" in found.reason

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(launch, "_run_agent", started)
    with monkeypatch.context() as within:
        within.setattr(launch, "worker", started)
        for ranks in (1, 2):
            with pytest.raises(RecipeError) as refusal:
                launch.launch(from_dict(recipe_of("llama", tmp_path / "run")), processes=ranks)
            assert str(refusal.value) == f"model.source = 'llama': {found.words}"
            within.setattr(preflight, "_decide", started)  # what was decided is not decided again
        file = tmp_path / "mine.yaml"
        file.write_text(yaml.safe_dump(recipe_of("llama", tmp_path / "run")))
        options = {"processes": 1, "nodes": "1", "rdzv_endpoint": "", "fresh": False, "print_config": False}
        with pytest.raises(ConfigError, match="proven, eager only: a later token"):
            training.train(file, [], dry_run=True, verbose=False, script=None, **options)
    assert not (tmp_path / "run").exists()

    # Under somebody else's agent rank 0 decides, for all.
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    rank = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": port, launch.TORCHRUN: "run"}
    for name, value in rank.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(launch, "end_with_parent", lambda: None)  # this process is a test's, not torchrun's
    try:
        with pytest.raises(RecipeError, match="proven, eager only: a later token"):
            launch.launch(from_dict(recipe_of("llama", tmp_path / "run")))
    finally:
        if launch.dist.is_initialized():
            launch.dist.destroy_process_group()


def test_a_fresh_run_on_several_machines_is_refused_before_any_check(tmp_path, monkeypatch):
    """Checks take minutes, and each machine would move away what the others have begun."""

    def checked(*arguments: object, **options: object) -> None:
        raise AssertionError("a check was made")

    monkeypatch.setattr(preflight, "decide_trainable", checked)
    monkeypatch.setattr("patchgen.runtime.train.run_plan.require_valid", checked)
    (tmp_path / "run").mkdir()
    recipe = from_dict(recipe_of("llama", tmp_path / "run"))
    for nodes in ("2", "1:2"):
        with pytest.raises(RecipeError, match="--fresh is for one machine.* To fix: name another log.directory"):
            launch.launch(recipe, nodes=nodes, rdzv_endpoint="localhost:29500", fresh=True)
    assert [folder.name for folder in tmp_path.iterdir()] == ["run"]


def test_what_a_recipe_names_is_what_is_compared(home, tmp_path):
    decided = preflight.decide_trainable(from_dict(recipe_of("llama", tmp_path / "run")))
    assert decided.model.attention == "patchgen_sdpa"
    dropout = {"attention_dropout": 0.1, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
    named = recipe_of("llama", tmp_path / "run", attention="patchgen_flex_attention", overrides=dropout)
    with pytest.raises(RecipeError, match="attention 'patchgen_flex_attention' lacks .*dropout"):
        preflight.decide_trainable(from_dict(named))
    assert len(list((home / ".cache" / "patchgen" / "preflight").glob("*.json"))) == 2


def test_a_loss_that_is_no_sum_of_shares_is_refused_before_any_rank(home, tmp_path, monkeypatch):
    head = registry.find_model("llama").load().LlamaForCausalLM
    monkeypatch.setattr(head, "own_loss", ("smoothed(logits, labels)",), raising=False)
    recipe = recipe_of("llama", tmp_path / "run")
    with pytest.raises(
        RecipeError, match=r"batches_per_step = 2.*LlamaForCausalLM computes a loss of its own, smoothed"
    ):
        preflight.decide_trainable(from_dict(recipe))
    recipe["train"]["batches_per_step"] = 1
    preflight.decide_trainable(from_dict(recipe))
    with pytest.raises(RecipeError, match=r"parallel\.sp = 2.*LlamaForCausalLM computes"):
        preflight.decide_trainable(from_dict(recipe | {"parallel": {"sp": 2}}))


def test_attention_that_cannot_be_sliced_is_refused_before_any_rank(home, tmp_path, monkeypatch):
    """MPT computes its biases from the whole mask, in the model."""
    folder = tmp_path / "generated"
    provenance.write(pipeline.generate(upstream.load("mpt")), folder / "mpt")
    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=folder))
    decided = preflight.Preflight(verdict.PROVEN, "", "patchgen_sdpa")
    monkeypatch.setattr(preflight, "_decide", lambda *arguments, **options: (decided, ()))
    recipe = recipe_of("mpt", tmp_path / "run")
    preflight.decide_trainable(from_dict(recipe))
    with pytest.raises(RecipeError, match=r"parallel\.sp = 2: 'mpt': MptModel uses its mask as a tensor"):
        preflight.decide_trainable(from_dict(recipe | {"parallel": {"sp": 2}}))


def test_a_layout_that_an_observed_fact_rules_out_is_refused_before_any_rank(home, tmp_path, monkeypatch):
    """Rows of a proof are too short for the choice, which slices and their sequences make differently."""
    folder, committed = tmp_path / "generated" / "llama", registry.find_model("llama")
    end = "        hidden_states = residual + hidden_states\n        return hidden_states\n"
    choice = "        hidden_states = hidden_states * max(1.0, hidden_states.shape[1] / 8192)\n"
    folder.mkdir(parents=True)
    text = committed.file.read_text().replace(end, end.replace("        return", f"{choice}        return"))
    (folder / committed.file.name).write_text(text)
    shutil.copy(committed.directory / "provenance.json", folder)
    monkeypatch.setattr(registry, "find_head", functools.partial(registry.find_head, directory=folder.parent))
    recipe = recipe_of("llama", tmp_path / "run")
    preflight.decide_trainable(from_dict(recipe), world=2)
    sliced = from_dict(recipe | {"parallel": {"sp": 2}})
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RecipeError, match=r"'llama': line \d+, `hidden_states = .*/ 8192\)`: .* trains with sp=1"):
            preflight.decide_trainable(sliced, world=2)


def test_a_decoder_with_tokens_of_its_own_is_refused_before_any_rank():
    """The rehearsal hands it none, which is an error of another kind, and left to the ranks."""
    config = small_config("bart").config
    config.is_encoder_decoder = True
    model = BartForConditionalGeneration(config)
    refusal = slices.refusal_on_ranks(model, shares_sequence=True)
    assert refusal.startswith("BartForConditionalGeneration has an encoder for one sequence and a decoder for another")
    assert not slices.refusal_on_ranks(model, shares_sequence=False)


def test_a_device_that_fails_in_the_rehearsal_is_no_answer(monkeypatch):
    model = LlamaForCausalLM(small_config("llama").config)

    def no_memory(*_arguments, **_options):
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(type(model), "forward", no_memory)
    with pytest.raises(torch.OutOfMemoryError):
        slices.refusal_on_ranks(model, shares_sequence=True)


def test_what_a_model_refuses_on_several_ranks_is_refused_before_any_rank(home, tmp_path, monkeypatch):
    head = registry.find_model("llama").load().LlamaForCausalLM
    own = head.forward

    @functools.wraps(own)
    def forward(*args, **kwargs):
        if (state := parallel.current()) is not None and state.config.world > 1:
            raise UnsupportedError("Block trains on one rank.")
        return own(*args, **kwargs)

    monkeypatch.setattr(head, "forward", forward)
    decided = preflight.Preflight(verdict.PROVEN, "", "patchgen_sdpa")
    monkeypatch.setattr(preflight, "_decide", lambda *arguments, **options: (decided, ()))
    recipe = recipe_of("llama", tmp_path / "run")
    preflight.decide_trainable(from_dict(recipe))
    with pytest.raises(RecipeError, match=r"parallel\.ep = 2: 'llama': Block trains on one rank"):
        preflight.decide_trainable(from_dict(recipe | {"parallel": {"ep": 2}}))
    with pytest.raises(RecipeError, match=r"parallel\.ep = 2: 'llama': Block"):  # without sp: 2 as well
        preflight.decide_trainable(from_dict(recipe | {"parallel": {"ep": 2, "sp": 2}}))


def test_a_type_that_nobody_generated_is_refused_in_one_sentence(home, tmp_path):
    with pytest.raises(RecipeError) as refusal:
        preflight.decide_trainable(from_dict(recipe_of("xlnet", tmp_path / "run")))
    told = str(refusal.value)
    assert told == (
        "model.source = 'xlnet': no generated model takes a XLNetConfig. Generate one with `patchgen generate xlnet`, "
        "which gives the reason if it cannot."
    )


def test_options_that_no_small_model_takes_are_told_of():
    config = LlamaConfig(hidden_act="an activation of one's own")
    with pytest.warns(
        UserWarning, match="cannot be compared with upstream at small sizes .KeyError: .*LlamaConfig with its defaults"
    ):
        small = preflight._shrunk_config(LlamaForCausalLM, config, GivenConfig())
    assert small.hidden_act == LlamaConfig().hidden_act


def test_a_padding_token_without_a_row_is_refused_in_one_sentence(home, tmp_path):
    recipe = from_dict(recipe_of("llama", tmp_path / "run", overrides={"vocab_size": 100, "pad_token_id": 100}))
    with pytest.raises(RecipeError, match="'llama': pad_token_id = 100 has no row in the embeddings: .* 100 tokens"):
        preflight.decide_trainable(recipe)


def test_without_a_small_form_each_layer_is_taken_to_need_every_feature():
    config = LlamaConfig(num_hidden_layers=1, vocab_size=16, eos_token_id=list(range(8, 16)))
    head = registry.find_head(config)
    assert not preflight._is_default(config, GivenConfig())
    with pytest.warns(UserWarning, match="No small form of this config runs .*more than 7 special tokens"):
        kinds = preflight.attention_choice.kinds_of(head, config)
    assert {kind.features for kind in kinds} == {attention.FEATURES}


def test_a_verdict_that_cannot_be_kept_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("a file where the folder would be")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    decided = preflight.Preflight(verdict.PROVEN, "", "patchgen_sdpa")
    monkeypatch.setattr(preflight, "_decide", lambda *arguments, **options: (decided, ()))
    with pytest.warns(UserWarning, match="each start computes it again"):
        assert preflight.examine(from_dict(recipe_of("qwen3_moe", tmp_path / "run"))) == decided


@pytest.mark.parametrize("kind", ["type", "folder"])
def test_values_that_the_config_class_refuses_are_told_in_one_sentence(kind, tmp_path):
    source, told = "gemma4_assistant", "refuses its defaults"
    if kind == "folder":
        (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}')
        source, told = str(tmp_path), "refuses this config.json"
    with pytest.raises(RecipeError, match=told) as refusal:
        models.read_config(ModelConfig(source=source))
    assert "\n" not in str(refusal.value)


def test_a_machine_that_trains_needs_no_generator():
    code = (
        "import sys; sys.modules['libcst'] = sys.modules['black'] = None\n"
        "from patchgen.runtime.train import preflight\n"
        "from patchgen.runtime.verify import code_sets\n"
        "print(code_sets.made_with({'patchgen.runtime.attention:*'}, dict.fromkeys(code_sets.RELEASES, ''))['prover'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == source_units.hash_of({"patchgen.runtime.attention:*"})
