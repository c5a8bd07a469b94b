"""Whether every valid config of a causal text type has a small form that runs, or is refused in one sentence.

    python benchmarks/bench_small_configs.py                         # all types; a row into results_small_configs.csv
    python benchmarks/bench_small_configs.py --types glm4 cwm        # prints the rows, writes none

A config is valid if its class takes it. Varied: number of layers (1 to 6), key/value heads, experts, tied embeddings, ids of
special tokens, small vocabularies, windows, lists with an entry per layer. Each different small form is built once, and does one
forward on the CPU.

    configs    valid ones                      forms      different small forms
    refused    before a run, in a sentence     fails      small forms that upstream's own class does not run
    errors     anything else: a traceback for who uses it
"""

from __future__ import annotations

import argparse
import json
import logging
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import result_rows
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.shrink import shrink, why_padding_has_no_row
from patchgen.runtime.verify.small_config import (
    REFUSALS,
    UPSTREAM_REFUSALS,
    SmallConfigError,
    own_fields,
    small_config,
)

RESULTS = Path(__file__).with_name("results_small_configs.csv")
COLUMNS = (
    "date",
    "transformers",
    "torch",
    "types",
    "configs",
    "forms",
    "ran",
    "refused",
    "fails",
    "errors",
    "seconds",
)
Given = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--types", nargs="+", help="default: all causal text types of the release")
    parser.add_argument("--every", type=int, default=1, help="only every n-th type")
    parser.add_argument("--configs-only", action="store_true", help="build no model")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    types = options.types or causal_text_types()[:: options.every]
    start, counts = time.process_time(), Counter(types=len(types))
    for model_type in types:
        counts += examine(model_type, builds=not options.configs_only)
    row: Given = {name: counts[name] for name in COLUMNS[3:-1]} | {"seconds": round(time.process_time() - start)}
    print(row)
    if not (options.types or options.configs_only):
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        print(result_rows.append(RESULTS, COLUMNS, [row], **versions))


def causal_text_types() -> list[str]:
    """Types with a class for causal language modeling that takes a text config, which is valid as it is declared."""
    types = []
    for model_type, head in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        config_class = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401 (lazy)
        if config_class is None or config_class.sub_configs or not hasattr(transformers, head):
            continue
        try:
            small_config(config_class)
        except SmallConfigError:
            continue
        types.append(model_type)
    return types


def examine(model_type: str, *, builds: bool) -> Counter[str]:
    """The counts of a type; prints a line for each config without a small form that runs."""
    counts: Counter[str] = Counter()
    config_class = CONFIG_MAPPING[model_type]
    ran: dict[str, str] = {}
    for name, given in variations(config_class):
        try:
            config = config_class(**given)
        except REFUSALS:
            continue
        counts["configs"] += 1
        if reason := why_padding_has_no_row(config):
            counts["refused"] += 1
            print(f"{model_type} {name}: refused: {reason}")
            continue
        try:
            small = shrink(config).config
        except SmallConfigError as refusal:
            counts["refused"] += 1
            print(f"{model_type} {name}: refused: {refusal.reason[:200]}")
            continue
        except Exception as error:  # the row says how many: a run would end with this traceback
            counts["errors"] += 1
            print(f"{model_type} {name}: error: {type(error).__name__}: {error}"[:200])
            continue
        form = json.dumps(small.to_dict(), default=str, sort_keys=True)
        if form not in ran:
            counts["forms"] += 1
            ran[form] = why_not_run(model_type, small) if builds else ""
        if ran[form]:
            counts["fails"] += 1
            print(f"{model_type} {name}: fails: {ran[form][:200]}")
        else:
            counts["ran"] += builds
    return counts


def why_not_run(model_type: str, config: PreTrainedConfig) -> str:
    """What upstream's class raises in a forward with this config; "" if nothing."""
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    try:
        with torch.no_grad():
            model = build_model(model_class, config)
            model(**text_cases(config, model_class)[0].batch, use_cache=False)
    except UPSTREAM_REFUSALS as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return ""


def variations(config_class: type[PreTrainedConfig]) -> Iterator[tuple[str, Given]]:
    """Names and arguments of configs, valid or not."""
    default = config_class()
    fields = own_fields(config_class).keys() | {"tie_word_embeddings"}
    own = {name: config_class.attribute_map.get(name, name) for name in COMMON}

    def has(name: str) -> bool:
        return own[name] in fields or own[name] in vars(default)

    yield "default", {}
    for count in range(1, 7):
        layers = {own["num_hidden_layers"]: count}
        yield f"{count} layers", layers
        if "output_router_logits" in fields:
            yield f"{count} layers, router loss", layers | {"output_router_logits": True}
        if count > 1:
            yield f"{count} layers, as many ends", layers | {"eos_token_id": list(range(1, count + 1))}
    few = {own["num_hidden_layers"]: 3}
    heads = vars(default).get(own["num_attention_heads"])
    if has("num_key_value_heads") and type(heads) is int:
        for count in dict.fromkeys((1, heads)):
            yield f"{count} key/value heads", few | {own["num_key_value_heads"]: count}
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if name in fields and type(vars(default).get(name)) is int:
            for count in (8, 64):
                yield f"{count} experts", few | {name: count}
    for is_tied in (True, False):
        yield f"tied: {is_tied}", few | {"tie_word_embeddings": is_tied}
    vocab = vars(default).get(own["vocab_size"])
    if type(vocab) is int:
        yield "pad: last", few | {"pad_token_id": vocab - 1}
        yield "pad: none", few | {"pad_token_id": None}
        yield "pad: beyond", few | {"pad_token_id": vocab}
        for size in (16, 40, 100):
            ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": size - 1}
            yield f"vocabulary {size}", few | {own["vocab_size"]: size} | ids
    if has("sliding_window"):
        for window in (None, 4, 512):
            yield f"window {window}", few | {own["sliding_window"]: window}
            if "use_sliding_window" in fields:
                yield f"window {window}, on", few | {own["sliding_window"]: window, "use_sliding_window": True}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(vars(default).get(name) or ()))
        for kind in kinds:
            yield f"all {kind}", few | {name: [kind] * 3}
        if len(kinds) > 1:
            yield f"{name} in turn", {own["num_hidden_layers"]: 2 * len(kinds), name: kinds * 2}
            yield f"{name} once", {own["num_hidden_layers"]: len(kinds), name: kinds}


COMMON = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "sliding_window")

if __name__ == "__main__":
    main()
