"""Checks of a recipe's data before any rank starts: the first rows of its sources, the options of its processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from patchgen.runtime.data import Counters, DataConfig, DataError
from patchgen.runtime.data.build import make_preparer
from patchgen.runtime.data.chat import learned_turns, require_messages
from patchgen.runtime.data.literals import Literals
from patchgen.runtime.data.multimodal import PrepareMultimodal
from patchgen.runtime.data.problems import BadSample, bad_sample_error
from patchgen.runtime.data.records import Source
from patchgen.runtime.data.sources import open_source
from patchgen.runtime.data.text import required_field
from patchgen.runtime.data.transform import FIRST_ROWS, ModelInputs, check_first_rows, mappers_of
from patchgen.runtime.objectives.encoder_decoder import ONE_ANSWER
from patchgen.runtime.train import architecture, reading, setup
from patchgen.runtime.train import model as models
from patchgen.runtime.train.recipe import Recipe, RecipeError


def require_data(recipe: Recipe) -> None:
    """Refuses data that every rank would refuse.

    Raises:
        RecipeError: a source that cannot be read; a transform that does not exist or returns an invalid row; rows that match
            no format of the data kind, or several; several answers in a conversation for an encoder-decoder; a special token
            that the tokenizer lacks. Where media options or special tokens are set: no tokenizer, for multimodal data no
            processor with a chat template, or an option that the processor lacks or refuses.
    """
    architecture.prepare(recipe)
    for name, config in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        if config is None:
            continue
        try:
            with reading.naming_section(name):
                _require_section(recipe, config)
        except DataError as error:
            raise RecipeError(str(error)) from error


def describe_first_samples(recipe: Recipe) -> str:
    """What becomes of the first samples of each source, encoded as by the run: a line per source, or why none was encoded.

    Args:
        recipe: as `preflight.decide_trainable` returns it.

    Raises:
        RecipeError, DataError: the data cannot be encoded, a source is empty, or a sample is bad and `on_bad` is error.
    """
    source = recipe.model.source
    if not Path(source).is_dir():
        origin = "trained" if models.is_model_type(source) else "read"
        return (
            f"data         no sample was encoded: the tokenizer of '{source}' is {origin} when the run starts; `patchgen data` "
            "shows the samples"
        )
    parts, lines = setup.data_parts(recipe), []
    for name, config in (("data", recipe.data), ("eval_data", recipe.evaluation_data)):
        if config is not None:
            with reading.naming_section(name):
                lines += [f"{name:<12} {line}" for line in encode_first_samples(config, parts)]
    return "\n".join(lines)


LOOKED_AT = {"multimodal": FIRST_ROWS}
"""Samples of a source that `require_lengths` encodes at most: few of those that are slow to prepare ..."""
LOOKED_AT_OF_TEXT = 64  # ... and more of others


def require_lengths(recipe: Recipe, parts: setup.DataParts) -> None:
    """Refuses data of which no sample fits a batch, where longer samples are skipped or refused.

    Of each source samples are encoded until one fits; if none of the first `LOOKED_AT_OF_TEXT` does, the run would read on
    without a step, so that is refused as well.

    Raises:
        RecipeError: no sample fits.
        DataError: with `on_long: error`, a sample that does not.
    """
    for name, config in (("data", recipe.data), ("eval_data", recipe.evaluation_data)):
        if config is not None and config.on_long in ("skip", "error"):
            with reading.naming_section(name):
                preparer = make_preparer(config, parts.tokenizer, parts.processor, parts.position_function)
                looked_at = LOOKED_AT.get(config.kind, LOOKED_AT_OF_TEXT)
                longs = [
                    _too_long(preparer, index, open_source(one), looked_at) for index, one in enumerate(config.sources)
                ]
            too_long = [long for long in longs if long is not None]
            if len(too_long) == len(longs):
                where, reason = too_long[0]
                raise RecipeError(
                    f"{name}: no sample fits a batch: of the first {looked_at} of each source every one is longer than "
                    f"{name}.max_length or {name}.tokens_per_batch and would be skipped (first: {where}: {reason}). To fix: raise "
                    f"the limit, or set {name}.on_long to truncate."
                )


def _too_long(preparer: Callable, index: int, source: Source, count: int) -> tuple[str, str] | None:
    """Where the first of these samples is and why it is skipped, if all that are not bad are; None if one fits."""
    first = None
    for record, _ in itertools.islice(source.read(), count):
        problem = preparer(index, record).problem
        if problem is None or problem.outcome == "truncated":
            return None
        if problem.outcome == "skipped":
            first = first or (problem.where, problem.reason)
    return first


def encode_first_samples(config: DataConfig, parts: setup.DataParts) -> list[str]:
    """A line per source: how many of its first samples were encoded, and which are bad, skipped or truncated, and why.

    Raises:
        DataError: a source is empty, or a sample is bad and `on_bad` is error.
    """
    preparer = make_preparer(config, parts.tokenizer, parts.processor, parts.position_function)
    lines = []
    for index, (name, source) in enumerate(zip(config.source_names, map(open_source, config.sources), strict=True)):
        counters, records = Counters(), [record for record, _ in itertools.islice(source.read(), FIRST_ROWS)]
        for record in records:
            problem = preparer(index, record).problem
            if problem is not None and problem.outcome == "bad" and config.on_bad == "error":
                raise bad_sample_error(problem.where, problem.reason)
            if problem is not None:
                counters.add(*problem)
        if not records:
            raise DataError(f"No samples in {source.name}.")
        lines.append(f"{name}: the first {len(records)} samples encoded, {counters.summary()}")
    return lines


def _require_section(recipe: Recipe, config: DataConfig) -> None:
    """`require_data` for one section, with DataErrors that name the keys of `data`."""
    sources = [open_source(source) for source in config.sources]
    check_first_rows(config, sources)
    if config.kind in ("chat", "multimodal") and models.read_config(recipe.model).is_encoder_decoder:
        _require_one_answer(config, sources)
    if not config.media and not config.special_tokens:
        return
    if config.kind != "multimodal":
        # Raises if one of them is no special token.
        Literals(setup.data_parts(recipe).tokenizer, kept=config.special_tokens)
        return
    preparer = PrepareMultimodal(config, setup.load_processor(recipe.model.source), None)
    if config.media:
        preparer.options.require_accepted()


def _require_one_answer(config: DataConfig, sources: Sequence[Source]) -> None:
    """Raises DataError if one of the first rows is a conversation with several answers: an encoder-decoder needs one."""
    for mapper, source in zip(mappers_of(config), sources, strict=True):
        for record, _ in itertools.islice(source.read(), FIRST_ROWS):
            try:
                fields = mapper(record.where, record.fields())
                if isinstance(fields, ModelInputs):  # refused on ranks, at the first document with several answers
                    continue
                messages = required_field(record.where, fields, "messages", list)
                require_messages(record.where, messages)
                learned = learned_turns(record.where, messages, config.learn)
            except BadSample:
                continue  # counted or raised when samples are prepared
            turns = [message for message in messages if message["role"] == "assistant"]
            answers = len(turns if learned is None else learned)
            if answers > 1:
                raise DataError(f"{record.where}: the conversation has {answers} answers. {ONE_ANSWER}")
