"""Cross entropies that heads write out: what is known of them, and what stays unread."""

from __future__ import annotations

import ast

import pytest
from generation_cases import anatomy_of

from patchgen.anatomy.own_losses import read_own_loss, unserved_loss

MEAN = "loss_fct = CrossEntropyLoss()\n"
ALIGNED = MEAN + "loss = loss_fct(logits.view(-1, self.config.vocab_size), labels.view(-1))"
KEPT = """
if attention_mask is not None:
    shift_attention_mask = attention_mask[:, -(logits.shape[1] - 1) :].to(logits.device)
    shift_logits = logits[..., :-1, :][shift_attention_mask.to(logits.device) != 0].contiguous()
    shift_labels = labels[..., 1:][shift_attention_mask.to(labels.device) != 0].contiguous()
else:
    shift_logits = logits[..., :-1, :].contiguous()
    shift_labels = labels[..., 1:].contiguous()
loss_fct = CrossEntropyLoss()
loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1).to(shift_logits.device))
"""
UPCAST = """
logits = logits.float()
shift_logits = logits[..., :-1, :]
shift_labels = labels[..., 1:]
if attention_mask is not None:
    shift_attention_mask = attention_mask[:, -shift_logits.shape[1] :].to(logits.device)
    shift_logits = shift_logits[shift_attention_mask.to(logits.device) != 0].contiguous()
    shift_labels = shift_labels[shift_attention_mask.to(shift_labels.device) != 0].contiguous()
else:
    shift_logits = shift_logits.contiguous()
    shift_labels = shift_labels.contiguous()
loss_fct = CrossEntropyLoss()
flat_logits = shift_logits.view(-1, self.config.text_config.vocab_size)
flat_labels = shift_labels.view(-1).to(shift_logits.device)
loss = loss_fct(flat_logits, flat_labels)
"""
TEXT_VOCAB = "self.config.text_config.vocab_size"
EACH = """
if attention_mask is not None:
    mask = attention_mask[..., 1:] != 0
    loss = F.cross_entropy(logits[..., :-1, :][attention_mask[..., 1:] != 0].view(-1, 9), labels[..., 1:][mask].view(-1))
else:
    loss = F.cross_entropy(logits[..., :-1, :].view(-1, 9), labels[..., 1:].view(-1))
"""
SHIFTED = """
shift_logits = logits[..., :-1, :].contiguous()
shift_labels = labels[..., 1:].contiguous()
loss_fct = CrossEntropyLoss()
shift_logits = shift_logits.view(-1, self.config.vocab_size)
shift_labels = shift_labels.view(-1)
shift_labels = shift_labels.to(shift_logits.device)
loss = loss_fct(shift_logits, shift_labels)
"""


