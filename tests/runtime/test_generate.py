"""`generate()` of the generated classes beside upstream's: every way of it, bit for bit.

A run takes the few committed models that have every kind of site; `make test-models` takes all.

Where upstream refuses (a stateful model that is to be assisted, layers that no static cache knows), the generated class
refuses in the same words.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import cache

import chosen_models
import pytest
import torch
from torch import Tensor

from patchgen.commands.generation import committed
from patchgen.runtime import registry
from patchgen.runtime.verify.model_pair import ModelPair, build_pair
from patchgen.runtime.verify.multimodal_inputs import media_cases, takes_media
from patchgen.runtime.verify.small_config import small_config

NEW = {"max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
NEW |= {"return_dict_in_generate": True, "output_logits": True}
PROMPT = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = PROMPT.clone()
PADDED[0, :4] = 0


@cache
def pair_of(name: str, head: str) -> ModelPair:
    generated = registry.find_model(name)
    ours, theirs = getattr(generated.load(), head), getattr(generated.upstream(), head)
    pair = build_pair(theirs, ours, small_config(ours.config_class).config)
    assert pair.problems == []
    pair.upstream.eval(), pair.generated.eval()
    return pair


def assistant_of(model):
    """A smaller draft: the same model with other weights."""
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(0.9)
    return draft


def continued(model, **options):
    """From the cache of a first generation, with new tokens behind what was generated."""
    first = model.generate(PROMPT, **NEW)
    ids = torch.cat([first.sequences, PROMPT[:, :3]], dim=1)
    return model.generate(ids, past_key_values=first.past_key_values, **NEW, **options)


def continued_by_hand(model, position_ids: Tensor):
    past = model(input_ids=PROMPT, use_cache=True).past_key_values
    mask = torch.ones(2, 12, dtype=torch.long)
    return model(input_ids=PROMPT[:, :3], past_key_values=past, position_ids=position_ids, attention_mask=mask)


def cropped(model):
    first = model.generate(PROMPT, **NEW)
    first.past_key_values.crop(-3)
    return model.generate(first.sequences, past_key_values=first.past_key_values, **NEW)


def repeated(model):
    """One prompt's cache, continued in three rows."""
    first = model.generate(PROMPT[:1], **NEW)
    first.past_key_values.batch_repeat_interleave(3)
    return model.generate(first.sequences.repeat(3, 1), past_key_values=first.past_key_values, do_sample=True, **NEW)


NEXT = torch.arange(9, 12)
WAYS: dict[str, Callable] = {
    "greedy": lambda m: m.generate(PROMPT, output_hidden_states=True, output_attentions=True, **NEW),
    "sampling": lambda m: m.generate(PROMPT, do_sample=True, top_k=7, top_p=0.9, temperature=0.8, **NEW),
    "beams": lambda m: m.generate(PROMPT, num_beams=3, num_return_sequences=2, **NEW),
    "sampled beams": lambda m: m.generate(PROMPT, num_beams=2, do_sample=True, **NEW),
    "left padding": lambda m: m.generate(PADDED, attention_mask=(PADDED > 0).long(), **NEW),
    "no cache": lambda m: m.generate(PROMPT, use_cache=False, **NEW),
    "static cache": lambda m: m.generate(PROMPT, cache_implementation="static", disable_compile=True, **NEW),
    "prompt lookup": lambda m: m.generate(PROMPT[:1], prompt_lookup_num_tokens=2, **NEW),
    "assisted": lambda m: m.generate(PROMPT[:1], assistant_model=assistant_of(m), **NEW),
    "guidance": lambda m: m.generate(PROMPT, guidance_scale=1.5, **NEW),
    "embeddings": lambda m: m.generate(inputs_embeds=m.get_input_embeddings()(PROMPT), **NEW),
    "prefill in chunks": lambda m: m.generate(PROMPT, prefill_chunk_size=4, **NEW),
    "continued": continued,
    "continued in beams": lambda m: continued(m, num_beams=2),
    "continued from a cropped cache": cropped,
    "continued in more rows": repeated,
    "text positions": lambda m: continued_by_hand(m, NEXT[None]),
    "one row of positions for all": lambda m: continued_by_hand(m, NEXT.expand(1, 2, -1)),
    "three rows of positions": lambda m: continued_by_hand(m, NEXT.expand(3, 2, -1)),
    "some logits": lambda m: m(input_ids=PROMPT, logits_to_keep=torch.tensor([2, 5])),
}


def result(way: Callable, model) -> tuple[list[Tensor], str]:
    """The tensors that come back, and the words of the refusal."""
    torch.manual_seed(7)
    try:
        with torch.no_grad():
            return list(tensors(way(model))), ""
    except (ValueError, RuntimeError, AttributeError, KeyError, NotImplementedError) as error:
        return [], f"{type(error).__name__}: {error}"


def tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors([entry for key, entry in value.items() if key != "past_key_values"])
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from tensors(entry)


def assert_same(way: Callable, upstream, generated) -> bool:
    """Whether upstream generates; asserts that both do the same."""
    expected, refusal = result(way, upstream)
    got, own_refusal = result(way, generated)
    assert own_refusal == refusal
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    return not refusal


@pytest.mark.parametrize("name, head", chosen_models.heads(committed()))
@pytest.mark.sampled(3)
def test_every_way_of_generating_is_upstreams(name, head):
    pair = pair_of(name, head)
    served = [way for way, generate in WAYS.items() if assert_same(generate, pair.upstream, pair.generated)]
    # What no class refuses; the rest depends on its cache, its positions and its inputs.
    always = {"greedy", "sampling", "beams", "left padding", "no cache", "continued", "text positions"}
    assert always <= set(served)


MEDIA = [
    one
    for one in chosen_models.heads(chosen_models.with_hits("fill_back"))
    if takes_media(getattr(registry.find_model(one.values[0]).load(), one.values[1]))
]


@pytest.mark.parametrize("name, head", MEDIA)
def test_generating_from_media_is_upstreams(name, head):
    """Each modality: greedily, sampled in two rows each, and continued by text from the cache."""
    pair = pair_of(name, head)
    taken = set()
    for case in media_cases(pair.upstream).cases:
        if case.name in taken or case.name.startswith(("packed", "handed", "mixed")):
            continue
        batch = {key: value for key, value in case.batch.items() if key != "labels"}

        def sampled(model, batch=batch):
            return model.generate(**batch, do_sample=True, num_return_sequences=2, **NEW)

        def text_behind(model, batch=batch):
            first = model.generate(**batch, **NEW)
            ids = torch.cat([first.sequences, PROMPT[:1, :3].expand(len(first.sequences), -1)], dim=1)
            mask = torch.nn.functional.pad(
                batch["attention_mask"], (0, ids.shape[1] - batch["input_ids"].shape[1]), value=1
            )
            follow = model.generate(ids, attention_mask=mask, past_key_values=first.past_key_values, **NEW)
            return [first, follow]

        if assert_same(text_behind, pair.upstream, pair.generated):
            taken.add(case.name)
        assert_same(sampled, pair.upstream, pair.generated)
    assert taken
