"""Configuration of data: what to read, how to prepare samples and how to batch them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from patchgen.runtime.data.formats import COLUMNS, FORMATS_OF_KIND, PAIR_COLUMNS

Format = Literal["auto", "jsonl", "parquet", "datasets", "text"]
Kind = Literal["text", "chat", "multimodal", "preference", "classification", "token_classes", "answers", "similar"]
RowFormat = Literal[
    "auto",
    "text",
    "prompt_completion",
    "messages",
    "sharegpt",
    "alpaca",
    "preference",
    "tags",
    "question",
    "similar",
]

Learn = Literal["all", "last"]
OnLong = Literal["skip", "truncate", "split", "error"]
OnBad = Literal["skip", "error"]
Modality = Literal["image", "video", "audio"]

SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".txt": "text", ".md": "text", ".py": "text"}
COMPRESSED = (".gz", ".zst")
"""Further suffixes of files of text that are compressed."""
BUILTIN = "builtin:"


def inner_suffix(path: Path) -> str:
    """The suffix of a path, without that of its compression: .jsonl of rows.jsonl.gz."""
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def format_of_name(path: Path) -> str | None:
    """The format that a path's suffix tells; None: a suffix that is not known, or of compressed files of another kind than text."""
    format = SUFFIXES.get(inner_suffix(path))
    return None if format == "parquet" and path.suffix in COMPRESSED else format


def require_choice(name: str, value: str, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(allowed)}.")


@dataclass(frozen=True)
class SourceConfig:
    """One source of samples.

    Attributes:
        path: a file, a folder, a glob, the name of a Hugging Face dataset, or a built-in set: builtin:stdlib, builtin:chat,
            builtin:prompts, builtin:pairs, builtin:labels, builtin:tags, builtin:answers, builtin:similar, builtin:vision,
            builtin:audio, builtin:video, builtin:omni
        format: auto: by suffix; datasets: a saved dataset or a name on the hub
        weight: share of the samples in the mix; none: by size, each sample once per epoch. Give one to all sources or to none
        split: split of a Hugging Face dataset or of a built-in set (train, validation)
        subset: configuration name of a Hugging Face dataset
        streaming: read in order while training, without an index or a token cache
        transform: module:function or path/to/file.py:function, from a row to messages, to a text, or to input_ids with labels
        row_format: format of the rows; auto: the one that the columns of each row match
        columns: other column names: name in the format -> name in the data, as {prompt: question}
        name: the source's name in logs and pages; none: its path
        media_root: folder of relative media paths, for multimodal data; none: that of the data
    """

    path: str
    format: Format = "auto"
    weight: float | None = None
    split: str = "train"
    subset: str | None = None
    streaming: bool = False
    transform: str | None = None
    row_format: RowFormat = "auto"
    columns: dict[str, str] = field(default_factory=dict)
    name: str | None = None
    media_root: str | None = None

    def __post_init__(self) -> None:
        require_choice("format", self.format, Format)
        if not self.path:
            raise ValueError("A source needs a path: a file, a folder, a glob, a dataset name or builtin:NAME.")
        if self.transform is not None and not all(self.transform.rpartition(":")[::2]):
            raise ValueError(
                f"The transform of {self.path} is {self.transform!r}; it must be module:function or file.py:function."
            )
        require_choice("row_format", self.row_format, RowFormat)
        if unknown := sorted(self.columns.keys() - COLUMNS):
            raise ValueError(
                f"The columns of {self.path} name {', '.join(unknown)}, which no row format has; expected "
                f"{', '.join(sorted(COLUMNS))}."
            )
        if self.transform is not None and (self.columns or self.row_format != "auto"):
            raise ValueError(
                f"{self.path} has a transform, which returns the rows. To fix: remove columns and row_format."
            )
        if self.weight is not None and not self.weight > 0:
            raise ValueError(
                f"The weight of {self.path} is {self.weight}; expected a number above 0. To fix: remove the source instead."
            )


KINDS_THAT_READ = {"learn": ("chat", "multimodal"), "video_fps": ("multimodal",), "max_frames": ("multimodal",)}
"""Fields of DataConfig that only some kinds read."""


