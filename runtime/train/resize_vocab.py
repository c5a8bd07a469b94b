"""The vocabulary that a recipe grows, `model.resize_vocab`: its size, and what becomes of the new rows.

tokenizer 151,672 tokens   multiple_of 64   ->  config.vocab_size 151,680, in every place that reads the recipe's config
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from patchgen.runtime.checkpoint.vocabulary import vocabulary_names
from patchgen.runtime.train.recipe import ModelConfig, Recipe, RecipeError
from patchgen.runtime.train.sections import ResizeVocabConfig
from patchgen.runtime.train.weight_sources import is_model_type
from patchgen.runtime.verify.verdict import one_line

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def resize(config: PreTrainedConfig, model: ModelConfig, section: ResizeVocabConfig) -> None:
    """Sets the vocab_size of the language model's config, which may be nested, as `section` says.

    Raises:
        RecipeError: the size is smaller than that of the config, there is no tokenizer that gives it, or the config has none.
    """
    text: Any = config.get_text_config()
    current = getattr(text, "vocab_size", None)
    if current is None:
        raise RecipeError(
            f"model.resize_vocab: {type(text).__name__} has no vocab_size that could grow. Remove model.resize_vocab."
        )
    rounded = lambda size: -(-size // section.multiple_of) * section.multiple_of  # noqa: E731
    if section.to == "tokenizer":  # weights that are padded already stay as they are
        text.vocab_size = max(current, rounded(num_ids(_read_tokenizer(model.source))))
    elif section.to < current:
        raise RecipeError(
            f"model.resize_vocab.to = {section.to} is less than the vocab_size {current} of model.source = '{model.source}': a "
            f"vocabulary is never shrunk. To fix: name {current} or more, or remove model.resize_vocab."
        )
    else:
        text.vocab_size = rounded(section.to)


def require_resized(model: PreTrainedModel) -> None:
    """Refuses a model with embeddings or a head of another size than its config's vocab_size: they are sized by something else.

    Raises:
        RecipeError: with the shape.
    """
    size = model.config.get_text_config().vocab_size
    for name in sorted(vocabulary_names(model)):
        if (rows := model.get_parameter(name).shape[0]) != size:
            raise RecipeError(
                f"model.resize_vocab: {name} has {rows} rows, and the config's vocab_size is {size}: it does not size this model's "
                "vocabulary. To fix: set the fields that do in model.overrides, and remove model.resize_vocab."
            )


def num_ids(tokenizer: Any) -> int:
    """One more than the largest id of a tokenizer: ids may have gaps, so that there are fewer tokens than that."""
    return 1 + max(tokenizer.get_vocab().values(), default=-1)


def _read_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    if is_model_type(source):
        raise RecipeError(
            f"model.resize_vocab: model.source = '{source}' is a model type, whose tokenizer is trained on the data with the "
            "config's vocab_size. To fix: set vocab_size in model.overrides, and remove model.resize_vocab."
        )
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (ImportError, OSError, ValueError) as error:
        raise RecipeError(
            f"model.resize_vocab.to = tokenizer: model.source = '{source}' has no tokenizer that can be read here: "
            f"{one_line(error)}"
        ) from error


def summary(section: ResizeVocabConfig, vocab_size: int, grown: Mapping[str, tuple[int, int]]) -> str:
    """What becomes of the vocabulary, in one line.

    Args:
        vocab_size: of the model.
        grown: name of each parameter with new rows -> its rows in the checkpoint and in the model.
    """
    if not grown:
        return f"nothing grows: the weights have {vocab_size} rows, which are never cut"
    parts = [f"{name} from {stored} to {rows} rows" for name, (stored, rows) in grown.items()]
    return f"{', '.join(parts)}; new rows: {section.new_rows}"


def require_distinct_rows(recipe: Recipe, model: PreTrainedModel, grown: Mapping[str, tuple[int, int]]) -> None:
    """Refuses new rows that are equal and stay so, as nothing trains them: the model could not tell the new tokens apart.

    Args:
        grown: name of each parameter with new rows -> its rows in the checkpoint and in the model.

    Raises:
        RecipeError: with the settings.
    """
    section = recipe.model.resize_vocab
    if not grown or section is None or section.new_rows != "mean":
        return
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor), "embeddings are a table"
    if recipe.lora is None and weight.requires_grad:
        return
    why = f"model.freeze = {list(recipe.model.freeze)}" if recipe.lora is None else "the section lora"
    raise RecipeError(
        f"model.resize_vocab.new_rows = mean with {why}, which leaves the embeddings as they are: all new tokens would keep one "
        "and the same row, and the model could not tell them apart. To fix: set new_rows: random, whose rows differ, though they "
        "are not trained either; or train the embeddings."
    )
