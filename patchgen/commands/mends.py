"""What transformers 5 no longer has or does otherwise, as files written for transformers 4 use it, with the line to write instead.

`patchgen inspect FILE` names what a file needs, an error of `patchgen verify` the row that explains it, and
docs/from_transformers_4.md is the whole table (`python -m patchgen.commands.mends` writes it).
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path("docs/from_transformers_4.md")
RELEASE = "5.23.0"
"""The release of transformers in which each row was tried."""


@dataclass(frozen=True)
class Mend:
    """A row: what to find in a file, what it is in transformers 5, and what to write.

    Attributes:
        name: what the file uses, as people would look for it.
        find: a regular expression for a line of code, without comments and docstrings; "" where only running the file tells.
        now: what transformers 5 has in its place.
        write: the line or the change, as a person writes it.
        error: a regular expression for the error that a run of the file ends in, as `Type: message`; "" where none is its own.
    """

    name: str
    find: str
    now: str
    write: str
    error: str = ""


IMPORTS, CACHES, CONFIGS, MODELS, LOSSES = "Imports", "Caches", "Configurations", "Models", "Masks and heads"
MENDS: dict[str, tuple[Mend, ...]] = {
    IMPORTS: (
        Mend(
            "is_torch_fx_available",
            r"\bimport\b.*\bis_torch_fx_available\b",
            "gone",
            "def is_torch_fx_available(): return False",
            r"cannot import name 'is_torch_fx_available'",
        ),
        Mend(
            "find_pruneable_heads_and_indices, prune_conv1d_layer",
            r"\b(find_pruneable_heads_and_indices|prune_conv1d_layer)\b",
            "gone, as is the pruning of heads",
            "remove the import and the methods `prune_heads` and `_prune_heads`",
            r"cannot import name '(find_pruneable_heads_and_indices|prune_conv1d_layer)'",
        ),
        Mend(
            "apply_chunking_to_forward, prune_linear_layer, Conv1D of modeling_utils",
            r"from transformers\.modeling_utils import .*\b(apply_chunking_to_forward|prune_linear_layer|Conv1D)\b",
            "in transformers.pytorch_utils",
            "from transformers.pytorch_utils import Conv1D, apply_chunking_to_forward, prune_linear_layer",
            r"cannot import name '(apply_chunking_to_forward|prune_linear_layer|Conv1D)'",
        ),
        Mend(
            "SequenceSummary, PoolerAnswerClass of modeling_utils",
            r"from transformers\.modeling_utils import .*\b(SequenceSummary|Pooler\w+)\b",
            "gone",
            "remove the heads that use it: `--head CLASS` generates for the others",
            r"cannot import name '(SequenceSummary|Pooler\w+)'",
        ),
        Mend(
            "transformers.utils.model_parallel_utils",
            r"\bmodel_parallel_utils\b|\bdef (de)?parallelize\b",
            "gone, as is `parallelize`",
            "remove the import and the methods `parallelize` and `deparallelize`",
            r"No module named 'transformers\.utils\.model_parallel_utils'",
        ),
        Mend(
            "LossKwargs",
            r"\bimport\b.*\bLossKwargs\b",
            "TransformersKwargs",
            "from transformers.utils import TransformersKwargs as LossKwargs",
            r"cannot import name 'LossKwargs'",
        ),
        Mend(
            "OutputRecorder of transformers.utils.generic",
            r"from transformers\.utils\.generic import .*\bOutputRecorder\b",
            "in transformers.utils.output_capturing",
            "from transformers.utils.output_capturing import OutputRecorder",
            r"cannot import name 'OutputRecorder'",
        ),
        Mend(
            "is_flash_attn_available",
            r"\bimport\b.*\bis_flash_attn_available\b",
            "is_flash_attn_2_available",
            "from transformers.utils import is_flash_attn_2_available as is_flash_attn_available",
            r"cannot import name 'is_flash_attn_available'",
        ),
        Mend(
            "cached_property of transformers.utils",
            r"from transformers\.utils import .*\bcached_property\b",
            "Python's own",
            "from functools import cached_property",
            r"cannot import name 'cached_property'",
        ),
        Mend(
            "transformers.deepspeed",
            r"\btransformers\.deepspeed\b",
            "transformers.integrations.deepspeed",
            "from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled",
            r"No module named 'transformers\.deepspeed'",
        ),
        Mend(
            "transformers.onnx",
            r"\btransformers\.onnx\b",
            "gone",
            "remove the import and the class `...OnnxConfig` of the configuration",
            r"No module named 'transformers\.onnx'",
        ),
        Mend(
            "is_tf_available, is_flax_available, load_tf_weights_in_*",
            r"\bimport\b.*\b(is_tf_available|is_flax_available|load_tf_weights\w*)\b",
            "gone, with TensorFlow and Flax",
            "remove the import, the function and the attribute `load_tf_weights`",
            r"cannot import name '(is_tf_available|is_flax_available|load_tf_weights\w*)'",
        ),
        Mend(
            "GreedySearchOutput, SampleOutput, BeamSearchScorer, top_k_top_p_filtering, ...",
            r"\bimport\b.*\b(GreedySearch\w*Output|Sample\w*Output|BeamSearchScorer|top_k_top_p_filtering)\b",
            "gone: `generate` has one loop",
            "remove the import and the file's own methods of generation",
            r"cannot import name '(GreedySearch\w*|Sample\w*Output|BeamSearchScorer|top_k_top_p_filtering)'",
        ),
        Mend(
            "AutoModelForVision2Seq, AutoModelWithLMHead",
            r"\bAutoModel(ForVision2Seq|WithLMHead)\b",
            "AutoModelForImageTextToText, AutoModelForCausalLM",
            "from transformers import AutoModelForImageTextToText",
            r"cannot import name 'AutoModel(ForVision2Seq|WithLMHead)'",
        ),
        Mend(
            "SinkCache, HybridCache, MambaCache",
            r"\bimport\b.*\b(SinkCache|HybridCache|MambaCache)\b",
            "gone: a DynamicCache(config=...) has the layers that its config names",
            "DynamicCache",
            r"cannot import name '(SinkCache|HybridCache|MambaCache)'",
        ),
        Mend(
            "another model's LlamaFlashAttention2, LLAMA_ATTENTION_CLASSES, _make_causal_mask, ...",
            r"from transformers\.models\.\S+ import .*(FlashAttention2|SdpaAttention|_ATTENTION_CLASSES|_make_causal_mask"
            r"|_expand_mask|\w+ScalingRotaryEmbedding|_INPUTS_DOCSTRING)",
            "gone: one attention class per model, through ALL_ATTENTION_FUNCTIONS",
            "copy the class or function from the release of transformers that the file names into the file",
            r"cannot import name '(\w+(FlashAttention2|SdpaAttention|_ATTENTION_CLASSES|ScalingRotaryEmbedding"
            r"|_INPUTS_DOCSTRING)|_make_causal_mask|_expand_mask)'",
        ),
    ),
    CACHES: (
        Mend(
            "DynamicCache.from_legacy_cache(x), x.to_legacy_cache()",
            r"\b(from|to)_legacy_cache\b",
            "gone: caches are objects",
            "DynamicCache() where there is none; leave `to_legacy_cache()` out",
            r"no attribute '(from|to)_legacy_cache'",
        ),
        Mend(
            "cache.get_usable_length(n, layer)",
            r"\bget_usable_length\b",
            "gone",
            "cache.get_seq_length(layer)",
            r"no attribute 'get_usable_length'",
        ),
        Mend(
            "cache.seen_tokens, cache._seen_tokens",
            r"\._?seen_tokens\b",
            "gone",
            "cache.get_seq_length()",
            r"no attribute '_?seen_tokens'",
        ),
        Mend(
            "cache.get_max_cache_shape()",
            r"\bget_max_cache_shape\b",
            "gone from the cache, kept by its layers",
            "cache.layers[0].get_max_cache_shape()",
            r"no attribute 'get_max_cache_shape'",
        ),
        Mend(
            "cache.key_cache[i], cache.value_cache[i], cache[i]",
            r"\b(past_key_values?|cache)\.(key|value)_cache\b",
            "layers",
            "cache.layers[i].keys, cache.layers[i].values",
            r"no attribute '(key|value)_cache'|'DynamicCache' object is not subscriptable",
        ),
    ),
    CONFIGS: (
        Mend(
            "config.rope_scaling is None",
            r"\brope_scaling is (not )?None",
            'filled in: {"rope_type": "default", "rope_theta": ...}',
            'config.rope_scaling.get("rope_type", "default") == "default"',
        ),
        Mend(
            'config.rope_scaling["type"]',
            r"""\brope_scaling\[["']type["']\]""",
            "`rope_type`",
            'config.rope_scaling["rope_type"]',
            r"KeyError: 'type'",
        ),
        Mend(
            "config.rope_theta of a configuration of transformers",
            r"\bconfig\.rope_theta\b",
            "in rope_parameters; a configuration of your own keeps what its __init__ sets",
            'config.rope_parameters["rope_theta"]',
            r"no attribute 'rope_theta'",
        ),
        Mend(
            'ROPE_INIT_FUNCTIONS["default"]',
            r"""\bROPE_INIT_FUNCTIONS\[""",
            "without the entry `default`",
            "compute it: 1.0 / base ** (torch.arange(0, dim, 2).float() / dim), and the factor 1.0",
            r"KeyError: 'default'",
        ),
        Mend(
            "config.pad_token_id, is_decoder, add_cross_attention, pruned_heads, ... that the configuration does not set",
            r"\bconfig\.(is_decoder|add_cross_attention|pruned_heads|cross_attention_hidden_size|torchscript"
            r"|tie_encoder_decoder|max_length|num_beams|sep_token_id|pretraining_tp)\b",
            "no longer an attribute of every configuration",
            'set it in the configuration\'s __init__, or read getattr(config, "is_decoder", False)',
            r"Config' object has no attribute '(pad_token_id|bos_token_id|eos_token_id|use_cache|is_decoder"
            r"|add_cross_attention|pruned_heads|cross_attention_hidden_size|torchscript|tie_encoder_decoder|max_length"
            r"|num_beams|sep_token_id|tie_word_embeddings|pretraining_tp)'",
        ),
    ),
    MODELS: (
        Mend(
            '_tied_weights_keys = ["lm_head.weight"]',
            r"\b_tied_weights_keys\s*=\s*\[",
            "a dictionary: tied name -> name of the source",
            '_tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}',
            r"'list' object has no attribute '(keys|items|values|update)'",
        ),
        Mend(
            "self.init_weights() at the end of __init__",
            r"\bself\.init_weights\(\)",
            "post_init() also prepares tied weights",
            "self.post_init()",
            r"no attribute 'all_tied_weights_keys'",
        ),
        Mend(
            "a model without config_class",
            r"\bconfig_class\s*=\s*None",
            "taken from the annotation of __init__, or named",
            "config_class = MyConfig in the class that inherits from PreTrainedModel",
            r"config_class is None|'NoneType' object has no attribute '(model_type|sub_configs)'",
        ),
        Mend(
            "_supports_sdpa = True with a table of attention classes that has no sdpa",
            "",
            "unchanged; the file must have what it says",
            "_supports_sdpa = False",
            r"KeyError: 'sdpa'",
        ),
        Mend(
            "_supports_flash_attn_2, _supports_cache_class",
            r"\b_supports_(flash_attn_2|cache_class)\b",
            "_supports_flash_attn; every model takes a cache",
            "_supports_flash_attn = True",
        ),
        Mend(
            "def _set_gradient_checkpointing(self, module, value=False)",
            r"def _set_gradient_checkpointing\(self, module",
            "transformers sets `gradient_checkpointing` itself",
            "remove the method",
            r"_set_gradient_checkpointing|checkpointing",
        ),
        Mend(
            "self.get_head_mask(head_mask, n)",
            r"\bself\.get_head_mask\(",
            "gone, as are head masks",
            "head_mask = [None] * n",
            r"no attribute 'get_head_mask'",
        ),
        Mend(
            "self.invert_attention_mask(mask), self.get_extended_attention_mask(mask, shape)",
            r"\bself\.(invert_attention_mask|get_extended_attention_mask)\(",
            "gone",
            "(1.0 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min",
            r"no attribute '(invert_attention_mask|get_extended_attention_mask)'",
        ),
        Mend(
            "register_buffer(..., persistent=False) of values that __init__ computes",
            "",
            "without values after from_pretrained, which builds on the meta device; a run computes them again",
            "compute them in `_init_weights` too, or load weights with `load_state_dict`",
        ),
    ),
    LOSSES: (
        Mend(
            "class MyForCausalLM(MyPreTrainedModel) with prepare_inputs_for_generation",
            r"^class \w+(ForCausalLM|LMHeadModel)\((?!.*GenerationMixin)",
            "models that generate inherit from GenerationMixin themselves",
            "class MyForCausalLM(MyPreTrainedModel, GenerationMixin):",
            r"has no attribute 'generate'",
        ),
        Mend(
            "a forward that raises on arguments that it does not know (`**deprecated_arguments`)",
            r"\*\*deprecated_arguments",
            "a training step passes num_items_in_batch, which a loss may ignore",
            'remove `raise ValueError("Got unexpected arguments ...")`',
            r"Got unexpected arguments",
        ),
        Mend(
            "def load_balancing_loss_func(gate_logits, num_experts, top_k) of transformers 4.36, without a mask",
            r"^def load_balancing_loss_func\((?!.*attention_mask)",
            "takes the attention mask too, so that padding does not count",
            "copy the function from the installed transformers/models/mixtral/modeling_mixtral.py, and pass attention_mask",
        ),
        Mend(
            "attention classes chosen by config._attn_implementation",
            "",
            "unchanged: the file's own table; a run uses the entry that it was proven with",
            'an entry "eager" at least',
            r"KeyError: 'eager'",
        ),
        Mend(
            "a head that returns tuples, or no loss",
            "",
            "ModelOutput with `loss`, of the mean over labels that are not -100",
            "CausalLMOutputWithPast(loss=loss, logits=logits)",
            r"'tuple' object has no attribute 'loss'",
        ),
    ),
}


