"""Faults in a checkpoint, its data or its recipe, planted as they happen in practice.

toy = toys.text_toy(folder)                    # qwen3_moe on conversations
recipe = planted(toy, "scaled head", folder)   # a recipe of a copy with the fault
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from toys import Toy, write_rows

from patchgen.runtime import registry
from patchgen.runtime.doctor import Report
from patchgen.runtime.doctor.finding import FAILED, Finding
from patchgen.runtime.train.recipe import Recipe, from_dict


@dataclass
class Spoiled:
    """A copy of a toy: `folder` and `values` are changed by a fault, `place` is for what it writes besides."""

    folder: Path
    values: dict[str, Any]
    place: Path
    model: str
    text_prefix: str
    busiest: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def config(self, **changed: Any) -> None:
        """Changes config.json: of the text model, or, by names that stand there, of the whole."""
        file = self.folder / "config.json"
        values = json.loads(file.read_text())
        for name, value in changed.items():
            owner = values if name in values or "text_config" not in values else values["text_config"]
            owner[name] = value
        if "text_config" in values and "tie_word_embeddings" in changed:
            values["text_config"]["tie_word_embeddings"] = changed["tie_word_embeddings"]
        file.write_text(json.dumps(values))

    def edit(self, *pairs: tuple[str, str]) -> None:
        """The recipe names a generated model that is edited so, each text found once."""
        found = registry.find_model(self.model)
        folder = self.place / found.name
        shutil.copytree(found.directory, folder, ignore=shutil.ignore_patterns("verify*", "__pycache__"))
        text = found.file.read_text()
        for old, new in pairs:
            assert text.count(old) == 1, f"{text.count(old)} places match {old!r}"
            text = text.replace(old, new)
        (folder / found.file.name).write_text(text)
        self.values["model"]["code"] = str(folder)

    def tokenizer_config(self, **changed: Any) -> None:
        file = self.folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    def transform(self, code: str) -> None:
        """The data go through a function `made(row)`."""
        file = self.place / "own_rows.py"
        file.write_text(OWN_ROWS.replace("FOLDER", repr(str(self.folder))) + code)
        self.values["data"]["sources"] = [{"path": str(self.place / "rows.jsonl"), "transform": f"{file}:made"}]
        write_rows(self.place / "rows.jsonl")


OWN_ROWS = """
from transformers import AutoTokenizer
from patchgen.runtime.data.chat import ChatEncoder

TOKENIZER = AutoTokenizer.from_pretrained(FOLDER)


def tokens(row):
    ids, learned = ChatEncoder(TOKENIZER).encode_messages("row", row["messages"], {}, None)
    return ids.tolist(), learned.tolist()