@dataclass(frozen=True)
class DataConfig:
    """Where samples come from and how they become batches.

    Attributes:
        sources: what to read, mixed by weight
        kind: plain text, conversations with loss on assistant turns, multimodal conversations, pairs of a chosen and a rejected
            one, texts or conversations with labels, words with classes, questions with answers in a text, or pairs of
            similar texts
        learn: assistant turns with a loss: all, or the last of a conversation
        tokens_per_batch: the most tokens of a micro-batch, which the ranks of an SP group share
        packing: fill batches with the samples that fit best; otherwise in order
        separate_modalities: pairs of modalities that are not combined in one row; none: those that the model cannot distinguish
            in one row, as tested before the run
        pool: size of the pool of samples that wait for a batch, in units of tokens_per_batch, also without packing; none: 64,
            multimodal 4
        pad_batches: pad every batch to tokens_per_batch, so that all have one shape
        max_length: the most tokens of a sample, or of each half of a pair; none: tokens_per_batch, for pairs half of it
        on_long: handling of longer samples; split (plain text only) keeps all tokens
        on_bad: handling of samples that cannot be used: skip and count, or raise an error
        special_tokens: special tokens that texts may contain as such (<|box_start|>); others in texts are encoded as plain text
        append_eos: plain text: end each document with the end-of-sequence token
        epochs: passes over the data; none: endless
        shuffle: shuffle each epoch; streams keep the order of their files
        seed: of the shuffling
        cache_dir: folder of the token cache; none: ~/.cache/patchgen/data
        num_workers: processes that prepare streamed and multimodal samples; 0: the training process itself
        media: options of the model's processor (min_pixels, max_pixels, fps, sampling_rate ...), for all media that have them or
            under images, videos, audios for one; multimodal only
        video_fps: frames per second to sample from videos
        max_frames: the most frames of a video
    """

    sources: tuple[SourceConfig, ...] = (SourceConfig("builtin:stdlib"),)
    kind: Kind = "text"
    learn: Learn = "all"
    tokens_per_batch: int = 4096
    packing: bool = True
    separate_modalities: tuple[tuple[Modality, Modality], ...] | None = None
    pool: int | None = None
    pad_batches: bool = False
    max_length: int | None = None
    on_long: OnLong = "truncate"
    on_bad: OnBad = "error"
    special_tokens: tuple[str, ...] = ()
    append_eos: bool = True
    epochs: int | None = None
    shuffle: bool = True
    seed: int = 0
    cache_dir: str | None = None
    num_workers: int = 0
    media: dict[str, Any] = field(default_factory=dict)
    video_fps: float = 2.0
    max_frames: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "sources", tuple(self.sources))
        object.__setattr__(self, "special_tokens", tuple(self.special_tokens))
        require_choice("kind", self.kind, Kind)
        require_choice("learn", self.learn, Learn)
        require_choice("on_long", self.on_long, OnLong)
        require_choice("on_bad", self.on_bad, OnBad)
        pairs = self.separate_modalities
        if pairs is not None:
            object.__setattr__(self, "separate_modalities", tuple(tuple(sorted(pair)) for pair in pairs))
            for name in {name for pair in pairs for name in pair}:
                require_choice("separate_modalities", name, Modality)
        if self.media and self.kind != "multimodal":
            raise ValueError(
                f"data.media has options of a processor, which data.kind = {self.kind} does not use. To fix: remove it."
            )
        for name, kinds in KINDS_THAT_READ.items():
            if getattr(self, name) != getattr(DataConfig, name) and self.kind not in kinds:
                raise ValueError(
                    f"data.{name} is for kind {' or '.join(kinds)}; data.kind = {self.kind} would ignore it. To fix: remove it."
                )
        if not self.sources:
            raise ValueError("data.sources is empty: name at least one source, for example builtin:stdlib.")
        weighted = [source.path for source in self.sources if source.weight is not None]
        if weighted and len(weighted) != len(self.sources):
            unweighted = [source.path for source in self.sources if source.weight is None]
            raise ValueError(f"Give a weight to every source or to none: {weighted} have one, {unweighted} have none.")
        for name in ("tokens_per_batch", "max_length", "pool", "epochs", "max_frames"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, not {value}.")
        if not self.video_fps > 0:
            raise ValueError(f"data.video_fps must be above 0, not {self.video_fps}: frames per second to sample.")
        for name in ("num_workers", "seed"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"data.{name} must be 0 or more, not {value}.")
        self._require_fitting_lengths()
        for source in self.sources:
            if source.media_root is not None and self.kind != "multimodal":
                raise ValueError(
                    f"{source.path} has a media_root, which data.kind = {self.kind} would ignore. To fix: remove it."
                )
            if source.row_format != "auto" and source.row_format not in FORMATS_OF_KIND[self.kind]:
                raise ValueError(
                    f"{source.path} has row_format = {source.row_format}, which data.kind = {self.kind} does not read; it "
                    f"reads {', '.join(FORMATS_OF_KIND[self.kind])}."
                )
        if self.on_long == "split" and self.kind != "text":
            raise ValueError(
                f"data.on_long = split is only for plain text; for kind {self.kind} it must be skip, truncate or error."
            )

    def _require_fitting_lengths(self) -> None:
        """Raises ValueError if a sample may be longer than a batch."""
        if self.tokens_per_batch < self.docs_per_sample:
            raise ValueError(
                f"data.tokens_per_batch = {self.tokens_per_batch} is less than one token for each half of a pair (data.kind = "
                f"{self.kind}), which share a batch. To fix: set it to {self.docs_per_sample} or more."
            )
        if self.length_limit * self.docs_per_sample > self.tokens_per_batch:
            reason = (
                "both halves of a pair share a batch"
                if self.docs_per_sample > 1
                else "a sample is never split over batches"
            )
            raise ValueError(
                f"data.max_length = {self.max_length} does not fit into data.tokens_per_batch = {self.tokens_per_batch}: "
                f"{reason}. To fix: set data.max_length to {self.tokens_per_batch // self.docs_per_sample} or less."
            )

    @property
    def source_names(self) -> list[str]:
        """Unique names of the sources, for logs and pages."""
        names = [source.name or source.path for source in self.sources]
        return [
            name if names.count(name) == 1 else f"{name} ({names[: index + 1].count(name)})"
            for index, name in enumerate(names)
        ]

    @property
    def length_limit(self) -> int:
        """The most tokens that a sample may have; of pairs, each half."""
        return self.max_length or self.tokens_per_batch // self.docs_per_sample

    @property
    def docs_per_sample(self) -> int:
        """The number of documents of a sample, which share a batch."""
        return len(PAIR_COLUMNS.get(self.kind, ("",)))

    @property
    def pool_tokens(self) -> int:
        """The number of tokens that the pool is refilled to before each batch."""
        batches = self.pool if self.pool is not None else (4 if self.kind == "multimodal" else 64)
        return batches * self.tokens_per_batch

    @property
    def cache_root(self) -> Path:
        return Path(self.cache_dir).expanduser() if self.cache_dir else Path.home() / ".cache" / "patchgen" / "data"
