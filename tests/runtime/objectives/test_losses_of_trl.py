"""Losses and gradients of packed rows on the generated model, and those of others on transformers' model.

The others get the same documents, padded or one by one: TRL's trainers with their own collators, of which only the loss is
asked for, transformers' task heads, and for embeddings the formula.
"""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from objective_models import generated, of_upstream
from rounding import require_equal_up_to_rounding
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
)

from patchgen.runtime import parallel, registry
from patchgen.runtime.data.collate import collate, text_sample
from patchgen.runtime.objectives import base, learning
from patchgen.runtime.objectives.classification import Classification
from patchgen.runtime.objectives.distillation import Distillation
from patchgen.runtime.objectives.dpo import DPO
from patchgen.runtime.objectives.embedding import Embedding
from patchgen.runtime.objectives.heads import head_over
from patchgen.runtime.objectives.reward import Reward
from patchgen.runtime.objectives.tokens import QuestionAnswering, TokenClassification
from patchgen.runtime.parallel import loss
from patchgen.runtime.parallel.batch import IGNORED, slice_batch

trl = pytest.importorskip("trl")
PROMPT = 4


def pairs(count: int = 5) -> list[dict[str, list[int]]]:
    """Tokenized pairs, as TRL's datasets hold them."""
    generator = torch.Generator().manual_seed(1)

    def ids(least: int) -> list[int]:
        length = int(torch.randint(least, 14, (), generator=generator))
        return torch.randint(3, 300, (length,), generator=generator).tolist()

    return [{"prompt_ids": ids(PROMPT), "chosen_ids": ids(1), "rejected_ids": ids(1)} for _ in range(count)]


def row(documents: list[tuple[list[int], int]], labels: list[float] | None = None, padding: int = 7) -> dict:
    """The packed row of documents, each with the length of what of it is not learned."""
    samples = [text_sample(torch.tensor(ids), torch.arange(len(ids)) >= prompt) for ids, prompt in documents]
    packed = collate(samples, pad_to=sum(len(ids) for ids, _ in documents) + padding, pad_token_id=0)
    packed["document_sources"] = torch.tensor([0] * len(documents) + [-1])
    if labels is not None:
        packed["document_labels"] = torch.tensor([*labels, float("nan")], dtype=torch.float64)
    return packed


def pairs_row(found: list[dict[str, list[int]]]) -> dict:
    documents = []
    for one in found:
        documents += [
            (one["prompt_ids"] + one[answer], len(one["prompt_ids"])) for answer in ("chosen_ids", "rejected_ids")
        ]
    return row(documents)