def read(code: str, imported: str = "from torch.nn import CrossEntropyLoss"):
    anatomy = anatomy_of(f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n{imported}\n")
    return read_own_loss(ast.parse(code).body, anatomy, {"self", "logits", "labels", "attention_mask"})


@pytest.mark.parametrize(
    ("code", "form", "size", "mask", "upcast"),
    [
        (ALIGNED, "aligned", "self.config.vocab_size", "", False),
        ("labels = labels.to(logits.device)\n" + ALIGNED, "aligned", "self.config.vocab_size", "", False),
        (ALIGNED.replace("labels.view", "labels.reshape"), "aligned", "self.config.vocab_size", "", False),
        (ALIGNED.replace("self.config.vocab_size", "logits.size(-1)"), "aligned", "None", "", False),
        (SHIFTED.replace("self.config.vocab_size", "shift_logits.shape[-1]"), "shifted", "None", "", False),
        (ALIGNED.replace("Loss()", "Loss(ignore_index=-100)"), "aligned", "self.config.vocab_size", "", False),
        (ALIGNED.replace("CrossEntropyLoss", "nn.CrossEntropyLoss"), "aligned", "self.config.vocab_size", "", False),
        ("loss = F.cross_entropy(logits.view(-1, 9), labels.view(-1))", "aligned", "9", "", False),
        ("loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())", "aligned", "None", "", False),
        (SHIFTED, "shifted", "self.config.vocab_size", "", False),
        (KEPT, "shifted", "None", "attention_mask", False),
        (UPCAST, "shifted", "self.config.text_config.vocab_size", "attention_mask", True),
        (
            UPCAST[: UPCAST.index("else:")] + UPCAST[UPCAST.index("loss_fct") :],
            "shifted",
            TEXT_VOCAB,
            "attention_mask",
            True,
        ),
        (EACH, "shifted", "9", "attention_mask", False),
    ],
)
def test_a_known_form(code, form, size, mask, upcast):
    found = read(code)
    assert (found.loss, found.logits, found.labels) == ("loss", "logits", "labels")
    assert (found.form, found.vocab_size, found.mask, found.upcast) == (form, size, mask, upcast)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        (ALIGNED, ("Loss()", "Loss(ignore_index=0)")),
        (ALIGNED, ("Loss()", "Loss(label_smoothing=0.1)")),
        (ALIGNED, ("Loss()", 'Loss(reduction="sum")')),
        (ALIGNED, ("Loss()", "Loss(weight)")),
        (ALIGNED, ("labels.view(-1))", "labels.view(-1)) * 2")),
        (ALIGNED, ("labels.view(-1))", "labels.roll(1).view(-1))")),
        (ALIGNED, ("labels.view(-1))", "labels)")),
        (ALIGNED, ("logits.view", "logits.transpose(0, 1).view")),
        (ALIGNED, ("logits.view", "logits.softmax(-1).view")),
        (ALIGNED, ("logits.view", "logits.to(torch.float16).view")),
        (ALIGNED, ("self.config.vocab_size", "sizes.last")),
        (ALIGNED, ("self.config.vocab_size", "self.count(logits).shape[-1]")),
        (ALIGNED, ("self.config.vocab_size", "logits.mT.size(-1)")),
        (ALIGNED, ("self.config.vocab_size", "logits[..., :8].shape[-1]")),
        (ALIGNED, ("labels.view(-1))", "labels.to(one + other.device).view(-1))")),
        (ALIGNED, ("loss_fct = ", "labels = labels.clamp(min=0)\nloss_fct = ")),
        (ALIGNED, ("loss_fct = ", "labels[:, 0] = -100\nloss_fct = ")),
        (ALIGNED, ("loss = ", "loss, other = ")),
        (SHIFTED, ("labels[..., 1:]", "labels[..., :-1]")),
        (SHIFTED, ("labels[..., 1:]", "labels[..., 2:]")),
        (SHIFTED, ("logits[..., :-1, :]", "logits[..., :-2, :]")),
        (SHIFTED, ("labels[..., 1:]", "labels")),
        (KEPT, ("if attention_mask is not None", "if self.training")),
        (KEPT, ("if attention_mask is not None", "if attention_mask is None")),
        (KEPT, ("(labels.device) != 0", "(labels.device) == 0")),
        (KEPT, ("[:, -(logits.shape[1] - 1) :]", "[:, -(logits.shape[1] - 2) :]")),
        (KEPT, ("[:, -(logits.shape[1] - 1) :]", "[:, : logits.shape[1] - 1]")),
        (
            KEPT,
            ("    shift_labels = labels[..., 1:].contiguous()", "    shift_labels = labels[..., :-1].contiguous()"),
        ),
        (UPCAST, ("logits = logits.float()", "logits = logits.half()")),
        (KEPT, ("attention_mask is not None", "self.training")),
        (
            ALIGNED,  # a choice within a value is not read
            ("loss = loss_fct(", "logits = logits if attention_mask is not None else logits\nloss = loss_fct("),
        ),
        (
            KEPT,  # without the one mask, another
            (
                "    shift_logits = logits[..., :-1, :].contiguous()\n    shift_labels = labels[..., 1:].contiguous()",
                "    shift_logits = logits[..., :-1, :][loss_mask[..., 1:] != 0].contiguous()\n"
                "    shift_labels = labels[..., 1:][loss_mask[..., 1:] != 0].contiguous()",
            ),
        ),
    ],
)
def test_another_loss_is_unread(code, change):
    before, after = change
    assert before in code
    assert read(code.replace(before, after)) is None


def test_a_class_of_another_library_is_unread():
    assert read(ALIGNED, "from .losses import CrossEntropyLoss") is None


def test_a_loss_that_another_method_computes_is_named_by_the_call_with_the_labels():
    anatomy = anatomy_of("""
class Head(nn.Module):
    def encode(self, x):
        return x * 2

    def compute(self, rows, labels):
        return F.cross_entropy(rows, labels)

    def forward(self, x, labels):
        rows = self.encode(x)
        return self.compute(rows, labels=labels)
""")
    found = unserved_loss(anatomy.classes["Head"].methods["forward"], "Head", anatomy)
    assert found is not None and ast.unparse(found) == "self.compute(rows, labels=labels)"


WRITES = """
{above}

class Head(nn.Module):
    def forward(self, x, labels):
        loss = {call}
        return Out(loss=loss)
"""


@pytest.mark.parametrize(
    ("above", "call", "is_named"),
    [
        ("from torch.nn import CrossEntropyLoss as Entropy", "Entropy()(x, labels)", True),
        ("from torch.nn.functional import nll_loss as nll", "nll(x, labels)", True),
        ("def cross_entropy(x, labels):\n    return x.sum()", "cross_entropy(x, labels)", False),
        ("from .losses import NLLLoss", "NLLLoss()(x, labels)", False),
    ],
)
def test_a_loss_of_torchs_is_known_by_what_its_name_stands_for(above: str, call: str, is_named: bool):
    anatomy = anatomy_of(WRITES.format(above=above, call=call))
    found = unserved_loss(anatomy.classes["Head"].methods["forward"], "Head", anatomy)
    assert (found is not None and ast.unparse(found)) == (call if is_named else False)
