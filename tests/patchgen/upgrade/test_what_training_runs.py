"""A review lists the imported helpers that training runs, and counts the others."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from planted_releases import Drift, planted
from rich.console import Console

from patchgen import pipeline, provenance, upstream
from patchgen.upgrade import compare_model
from patchgen.upgrade.findings import REVIEW, ModelUpgrade, Site, Upgrade
from patchgen.upgrade.messages import commit_message, show_model

MODEL = "llama"
FORMAT = Drift(f"models/{MODEL}/modeling_{MODEL}.py", "LlamaMLP.forward", "return down_proj", "return (down_proj)")
RUN = (
    Drift("masking_utils.py", "causal_mask_function", "kv_idx <= q_idx", "kv_idx < q_idx"),
    Drift("integrations/sdpa_attention.py", "repeat_kv", "n_rep == 1", "n_rep <= 1"),
    Drift("modeling_utils.py", "PreTrainedModel.post_init", "self.init_weights()", "self.init_weights(), self.eval()"),
    Drift("loss/loss_utils.py", "ForCausalLMLoss", "logits.float()", "logits.double()"),
    Drift("modeling_utils.py", "PreTrainedModel.main_input_name", '"input_ids"', '"ids"'),
    Drift(  # checks a name: itself it counts
        "modeling_utils.py",
        "PreTrainedModel._check_and_adjust_attn_implementation",
        "applicable_attn_implementation = attn_implementation",
        "applicable_attn_implementation = str(attn_implementation)",
    ),
)
NOT_RUN = (  # decoding, code reached only from the check of a name, types
    Drift("integrations/eager_paged.py", "eager_paged_attention_forward", "key.transpose(2, 3)", "key.mT"),
    Drift(
        "generation/continuous_batching/cache.py",
        "PagedAttentionCache.__init__",
        "self.dtype = dtype",
        "self.dtype = dtype or 0",
    ),
    Drift("cache_utils.py", "Cache.__init__", "self.layers = ", "self.layers = 0 or "),
    Drift("utils/import_utils.py", "is_torch_available", "return False", "return None"),
    Drift("modeling_utils.py", "PreTrainedModel._keep_in_fp32_modules", ": set[str]", ": tuple[str]"),
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ModelUpgrade:
    root = tmp_path_factory.mktemp("committed")
    provenance.write(pipeline.generate(upstream.load(MODEL)), root / MODEL)
    return compare_model(MODEL, str(planted(tmp_path_factory.mktemp("release"), (FORMAT, *RUN, *NOT_RUN))), root)


def test_every_helper_is_listed_with_whether_training_runs_it(found: ModelUpgrade):
    is_run = {(site.file.removeprefix("transformers/"), site.symbol): site.is_run for site in found.sites}
    assert is_run == {(d.file, d.symbol): d in RUN for d in (*RUN, *NOT_RUN)}
    assert {site.verdict for site in found.sites} == {REVIEW}


@pytest.mark.parametrize("verbose", [False, True])
def test_a_review_lists_what_training_runs_and_counts_the_rest(found: ModelUpgrade, verbose: bool):
    console = Console(file=io.StringIO(), width=1000)
    show_model(found, console, verbose=verbose)
    shown = console.file.getvalue()
    assert all(drift.symbol in shown for drift in RUN)
    assert (f"and {len(NOT_RUN)} that training does not run" in shown) is not verbose
    assert shown.count("training does not run it: ") == (len(NOT_RUN) if verbose else 0)
    for drift in NOT_RUN:
        assert (drift.symbol in shown) is verbose


def test_the_message_of_the_commit_counts_what_training_runs(found: ModelUpgrade):
    message = " ".join(commit_message(Upgrade("1", "2", (found,)), {MODEL: "proven"}, [], {}).split())
    assert f"training runs, {len(RUN)} symbols changed" in message and "eager_paged" not in message


def test_a_change_of_several_sites_is_shown_once(found: ModelUpgrade):
    site = Site("model", "changed", "file.py", "A.forward", ("one",), REVIEW, "why", "old = 1\n", "new = 1\n")
    again = replace(site, kind="hits", passes=("two",), reason="two at A.forward: nothing -> something")
    other = replace(again, new_upstream="newer = 1\n")
    console = Console(file=io.StringIO(), width=200)
    show_model(replace(found, sites=(site, again, other)), console, verbose=False)
    shown = console.file.getvalue()
    assert [
        shown.count(words) for words in ("+new = 1", "+newer = 1", "two at A.forward", "the change is shown above")
    ] == [
        1,
        1,
        2,
        1,
    ]
