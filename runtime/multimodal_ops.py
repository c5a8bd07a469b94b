"""The functions of `ops.py` for generated towers and fusion models.

Images, videos and audio under sequence parallelism, and towers that have no input on this rank. In one process each is the
identity or upstream's own computation.

    B batch   S sequence of this rank   H hidden size   F feature rows   P patches   C channels, or a tower's width
    p patch side   T frames of a patch   N images, videos or chunks
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from patchgen.runtime import parallel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from patchgen.runtime.parallel.media import TowerRows


# ----------------------------------------------------------------------------------- images, video, audio


def is_sliced() -> bool:
    """Whether this process has a slice of the sequence, so that checks over the full sequence do not apply."""
    return parallel.sequence_parallel_state() is not None


def require_whole_sequence(what: str) -> None:
    """Raises if this process has a slice of the sequence, from which `what` cannot be computed."""
    if (state := parallel.sequence_parallel_state()) is not None:
        raise ValueError(
            f"{what} cannot be computed from a slice of the sequence (sp={state.sp}). Compute them for "
            "the full sequence in the data pipeline and pass this rank's slice "
            "(runtime.parallel.batch.slice_batch slices them)."
        )


def local_features(features: Tensor, mask: Tensor) -> Tensor:
    """The modality features whose placeholder tokens are in this rank's slice.

    Args:
        features: `[F, H]`, or `[..., H]` with F rows in all: those of the full sequence, in the order of the tokens.
        mask: bool `[B, S]` or `[B, S, 1 or H]`, the placeholders among this rank's tokens.

    Returns:
        `[F_local, H]`; without sequence parallelism the argument itself.

    Raises:
        ValueError: the numbers of placeholders on all ranks and of features differ.
    """
    state = parallel.sequence_parallel_state()
    if state is None:
        return features
    from patchgen.runtime.parallel import media

    return media.local_features(features, mask, state)


def counted_from_the_start(counts: Tensor) -> Tensor:
    """Counts along the tokens of this rank's slice, as counts along the full sequence.

    Args:
        counts: `[..., S]`, cumulative sums.

    Returns:
        `[..., S]`, plus the last counts of the slices before; without sequence parallelism the argument itself.
    """
    state = parallel.sequence_parallel_state()
    if state is None:
        return counts
    from patchgen.runtime.parallel import media

    return media.counted_from_the_start(counts, state)


def local_levels(levels: Sequence[object], mask: Tensor) -> Sequence[object]:
    """As `local_features` for each level of deepstack features.

    Args:
        levels: each a tensor `[F, H]`, or a sequence of the tensors of each image.
        mask: as in `local_features`.

    Returns:
        A list with a tensor `[F_local, H]` per level, or a tuple of one where a level is a sequence; without sequence parallelism
        the argument itself.
    """
    state = parallel.sequence_parallel_state()
    if state is None:
        return levels
    from patchgen.runtime.parallel import media

    return media.local_levels(levels, mask, state)


def mark_replicated(*modules: object) -> None:
    """Marks modules that get full inputs on every rank, not slices: their attention exchanges nothing."""
    from patchgen.runtime.parallel import media

    media.mark_replicated(modules)


def tower_rows(layers: nn.Module, hidden_states: Tensor, *, group: int = 1) -> TowerRows:
    """Shards the rows of a tower over the ranks that share a sequence. All its methods are the identity in one process, and if
    the heads of the layers are not divisible by the ranks: every rank then computes the full tower.

        rows = ops.tower_rows(self.blocks, hidden_states, group=self.spatial_merge_size**2)
        cu_seqlens = rows.lengths(cu_seqlens)       # one more entry for padding rows
        hidden_states = rows.shard(hidden_states)   # [P, C] to [P / ranks, C]
        ...                                         # layers, whose attention exchanges heads for rows
        features = rows.gather(features)            # [F / ranks, H] to [F, H]

    Args:
        layers: the module that contains the layers.
        hidden_states: `[P, C]`.
        group: rows that are merged into one after the layers.
    """
    from patchgen.runtime.parallel import media

    return media.tower_rows(layers, hidden_states, group, parallel.current())


def chunk_rows(chunks: Tensor) -> TowerRows:
    """Shards chunks `[N, ...]` that a tower convolves one by one over the ranks that share a sequence."""
    from patchgen.runtime.parallel import media

    return media.chunk_rows(chunks, parallel.current())


def attends_by_lengths(config: object) -> bool:
    """Whether the configured attention takes packed lengths; if not, towers call it once per image.

    True for all of our names: a slice of the rows does not contain complete images.
    """
    name = getattr(config, "_attn_implementation", None)
    return name is not None and ("flash" in name or name.startswith("patchgen_"))


# ----------------------------------------------------------------------------------------------- towers


def tower_kwargs(kwargs: Mapping[str, object]) -> dict[str, object]:
    """The keyword arguments of a forward without the packing arguments of its text."""
    from patchgen.runtime.parallel import towers

    return towers.without_text_arguments(kwargs)


def max_seqlen(cu_seqlens: Tensor, kwargs: dict[str, object] | None = None) -> int:
    """The length of the longest packed sequence: `max(cu_seqlens[i + 1] - cu_seqlens[i])`.

    Args:
        cu_seqlens: `(sequences + 1,)`. The result is cached per tensor, after one host sync.
        kwargs: the caller's keyword arguments; a `max_seqlen` in them is popped and returned.
    """
    from patchgen.runtime.parallel import towers

    return towers.max_seqlen(cu_seqlens, kwargs)


def absent_tower(inputs_embeds: Tensor, inputs: Tensor | None, features: Callable[..., object]) -> Tensor:
    """Runs a tower that has no input on this rank but may have on others: see `runtime/parallel/towers.py`.

    Args:
        inputs_embeds: `[B, S, H]`.
        inputs: the tower's input on this rank (`pixel_values`, ...); with it, this is the identity.
        features: the model's bound `get_<modality>_features`.

    Returns:
        `inputs_embeds`, plus zero times the mean of the tower's features of a minimal input.

    Raises:
        ValueError: on all ranks, if one has no input and no minimal input is known.
    """
    from patchgen.runtime.parallel import towers

    state = parallel.current()
    if state is None:
        return inputs_embeds
    return towers.absent_tower(inputs_embeds, inputs, features, state)


def encode_vision(
    image_features: Callable[..., object],
    video_features: Callable[..., object],
    outputs: dict[str, object],
    inputs_embeds: Tensor,
    *,
    images: tuple[Tensor | None, Tensor | None],
    videos: tuple[Tensor | None, Tensor | None],
    **kwargs: object,
) -> tuple[dict[str, object], Tensor]:
    """One pass of the vision tower on every rank; upstream runs one for images and one for videos.

    Args:
        image_features: the model's bound `get_image_features`, which also encodes videos.
        video_features: the model's bound `get_video_features`, for one rank, and if there are only videos.
        outputs: upstream's `mm_encoder_outputs`, "image" and "video" -> output of the tower; filled in place, keeping
            existing entries.
        inputs_embeds: `[B, S, H]`.
        images, videos: packed patches `[P, C * T * p * p]` with their grids `[N, 3]`, or None.
        kwargs: upstream's arguments of the tower; values precomputed for images and videos are joined.

    Returns:
        `outputs` with this rank's images and videos, and `inputs_embeds` as from `absent_tower` if it has neither; on one
        rank unchanged.
    """
    if (state := parallel.current()) is not None:
        from patchgen.runtime.parallel import towers

        encoded, inputs_embeds = towers.encode_vision(
            image_features, outputs, inputs_embeds, images, videos, kwargs, state
        )
        outputs.update(encoded)
    for kind, features, (pixels, grids) in (("image", image_features, images), ("video", video_features, videos)):
        if outputs.get(kind) is None and pixels is not None:
            outputs[kind] = features(pixels, grids, return_dict=True, **kwargs)
    return outputs, inputs_embeds
