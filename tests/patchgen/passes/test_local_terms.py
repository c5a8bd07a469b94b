"""A term that a head adds to its loss, planted upstream: proven on one rank, refused by name on several."""

from __future__ import annotations

from generation_cases import edited, load

from patchgen import pipeline, provenance
from patchgen.runtime import registry
from patchgen.runtime.verify import media_ranks
from patchgen.runtime.verify.ranks import RankPool


def test_the_proof_on_ranks_names_it_before_they_start(tmp_path):
    term = "loss = loss + 0.1 * hidden_states.pow(2).mean()\n\n        return CausalLMOutputWithPast("
    generated = pipeline.generate(edited(load("llama"), ("return CausalLMOutputWithPast(", term)))
    assert "0.1 * hidden_states.pow(2).mean() is added to the loss" in generated.provenance
    folder = tmp_path / "llama"
    provenance.write(generated, folder)
    head = registry.read_model(folder).load().LlamaForCausalLM
    assert head.local_loss_terms == ("0.1 * hidden_states.pow(2).mean()",)
    pool = RankPool(2)
    (result,) = media_ranks.verify_on_ranks(folder, pool, sp=1, fsdp=True)
    assert "LlamaForCausalLM adds 0.1 * hidden_states.pow(2).mean() to its loss" in result.reason
    assert not pool._processes