@dataclass(frozen=True)
class Needed:
    """A row that a file needs, and the first line that has it."""

    line: int
    mend: Mend


def needed(text: str) -> list[Needed]:
    """The rows that a file needs, by line."""
    lines = _code_lines(text)
    found: list[Needed] = []
    for mend in every():
        first = next((line for line, code in lines.items() if mend.find and re.search(mend.find, code)), None)
        if first is not None:
            found.append(Needed(first, mend))
    return sorted(found, key=lambda one: one.line)


def explaining(error: BaseException) -> Mend | None:
    """The row whose error this is."""
    message = f"{type(error).__name__}: {error}"
    return next((mend for mend in every() if mend.error and re.search(mend.error, message)), None)


def every() -> Iterator[Mend]:
    """All rows, in the order of the page."""
    for rows in MENDS.values():
        yield from rows


def _code_lines(text: str) -> dict[int, str]:
    """Line number -> logical line of code on one line, without comments; docstrings have none."""
    lines: dict[int, str] = {}
    parts: list[tokenize.TokenInfo] = []
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if len(parts) > 1 or (parts and parts[0].type != tokenize.STRING):
                lines[parts[0].start[0]] = _joined(parts)
            parts = []
        elif token.type not in skipped:
            parts.append(token)
    return lines


