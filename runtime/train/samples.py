"""How the model in training continues the recipe's prompts: `train.prompts`, at each evaluation.

B prompts   S tokens of a row: the longest prompt and its continuation, padded on the right   s of this rank's slice   V words
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from patchgen.runtime.parallel.batch import slice_batch
from patchgen.runtime.parallel.collectives import all_reduce, broadcast_object
from patchgen.runtime.parallel.reshard import reshard
from patchgen.runtime.parallel.state import ParallelState
from patchgen.runtime.train import reading
from patchgen.runtime.train.feed import to_device
from patchgen.runtime.train.recipe import Recipe, RecipeError
from patchgen.runtime.train.records import Sample

CONVERSATIONS = ("chat", "multimodal", "preference")
"""Kinds of data whose prompts are messages."""


@dataclass(frozen=True)
class Prompts:
    """The recipe's prompts, encoded.

    Attributes:
        texts: as the recipe has them.
        encoded: their tokens.
        tokens: the most tokens of a continuation.
        ends: tokens that end one.
    """

    tokenizer: Any
    texts: Sequence[str]
    encoded: Sequence[Sequence[int]]
    tokens: int
    ends: frozenset[int]

    def continued(self, model: PreTrainedModel, state: ParallelState, device: torch.device) -> list[Sample]:
        """Each prompt with the model's continuation (collective)."""
        pad = min(self.ends, default=0)
        found = continued(model, state, self.encoded, tokens=self.tokens, pad=pad, ends=self.ends, device=device)
        decoded = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in found]
        return [Sample(text, answer) for text, answer in zip(self.texts, decoded, strict=True)]


def of_recipe(recipe: Recipe, model: PreTrainedModel, tokenizer: Any) -> Prompts | None:
    """The prompts of a recipe; None if it has none. In a run on conversations each is a user's message.

    Raises:
        RecipeError: a prompt without a token, or a model that does not continue texts.
    """
    texts = recipe.train.prompts
    if not texts:
        return None
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise RecipeError(
            f"train.prompts: {type(model).__name__} does not continue texts. To fix: remove train.prompts."
        )
    as_chat = recipe.data.kind in CONVERSATIONS and tokenizer.chat_template is not None
    ends = getattr(model.generation_config, "eos_token_id", None)
    known = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    encoded, tokens = encode(tokenizer, texts, as_chat=as_chat), recipe.train.prompt_tokens
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if most is not None and max(map(len, encoded)) + tokens > most:
        raise RecipeError(
            f"train.prompts: the longest has {max(map(len, encoded))} tokens, and train.prompt_tokens is {tokens}, but the model "
            f"has {most} positions. To fix: shorten the prompt, or lower train.prompt_tokens."
        )
    return Prompts(
        tokenizer,
        texts,
        encoded,
        tokens,
        frozenset(token for token in known if token is not None),
    )


def encode(tokenizer: Any, prompts: Sequence[str], *, as_chat: bool) -> list[list[int]]:
    """The tokens of each prompt; with `as_chat` as a user's message, up to where the assistant's begins.

    Raises:
        RecipeError: a prompt without a token.
    """
    encoded: list[list[int]] = []
    for prompt in prompts:
        if as_chat:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
            encoded.append(tokenizer.encode(text, add_special_tokens=False))
        else:
            encoded.append(tokenizer.encode(prompt))
        if not encoded[-1]:
            raise RecipeError(f"train.prompts: {prompt!r} has no token. To fix: write a prompt, or remove it.")
    return encoded


@torch.no_grad()
@reading.kept_generators()
def continued(
    model: PreTrainedModel,
    state: ParallelState,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    pad: int,
    ends: frozenset[int],
    device: torch.device,
) -> list[list[int]]:
    """The likeliest continuation of each prompt, up to `tokens` tokens, its end token included (collective).

    Every rank computes all rows, without a cache: each step is a forward of `(B, S)`, always of the same shape, which works in any
    layout, with compiled layers and with modules that no cache knows. Rows are padded behind their tokens, so causal layers do not
    see the padding.

    Args:
        prompts: token ids, the same on every rank.
        pad: the token of the padding; its values are not read.
        ends: tokens that end a continuation.
    """
    lengths = [len(prompt) for prompt in prompts]
    starts = [*lengths]
    full = -(-(max(lengths) + tokens) // state.sp) * state.sp
    rows_BS = torch.full((len(prompts), full), pad)
    for row, prompt in zip(rows_BS, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    done = [False] * len(prompts)
    was_training = model.training
    model.eval()
    for _ in range(tokens):
        chosen = _next_tokens(model, state, rows_BS, lengths, device)
        for index, token in enumerate(chosen):
            if not done[index]:
                rows_BS[index, lengths[index]] = token
                lengths[index] += 1
                done[index] = token in ends
        if all(done):
            break
    model.train(was_training)
    reshard(model)
    return [row[start:end].tolist() for row, start, end in zip(rows_BS, starts, lengths, strict=True)]


def _next_tokens(
    model: PreTrainedModel, state: ParallelState, rows_BS: Tensor, lengths: Sequence[int], device: torch.device
) -> list[int]:
    """The likeliest token behind each row's last, which the rank has whose slice holds that.

    All ranks take rank 0's: where rounding makes another the likeliest, they would end after different numbers of forwards.
    """
    inputs = slice_batch({"input_ids": rows_BS}, sp=state.sp, sp_rank=state.sp_rank, model=model)
    logits_BsV = model(**to_device(inputs, device), use_cache=False).logits
    width = rows_BS.shape[1] // state.sp
    chosen = torch.zeros(len(lengths), dtype=torch.long, device=device)
    for index, length in enumerate(lengths):
        owner, place = divmod(length - 1, width)
        if owner == state.sp_rank:
            chosen[index] = logits_BsV[index, place].argmax()
    if state.sp > 1:
        chosen = all_reduce(chosen, group=state.sp_group, operation="choose the next tokens of train.prompts")
    return broadcast_object(chosen.tolist())