def ours(objective: base.Objective, model, packed: dict, state, **others) -> torch.Tensor:
    """The loss of one packed row, its gradients left in the model."""
    learned = learning.ObjectiveRunner(objective, model, state, torch.device("cpu"), **others)
    rows = slice_batch(packed, sp=1, sp_rank=0)
    model.train()
    with parallel.using(state):
        inputs, share = learned.prepare(rows)
        items = objective.count(packed) if objective.per != "label" else int((rows["shift_labels"] != IGNORED).sum())
        with loss.step(items, objective=share):
            found = model(**inputs, num_items_in_batch=items, use_cache=False).loss
        found.backward()
    return found.detach()


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({str(number): number for number in range(300)}, unk_token="1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="1")


class Table:
    """A reference that is known already."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def of(self, keys, count):
        return torch.nn.functional.pad(self.values, (0, count - len(self.values)))


def require_same_gradients(model, upstream) -> None:
    found, expected = dict(model.named_parameters()), dict(upstream.named_parameters())
    for name, parameter in expected.items():
        if parameter.grad is not None:
            require_equal_up_to_rounding(found[name].grad, parameter.grad, units=200, what=name)
    assert any(parameter.grad is not None for parameter in expected.values())


def trainer_of(kind, config, tmp_path, model, found, *, ref_model=None, **options):
    arguments = config(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, **options)
    others = {"ref_model": ref_model} if ref_model is not None else {}
    dataset = Dataset.from_list(found)
    return kind(model=model, args=arguments, train_dataset=dataset, processing_class=tokenizer(), **others)


def test_dpo_is_trls(config, state, tmp_path):
    found, policy, before = pairs(), of_upstream(config, 0), of_upstream(config, 1)
    model, reference = generated(policy), generated(before)
    texts = [{"prompt": "3", "chosen": "4", "rejected": "5"}]  # what it trains on is not asked
    options = {"ref_model": before, "router_aux_loss_coef": 0.0}  # which it adds unasked
    trainer = trainer_of(trl.DPOTrainer, trl.DPOConfig, tmp_path, policy, texts, **options)
    batch = trainer.data_collator(found)
    expected = trainer.compute_loss(trainer.model.train(), batch)
    expected.backward()
    packed = pairs_row(found)
    # The reference by our own path: what the other model gives for the same row.
    rows = slice_batch(packed, sp=1, sp_rank=0)
    with parallel.using(state):
        inputs, split = learning.ObjectiveRunner(DPO(), reference, state, torch.device("cpu"))._split(rows)
        values = learning.evaluate(reference, inputs, split, learning.Batch.document_log_probs)[: 2 * len(found)]
    packed["document_keys"] = [str(number) for number in range(2 * len(found))]
    actual = ours(DPO(beta=trainer.beta), model, packed, state, table=Table(values))
    assert abs(float(actual) - float(expected.detach())) < 1e-6
    require_same_gradients(model, policy)


def test_reward_is_trls(config, state, tmp_path):
    config.num_labels, found = 1, pairs()
    torch.manual_seed(2)
    upstream = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model = generated(upstream, head_over("classification", registry.find_head(config), config))
    as_sequences = [
        {answer: one["prompt_ids"] + one[answer] for answer in ("chosen_ids", "rejected_ids")} for one in found
    ]
    trainer = trainer_of(
        trl.RewardTrainer, trl.RewardConfig, tmp_path, upstream, as_sequences, center_rewards_coefficient=0.01
    )
    expected = trainer.compute_loss(trainer.model.train(), trainer.data_collator(as_sequences))
    expected.backward()
    actual = ours(Reward(center=0.01), model, pairs_row(found), state)
    assert abs(float(actual) - float(expected.detach())) < 1e-6
    require_same_gradients(model, upstream)


@pytest.mark.parametrize("labels", [3, 1])
def test_classification_is_transformers(labels, config, state):
    config.num_labels = labels
    torch.manual_seed(3)
    upstream = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    model = generated(upstream, head_over("classification", registry.find_head(config), config))
    documents = [one["prompt_ids"] for one in pairs()]
    targets = torch.tensor([0.0, 2.0, 1.0, 1.0, 2.0]) if labels > 1 else torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5])
    longest = max(map(len, documents))
    ids = torch.tensor([one + [0] * (longest - len(one)) for one in documents])
    given = targets.long() if labels > 1 else targets
    expected = upstream.train()(input_ids=ids, attention_mask=(ids != 0).long(), labels=given).loss
    expected.backward()
    packed = row([(one, 0) for one in documents], labels=targets.tolist())
    actual = ours(Classification(num_labels=labels), model, packed, state)
    assert abs(float(actual) - float(expected.detach())) < 1e-6
    require_same_gradients(model, upstream)


def test_classes_of_tokens_are_transformers(config, state):
    config.num_labels = 3
    torch.manual_seed(6)
    upstream = AutoModelForTokenClassification.from_config(config, dtype=torch.float32)
    model = generated(upstream, head_over("token", registry.find_head(config), config))
    for one in (upstream, model):
        one.dropout.p = 0.0
    documents, packed = marked_documents()
    packed["labels"] = torch.where(packed["labels"] == IGNORED, IGNORED, packed["labels"] % 3)
    shifted = slice_batch(packed, sp=1, sp_rank=0)["shift_labels"][0]
    total = 0.0
    for (ids, _), classes in zip(documents, shifted.split([len(ids) for ids, _ in documents] + [7]), strict=False):
        loss_of = upstream.train()(input_ids=torch.tensor([ids]), labels=classes[None]).loss
        total = total + loss_of * (classes != IGNORED).sum() / (shifted != IGNORED).sum()
    total.backward()
    actual = ours(TokenClassification(num_labels=3), model, packed, state)
    assert abs(float(actual) - float(total.detach())) < 1e-6
    require_same_gradients(model, upstream)


def test_answers_are_transformers(config, state):
    torch.manual_seed(7)
    upstream = AutoModelForQuestionAnswering.from_config(config, dtype=torch.float32)
    model = generated(upstream, head_over("answers", registry.find_head(config), config))
    documents, packed = marked_documents()
    total = 0.0
    for ids, prompt in documents:
        ends = {"start_positions": torch.tensor([prompt]), "end_positions": torch.tensor([len(ids) - 1])}
        total = total + upstream.train()(input_ids=torch.tensor([ids]), **ends).loss / len(documents)
    total.backward()
    actual = ours(QuestionAnswering(), model, packed, state)
    assert abs(float(actual) - float(total.detach())) < 1e-6
    assert upstream.qa_outputs.bias.grad.norm() < 1e-6, "the same for all tokens: it changes no probability"
    upstream.qa_outputs.bias.grad = None
    require_same_gradients(model, upstream)


def test_embeddings_tell_a_pair_from_the_others_of_its_row(config, state):
    torch.manual_seed(8)
    upstream = AutoModel.from_config(config, dtype=torch.float32)
    model = generated(upstream, head_over("base", registry.find_head(config), config))
    documents, packed = marked_documents(6)
    last = [upstream.train()(input_ids=torch.tensor([ids])).last_hidden_state[0, -1] for ids, _ in documents]
    units = torch.nn.functional.normalize(torch.stack(last), dim=-1)
    expected = torch.nn.functional.cross_entropy(units[0::2] @ units[1::2].T / 0.1, torch.arange(3))
    expected.backward()
    actual = ours(Embedding(temperature=0.1), model, packed, state)
    assert abs(float(actual) - float(expected.detach())) < 1e-6
    require_same_gradients(model, upstream)


def marked_documents(count: int = 5) -> tuple[list[tuple[list[int], int]], dict]:
    """Documents with the place from which on they are learned, and their packed row."""
    documents = [(one["prompt_ids"] + one["chosen_ids"], len(one["prompt_ids"])) for one in pairs(count)]
    return documents, row(documents)


@pytest.mark.parametrize("top_k", [1, 8, 300])
def test_distillation_is_trls(top_k, config, state):
    from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer

    class Teacher(ServerDistillationTrainer):
        loss_add_tail = True

        def __init__(self) -> None:
            """Its loss alone: the trainer around it asks a server."""

    student, teacher = of_upstream(config, 4), of_upstream(config, 5)
    model = generated(student)
    documents = [(one["prompt_ids"] + one["chosen_ids"], len(one["prompt_ids"])) for one in pairs()]
    total, count = 0.0, 0
    for ids, prompt in documents:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            found = teacher(input_ids=tokens).logits[:, prompt - 1 : -1].log_softmax(-1).topk(top_k)
        log_probs = student(input_ids=tokens).logits[:, prompt - 1 : -1].log_softmax(-1)
        result = {"topk_logprobs": found.values, "topk_token_ids": found.indices}
        each = Teacher()._compute_server_forward_kl_loss(result, log_probs, tokens[:, prompt:])
        total, count = total + each * (len(ids) - prompt), count + len(ids) - prompt
    expected = total / count
    expected.backward()
    objective = Distillation(top_k=top_k)
    actual = ours(objective, model, row(documents), state, teacher=generated(teacher))
    assert abs(float(actual) - float(expected.detach())) < 2e-6
    require_same_gradients(model, student)
