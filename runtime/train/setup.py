"""What a run on this rank needs besides the model: data, export, listeners and profiler, from the recipe."""

from __future__ import annotations

import contextlib
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile, schedule, tensorboard_trace_handler
from transformers import PreTrainedModel

from patchgen.runtime import random_state
from patchgen.runtime.attention_kinds import configs_of
from patchgen.runtime.checkpoint import export_pretrained
from patchgen.runtime.checkpoint.safetensor_files import CONFIG, INCOMPLETE, weight_file_names
from patchgen.runtime.checkpoint.vocabulary import input_embeddings
from patchgen.runtime.data import DataConfig, DataError, Loader, build_loader, train_tokenizer
from patchgen.runtime.data.literals import added_tokens, not_for_training
from patchgen.runtime.data.text import digest
from patchgen.runtime.objectives import encoder_decoder
from patchgen.runtime.parallel.collectives import broadcast_object, gather_objects
from patchgen.runtime.train import architecture, run_lock
from patchgen.runtime.train import model as models
from patchgen.runtime.train.lora import FOLDER as ADAPTERS
from patchgen.runtime.train.page import RunPage
from patchgen.runtime.train.recipe import ModelConfig, Recipe, RecipeError, flatten, to_dict
from patchgen.runtime.train.records import Listener
from patchgen.runtime.train.run_log import RunLog, Tracker, read_summary
from patchgen.runtime.train.view import progress_view
from patchgen.runtime.verify.verdict import one_line

EXPORT = "export"  # the folder of a run's model
# How long ranks wait to see a file of rank 0: network file systems cache a missing file for up to a minute.
SHARED_SECONDS = 90.0
TOKEN_FIELD = re.compile(r".*token_(ids?|index|idx)")
"""The names of fields of a config that are ids of tokens."""
PADDING_FIELD = "pad_token_id"
MEDIA_FIELD = re.compile(
    r"(.*_)?(image|video|audio|vision|visual|media|frame|boi|eoi|boa|eoa)(_.*)?_token_(ids?|index|idx)"
)
"""The names of those that stand for media, and where these begin and end."""


@dataclass(frozen=True)
class DataParts:
    """What turns samples into model inputs; None where the loader has a default or needs none."""

    tokenizer: Any = None
    processor: Any = None
    position_function: Any = None


def data_parts(recipe: Recipe) -> DataParts:
    """The tokenizer and processor of `model.source`; for a bare model type, a tokenizer trained on the recipe's data.

    Raises:
        RecipeError: a checkpoint without a fitting tokenizer; multimodal data without a processor, as for a bare model type.
        DataError: no tokenizer can be trained on the data, as in `train_tokenizer`.
    """
    from transformers import AutoTokenizer

    architecture.prepare(recipe)
    source, config = recipe.model.source, models.read_config(recipe.model)
    if models.is_model_type(source):
        if recipe.has_media:
            raise _no_processor(source, _IS_TYPE)
        return DataParts(tokenizer=train_tokenizer(recipe.data, vocab_size=config.get_text_config().vocab_size))
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise _no_tokenizer("model.source", source, error) from error
    require_fitting(tokenizer, config, source)
    if not recipe.has_media:
        return DataParts(tokenizer)
    # Positions depend on the config alone, so a model on the meta device provides the function for the data workers.
    # Models with plain consecutive positions have none.
    get_function = getattr(models.build_on_meta(recipe), "get_position_id_func", None)
    return DataParts(tokenizer, load_processor(source), get_function() if get_function else None)


def _no_tokenizer(key: str, source: str, error: Exception) -> RecipeError:
    """The error for a source, under this key of the recipe, without a tokenizer that can be read."""
    return RecipeError(f"{key} = '{source}' has no tokenizer that can be read here: {one_line(error)}")