def _joined(parts: list[tokenize.TokenInfo]) -> str:
    """Tokens as one line: with a space where the source has one or a line ends."""
    text = ""
    for before, token in zip((None, *parts), parts, strict=False):
        text += " " if before is not None and before.end != token.start and before.string not in "([{" else ""
        text += token.string
    return text


def page() -> str:
    """docs/from_transformers_4.md."""
    head = f"""# A file written for transformers 4

Modeling files outside transformers are mostly written for transformers 4. `patchgen generate` reads them as text and does not
mind; what they compute is proven by running them, with the transformers that is installed. Each row below is something that
such a file may use and transformers 5 (tried with {RELEASE}) no longer has or does otherwise, and what to write instead:

    patchgen inspect modeling_mine.py       # ends with the rows that this file needs, with their lines
    patchgen verify --code FOLDER ...       # an error of the file itself names the row that explains it

Mend the file, not the generated one, and generate again. This page is written by `python -m patchgen.commands.mends`.
"""
    sections: list[str] = []
    for title, rows in MENDS.items():
        table = ["| the file has | transformers 5 | write |", "| --- | --- | --- |"]
        table += [f"| {_cell(row.name)} | {_cell(row.now)} | {_cell(row.write)} |" for row in rows]
        sections.append("\n".join([f"## {title}", "", *table]))
    return head + "\n" + "\n\n".join(sections) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