"""


# ------------------------------------------------------------------------------------------------- the faults


def planted(toy: Toy, fault: str, place: Path) -> Recipe:
    """The recipe of a copy of a toy with a fault."""
    place.mkdir(parents=True)
    folder = place / "checkpoint"
    shutil.copytree(toy.folder, folder)
    values = json.loads(json.dumps(toy.values))
    values["model"] |= {
        "source": str(folder),
        "attention": "patchgen_sdpa",
    }  # what the proof decides, and it is skipped
    spoiled = Spoiled(folder, values, place, toy.model, toy.text_prefix, toy.busiest)
    file = folder / "model.safetensors"
    spoiled.tensors = dict(load_file(file))
    before = dict(spoiled.tensors)
    FAULTS[fault].plant(spoiled)
    if any(spoiled.tensors.get(name) is not tensor for name, tensor in before.items()) or len(before) != len(
        spoiled.tensors
    ):
        save_file(
            {name: tensor.contiguous() for name, tensor in spoiled.tensors.items()}, file, metadata={"format": "pt"}
        )
    return from_dict(spoiled.values)


@dataclass(frozen=True)
class Fault:
    """How it is planted, which check finds it (one of several, where the kind of data decides), and with what words."""

    plant: Callable[[Spoiled], None]
    check: str
    words: str


def scaled_head(it: Spoiled) -> None:
    it.config(tie_word_embeddings=False)
    it.tensors["lm_head.weight"] = it.tensors[f"{it.text_prefix}embed_tokens.weight"] * 100


def shifted_labels(it: Spoiled) -> None:
    it.transform(
        "def made(row):\n"
        "    ids, learned = tokens(row)\n"
        "    labels = [token if mark else -100 for token, mark in zip(ids, learned)]\n"
        "    return {'input_ids': ids, 'labels': labels[1:] + [-100]}\n"
    )


def mask_off_by_one(it: Spoiled) -> None:
    it.transform(
        "def made(row):\n"
        "    ids, learned = tokens(row)\n"
        "    learned = learned[1:] + [False]\n"
        "    return {'input_ids': ids, 'labels': [token if mark else -100 for token, mark in zip(ids, learned)]}\n"
    )


def wrong_tokenizer(it: Spoiled) -> None:
    """Special tokens first."""
    file = it.folder / "tokenizer.json"
    values = json.loads(file.read_text())
    special = sorted(token["content"] for token in values["added_tokens"])
    ordered = [*special, *sorted(set(values["model"]["vocab"]) - set(special))]
    values["model"]["vocab"] = {token: place for place, token in enumerate(ordered)}
    for token in values["added_tokens"]:
        token["id"] = ordered.index(token["content"])
    values["added_tokens"].sort(key=lambda token: token["id"])
    file.write_text(json.dumps(values))


def other_vocabulary(it: Spoiled) -> None:
    """The same special tokens, the others in another order."""
    file = it.folder / "tokenizer.json"
    values = json.loads(file.read_text())
    vocabulary = values["model"]["vocab"]
    values["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    file.write_text(json.dumps(values))


def wrong_rope(it: Spoiled) -> None:
    values = json.loads((it.folder / "config.json").read_text())
    rope = values.get("text_config", values)["rope_parameters"]
    it.config(rope_parameters={**rope, "rope_theta": 5e6})


def leaking_packing(it: Spoiled) -> None:
    """Attention by hand, with a mask that knows no documents."""
    it.edit(
        ("attn_output, attn_weights = attention_interface(", "attn_output, attn_weights = eager_attention_forward("),
        (
            "            value_states,\n            attention_mask,\n            dropout=",
            "            value_states,\n            query_states.new_full([query_states.shape[2]] * 2, float('-inf')).triu(1),\n"
            "            dropout=",
        ),
    )


def inactive_kernel(it: Spoiled) -> None:
    it.edit(('if ops.serves("fused_moe"):', 'if ops.serves("fused_moe") and self.act_fn is None:'))


def swapped_gate_and_up(it: Spoiled) -> None:
    for name in list(it.tensors):
        if "gate_proj" in name and "experts" in name:
            other = name.replace("gate_proj", "up_proj")
            it.tensors[name], it.tensors[other] = it.tensors[other], it.tensors[name]
        elif name.endswith("experts.gate_up_proj"):
            dim = 1 if it.tensors[name].shape[1] == 64 else 2
            it.tensors[name] = torch.cat(it.tensors[name].chunk(2, dim=dim)[::-1], dim=dim)


def swapped_in_the_file(it: Spoiled) -> None:
    it.edit(
        (
            "        # patchgen: fused_experts\n",
            "        self = type('Swapped', (), vars(self) | self._modules | self._parameters)\n"
            "        self.gate_up_proj = torch.cat(self.gate_up_proj.chunk(2, dim=1)[::-1], dim=1)\n"
            "        # patchgen: fused_experts\n",
        )
    )


def transposed_expert(it: Spoiled) -> None:
    for name in list(it.tensors):
        if name.endswith(f"layers.0.mlp.experts.{it.busiest}.down_proj.weight"):
            it.tensors[name] = it.tensors[name].mT.clone()
        elif name.endswith("layers.0.mlp.experts.down_proj"):
            changed = it.tensors[name].clone()
            changed[it.busiest] = changed[it.busiest].mT.clone()
            it.tensors[name] = changed


def head_not_tied(it: Spoiled) -> None:
    it.config(tie_word_embeddings=False)
    torch.manual_seed(1)
    it.tensors["lm_head.weight"] = torch.randn_like(it.tensors[f"{it.text_prefix}embed_tokens.weight"]) * 0.02


def two_heads(it: Spoiled) -> None:
    it.tensors["lm_head.weight"] = it.tensors[f"{it.text_prefix}embed_tokens.weight"] + 1


def frozen(it: Spoiled) -> None:
    it.values["model"]["freeze"] = ["*layers*"]


def all_frozen(it: Spoiled) -> None:
    it.values["model"]["freeze"] = ["model.*"]


def wrong_chat_template(it: Spoiled) -> None:
    text = (
        "{%- for message in messages -%}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
        "{%- if message.content is string -%}{{ message.content }}{%- else -%}{%- for part in message.content -%}"
        "{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{ '<|eot_id|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif -%}"
    )
    (it.folder / "chat_template.jinja").write_text(text)


def bf16_router(it: Spoiled) -> None:
    it.edit(
        (
            "router_logits = F.linear(hidden_states, self.weight)",
            "router_logits = F.linear(hidden_states, self.weight).bfloat16().float()",
        )
    )


def router_rounded(it: Spoiled) -> None:
    for name, tensor in it.tensors.items():
        it.tensors[name] = tensor if name.endswith("mlp.gate.weight") else tensor.bfloat16()
    it.values["model"]["dtype"] = "bfloat16"


def truncated_vocabulary(it: Spoiled) -> None:
    name = f"{it.text_prefix}embed_tokens.weight"
    it.tensors[name] = it.tensors[name][:250]
    it.config(vocab_size=250)


def vocabulary_of_zeros(it: Spoiled) -> None:
    name = f"{it.text_prefix}embed_tokens.weight"
    it.tensors[name] = it.tensors[name].clone()
    it.tensors[name][60:] = 0


def wrong_pad_token(it: Spoiled) -> None:
    it.tokenizer_config(pad_token="e")


def wrong_padding_row(it: Spoiled) -> None:
    it.config(pad_token_id=json.loads((it.folder / "tokenizer.json").read_text())["model"]["vocab"]["e"])


FAULTS = {
    "scaled head": Fault(scaled_head, "alternatives", r"the head divided by 10+\."),
    "shifted labels": Fault(shifted_labels, "data|labels", r"shifted to the left by one already"),
    "mask off by one": Fault(mask_off_by_one, "labels", r"begins 1 token\(s\) too early"),
    "wrong tokenizer": Fault(wrong_tokenizer, "tokenizer", r"tokenizer of another model"),
    "other vocabulary": Fault(other_vocabulary, "first loss", r"hardly better than untrained|implausibly high"),
    "wrong rope": Fault(wrong_rope, "alternatives", r"rope_theta = 10000 \(the config has 5e\+06\)"),
    "leaking packing": Fault(leaking_packing, "packing", r"It sees the other documents"),
    "inactive kernel": Fault(inactive_kernel, "kernels", r"fused_moe = 'auto' is inactive: .*mlp.experts"),
    "swapped gate and up": Fault(swapped_gate_and_up, "alternatives", r"gate and up of all experts swapped"),
    "swapped in the file": Fault(swapped_in_the_file, "kernels", r"layers\.0\.mlp\.experts is the first"),
    "transposed expert": Fault(
        transposed_expert, "alternatives", r"layers\.0\.mlp\.experts\.down_proj\[\d\] transposed"
    ),
    "tied head that is not": Fault(head_not_tied, "alternatives", r"the head tied to the embeddings"),
    "two heads": Fault(two_heads, "weights", r"lm_head"),
    "frozen by mistake": Fault(frozen, "trained parameters", r"model\.freeze = \['\*layers\*'\] freezes every layer"),
    "all frozen": Fault(all_frozen, "recipe", r"leaves nothing to train"),
    "wrong chat template": Fault(wrong_chat_template, "chat template", r"'<\|start_header_id\|>'.* no token"),
    "bf16 router": Fault(bf16_router, "router", r"fit into bfloat16"),
    "router rounded": Fault(router_rounded, "weights", r"mlp\.gate\.weight.* rounds them"),
    "truncated vocabulary": Fault(truncated_vocabulary, "tokenizer", r"tokens have no embedding"),
    "vocabulary of zeros": Fault(vocabulary_of_zeros, "weights", r"embeddings of zeros"),
    "wrong pad token": Fault(wrong_pad_token, "padding", r"'e' = \d+ occurs \d+ times in the texts"),
    "wrong padding row": Fault(wrong_padding_row, "padding", r"gives that row no gradient"),
}
"""The fifteen faults that the doctor must find, some of them in a second place."""
SECOND_PLACES = (
    "other vocabulary",
    "swapped in the file",
    "two heads",
    "all frozen",
    "router rounded",
    "vocabulary of zeros",
    "wrong padding row",
)
PROMISED = tuple(fault for fault in FAULTS if fault not in SECOND_PLACES)


def finding(report: Report, fault: str) -> Finding:
    """What found a fault; where nothing did, what the check says that should have."""
    wanted = FAULTS[fault]
    found = [report[name] for name in wanted.check.split("|")]
    return next((one for one in found if is_found(one, fault)), found[0])


def is_found(found: Finding, fault: str) -> bool:
    """Whether a check failed with the words that name the fault, and says what to do."""
    return (
        found.status == FAILED
        and bool(re.search(FAULTS[fault].words, found.summary, re.DOTALL))
        and bool(found.advice)
    )