def load_processor(source: str) -> Any:
    """The processor that comes with a model.

    Raises:
        RecipeError: there is none, as for a bare model type, or a package that it needs is missing.
    """
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    if models.is_model_type(source):
        raise _no_processor(source, _IS_TYPE)
    try:
        processor = AutoProcessor.from_pretrained(source, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise _no_processor(source, " ".join(str(error).split())) from error
    if isinstance(processor, PreTrainedTokenizerBase):
        raise _no_processor(source, f"transformers loads only a {type(processor).__name__} from its files.")
    return processor


_IS_TYPE = (
    "it is a model type. To fix: name a checkpoint with a processor, a folder or a name on the Hugging Face Hub."
)


def _no_processor(source: str, why: str) -> RecipeError:
    return RecipeError(f"model.source = '{source}' has no usable processor, which data.kind = multimodal needs: {why}")


def require_fitting(tokenizer: Any, config: Any, source: str) -> None:
    """Raises RecipeError for a tokenizer that encodes no training data, with special tokens only, or with tokens that the model
    has no embedding for.
    """
    if added_tokens(tokenizer) is None:
        raise RecipeError(f"The tokenizer of model.source = '{source}' {not_for_training(tokenizer)}")
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise RecipeError(
            f"model.source = '{source}' has no tokenizer: the one that transformers loads has {len(tokenizer)} tokens, "
            "all of them special. Put the tokenizer's files (tokenizer.json, tokenizer_config.json) beside config.json."
        )
    size = getattr(config.get_text_config(), "vocab_size", None)
    if size is None or len(tokenizer) <= size:
        return
    # Placeholder tokens of media may be out of range: their embeddings are never looked up.
    exempt = placeholder_ids(config)
    outside = {
        token: token_id
        for token, token_id in tokenizer.get_vocab().items()
        if token_id >= size and token_id not in exempt
    }
    if outside:
        examples = ", ".join(f"{token!r} = {outside[token]}" for token in sorted(outside, key=outside.__getitem__)[:3])
        raise RecipeError(
            f"The tokenizer of model.source = '{source}' has {len(tokenizer)} tokens, but the model has a vocab_size of "
            f"{size}: {len(outside)} tokens have no embedding ({examples}). If tokens were added to it on purpose, set "
            "model.resize_vocab: {}, which grows the model to the tokenizer; otherwise use the tokenizer that belongs to the model."
        )


def placeholder_ids(config: Any) -> set[int]:
    """The ids of padding and of media tokens, whose embeddings need no training, by the names of their fields in a config and its
    sub-configs. An id that another field gives to a token of text, such as the end of a text that also pads, is not among them;
    nor is the padding of another sub-config than the text's, which is of another vocabulary.
    """
    placeholders, text = set[int](), set[int]()
    text_configs = config, config.get_text_config()
    for _, current in configs_of(config):
        is_of_text = any(current is one for one in text_configs)
        for name, value in vars(current).items():
            if TOKEN_FIELD.fullmatch(name) and (is_of_text or name != PADDING_FIELD):
                ids = value if isinstance(value, list | tuple) else [value]
                is_placeholder = name == PADDING_FIELD or MEDIA_FIELD.fullmatch(name)
                (placeholders if is_placeholder else text).update(i for i in ids if type(i) is int)
    return placeholders - text


def row_check(model: PreTrainedModel) -> Callable[[Mapping[str, Any]], None]:
    """What a full micro-batch has to pass, on the host, before any rank starts its step: ids within the vocabulary, of which a GPU
    says no more than that an assertion failed, and what the model's kind asks for. Transforms and processors may give any ids.
    """
    table, own_check = input_embeddings(model), encoder_decoder.row_check(model)
    num_rows = table.num_embeddings if isinstance(table, torch.nn.Embedding) else None
    exempt = placeholder_ids(model.config)

    def check(row: Mapping[str, Any]) -> None:
        for name in {"input_ids", "labels"} & row.keys() if num_rows is not None else ():
            outside = sorted({*row[name][row[name] >= num_rows].tolist()} - exempt)
            if outside:
                raise DataError(
                    f"{name} of a row have ids that the model has no embedding for, {', '.join(map(str, outside[:5]))}: it has "
                    f"{num_rows} rows. If the ids are meant, set model.resize_vocab: {{to: {outside[-1] + 1}}}; otherwise look "
                    "for the transform or processor that gives them."
                )
        if own_check is not None:
            own_check(row)

    return check


def require_same_token_ids(source: str, teacher: str) -> None:
    """Raises RecipeError for a teacher with `differing_ids`. A name on the Hub, a bare model type and a folder without a
    tokenizer are not compared.
    """
    if not (Path(source).is_dir() and Path(teacher).is_dir()):
        return
    own, other = _read_tokenizer(source, "model.source"), _read_tokenizer(teacher, "teacher.source")
    if own is None or other is None or not (different := differing_ids(own, other)):
        return
    examples = ", ".join(f"{index} is {token!r} and {others!r}" for index, (token, others) in [*different.items()][:3])
    raise RecipeError(
        f"teacher.source = '{teacher}' has other tokens than model.source = '{source}': of {len(own)} ids {len(different)} "
        f"mean another token ({examples}). To fix: take a teacher of the same family, with the tokenizer of the model."
    )


def differing_ids(own: Any, other: Any) -> dict[int, tuple[str, str]]:
    """The ids that mean different tokens in two tokenizers, in order, with both tokens. Special tokens are left out, which
    releases of one family rename, and tokens that only one has, such as placeholders of media.
    """
    first, second = _ordinary_tokens(own), _ordinary_tokens(other)
    return {
        index: (first[index], second[index])
        for index in sorted(first)
        if first[index] != second.get(index, first[index])
    }


def _ordinary_tokens(tokenizer: Any) -> dict[int, str]:
    added = added_tokens(tokenizer)
    if added is None:  # special tokens are known by their ids alone
        special = set(tokenizer.all_special_ids)
    else:
        special = {index for index, token in added.items() if token.special}
    return {index: token for token, index in tokenizer.get_vocab().items() if index not in special}


def _read_tokenizer(folder: str, key: str) -> Any:
    """A folder's tokenizer; None if it has none, which `data_parts` refuses where one is needed.

    Raises:
        RecipeError: there is one, but a package that it needs is missing.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError as error:
        raise _no_tokenizer(key, folder, error) from error
    except (OSError, ValueError):
        return None


def loader_of_group(config: DataConfig, parts: DataParts, index: int, num_groups: int) -> Loader:
    """The loader of batch group `index` of `num_groups`."""
    return build_loader(
        config,
        tokenizer=parts.tokenizer,
        processor=parts.processor,
        position_function=parts.position_function,
        batch_index=index,
        num_batches=num_groups,
    )


def require_same_recipe(recipe: Recipe) -> None:
    """Refuses ranks that were started with different recipes (collective).

    Raises:
        RecipeError: on all ranks, with the keys that differ from those of rank 0.
    """
    local = flatten(to_dict(recipe))
    digests = gather_objects(digest(local))
    other = next((rank for rank, other_digest in enumerate(digests) if other_digest != digests[0]), None)
    if other is None:
        return
    first, second = broadcast_object(local), broadcast_object(local, other)
    keys = [key for key in first | second if first.get(key) != second.get(key)]
    lines = "".join(f"\n  {key}: {first.get(key)!r} on rank 0, {second.get(key)!r} on rank {other}" for key in keys)
    raise RecipeError(f"The machines were started with different recipes; give all of them the same:{lines}")


def require_shared(directory: Path) -> None:
    """Refuses a run directory that is not shared by all machines (collective).

    Raises:
        RecipeError: on all ranks, with those that do not see a file that rank 0 writes there.
    """
    path = directory / broadcast_object(f".seen-by-all-{uuid.uuid4().hex}")
    refusal = ""
    if dist.get_rank() == 0:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            refusal = str(run_lock.not_writable(directory, error))
    if refusal := broadcast_object(refusal):
        raise RecipeError(refusal)
    deadline = time.monotonic() + SHARED_SECONDS
    while not (is_visible := path.exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    answers = gather_objects((is_visible, socket.gethostname()))
    if dist.get_rank() == 0:
        path.unlink()
    failed = [f"{rank} ({host})" for rank, (was_visible, host) in enumerate(answers) if not was_visible]
    if failed:
        raise RecipeError(
            f"The directory of the run, {directory.resolve()}, must be shared by all machines: ranks {', '.join(failed)} do "
            "not see what rank 0 writes there, so checkpoints would be incomplete. Set log.directory to a shared disk."
        )


def export(recipe: Recipe, model, parts: DataParts) -> Path:
    """Writes the model, and its tokenizer and processor, to `export/` (collective)."""
    folder = recipe.directory / EXPORT
    chosen = recipe.checkpoint.export_dtype
    dtype = getattr(torch, chosen) if chosen is not None else None
    export_pretrained(model, folder, source=_side_files_folder(recipe.model), dtype=dtype)
    if dist.get_rank() == 0:
        for part in (parts.tokenizer, parts.processor):
            if part is not None:
                part.save_pretrained(folder)
    dist.barrier()
    return folder


def _side_files_folder(model: ModelConfig) -> Path | None:
    """The folder whose tokenizer, processor and generation config an export has: `model.source`, also where the weights' folder has
    another tokenizer."""
    is_other = model.weights not in ("auto", "random")
    return Path(model.source) if is_other and Path(model.source).is_dir() else models.weights_folder(model)


def existing_export(recipe: Recipe, step: int) -> Path | None:
    """The complete export of this step's weights by an earlier start, if rank 0 finds one (collective)."""
    export = None
    if dist.get_rank() == 0:
        previous = read_summary(recipe.directory)
        folder = ADAPTERS if recipe.lora is not None and not recipe.lora.merge else EXPORT
        exported = previous and previous.get("exported_step", previous["steps"])
        if previous and exported == step and Path(previous["export"] or "").name == folder:
            export = previous["export"] if is_complete(Path(previous["export"])) else None
    export = broadcast_object(export)
    return Path(export) if export is not None else None


def is_complete(export: Path) -> bool:
    """Whether a folder has all files of an exported model or adapter."""
    files = set(weight_file_names(export))
    adapter = {"adapter_model.safetensors", "adapter_config.json"}
    present = {file.name for file in export.glob("*")}
    return INCOMPLETE not in present and (files | {CONFIG} <= present or adapter <= present)


def listeners(recipe: Recipe) -> tuple[Listener, ...]:
    """The listeners on rank 0; none on the other ranks."""
    if dist.get_rank() != 0:
        return ()
    trackers = [Tracker(kind, recipe.log.project, recipe.directory) for kind in recipe.log.trackers]
    on_failed = recipe.checkpoint.on_failed
    log, page = RunLog(recipe.directory, on_failed=on_failed), RunPage(recipe.directory, on_failed=on_failed)
    return (log, *trackers, page, progress_view(recipe.log.every))


def profiler(recipe: Recipe) -> contextlib.AbstractContextManager[profile | None]:
    """torch's profiler over the recipe's window, with traces in `profile/`; a context of None if there is no window."""
    train = recipe.train
    if not train.profile_steps:
        return contextlib.nullcontext()
    first = max(0, train.profile_start - 1)
    window = schedule(wait=max(0, first - 1), warmup=min(1, first), active=train.profile_steps, repeat=1)
    return profile(schedule=window, on_trace_ready=tensorboard_trace_handler(str(recipe.directory / "profile")))


def device_name(device: torch.device) -> str:
    """The name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def seed_rank(recipe: Recipe) -> None:
    """Seeds every generator of this rank; ranks differ, so SP ranks have different dropout."""
    random_state.seed(recipe.train.seed + dist.get_rank())
    torch.use_deterministic_algorithms(recipe.train.deterministic, warn_only=True)
