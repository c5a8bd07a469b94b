"""Sizes of a model's media inputs, from its config: channels, patches, mel bins.

A packed vision tower takes `[P, C * T * p * p]` or `[P, C, p, p]` and the grid `(t, h, w)` of each image in patches, h and
w multiples of the merge size. Others take full images `[N, C, H, W]`. An audio tower takes spectrograms `[N, mel, F]`, or raw
samples `[N, F]`.

    P patches   p patch side   C channels   T frames of a patch   N images or sounds   F frames or samples   mel bins per frame
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

IMAGE, VIDEO, AUDIO = "image", "video", "audio"


def tower_config(config: PreTrainedConfig, kind: str) -> PreTrainedConfig:
    """The config of a modality's tower; the model's own, if it has the patch size of images.

    Raises:
        ValueError: the config has none under a name that transformers uses.
    """
    names = ("audio_config", "encoder_config") if kind == AUDIO else ("vision_config", "vq_config")
    owners = (config, *(vars(config).get(key) for key in config.sub_configs))
    tower = next(
        (candidate for owner in owners for name in names if (candidate := getattr(owner, name, None)) is not None),
        None,
    )
    if tower is None and kind == IMAGE and first_int(config, "patch_size", default=0):
        return config
    if tower is None:
        raise ValueError(
            f"{type(config).__name__} has no {' or '.join(names)}, so the size of a minimal {kind} is unknown."
        )
    return tower


def merge_size(vision: PreTrainedConfig) -> int:
    """The number of patches merged into one feature, in each direction."""
    kernel = getattr(vision, "merge_kernel_size", None)  # height and width
    return kernel[0] if kernel else first_int(vision, "spatial_merge_size", "merge_size", default=1)


def packed_merge(config: PreTrainedConfig, vision: PreTrainedConfig) -> int:
    """`merge_size` of packed patches, which the model itself may merge, by a ratio in each direction."""
    share = getattr(config, "downsample_ratio", None)
    return round(1 / share) if isinstance(share, float) else merge_size(vision)


def total_merge(config: PreTrainedConfig, vision: PreTrainedConfig) -> int:
    """The number of patches per token in each direction, if the tower merges windows and the model merges its outputs."""
    window = getattr(vision, "window_kernel_size", None) or (1,)
    return window[0] * merge_size(config) ** first_int(config, "merger_times", default=1)


def patch_values(vision: PreTrainedConfig) -> int:
    """The numbers in a packed patch: channels x frames x height x width."""
    return (
        channels(vision) * first_int(vision, "temporal_patch_size", "patch_temporal", default=1) * vision.patch_size**2
    )


def patch_shapes(vision: PreTrainedConfig) -> tuple[tuple[int, ...], ...]:
    """Possible shapes of a packed patch: flat, as an image, or as an image of all merged patches."""
    patch = (channels(vision), vision.patch_size, vision.patch_size)
    return (patch_values(vision),), patch, token_shape(vision)


def token_shape(vision: PreTrainedConfig) -> tuple[int, ...]:
    """The patches of one token as a channels-last image; grids then count tokens."""
    side = vision.patch_size * merge_size(vision)
    return side, side, channels(vision)


def merged_patch_values(vision: PreTrainedConfig) -> int:
    """The numbers in a patch of a tower without an encoder: those of all patches that it would pool."""
    return patch_values(vision) * first_int(vision, "pooling_kernel_size", default=1) ** 2


def channels(vision: PreTrainedConfig) -> int:
    return first_int(vision, "in_channels", "in_chans", "num_channels", default=3)


def image_size(vision: PreTrainedConfig) -> tuple[int, int]:
    """Height and width of a full image."""
    size = _image_size(vision)
    if size is None:
        raise ValueError(f"{type(vision).__name__} and the configs in it have no image_size.")
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _image_size(vision: PreTrainedConfig) -> int | Sequence[int] | None:
    """The image size in a tower's config, or in the first sub-config that has one."""
    configs = (vision, *(getattr(vision, name, None) for name in vision.sub_configs))
    return next((size for config in configs if (size := getattr(config, "image_size", None)) is not None), None)


def image_sides(vision: PreTrainedConfig) -> list[tuple[int, int]]:
    """Candidate heights and widths for a tower of full images: from the config, else a few patches."""
    if _image_size(vision) is not None:
        return [image_size(vision)]
    patch = getattr(vision, "patch_size", None)
    patch = patch if isinstance(patch, int) else 16
    return [(patch * count, patch * count) for count in (2, 4, 8, 14, 16, 32)]


def mel_bins(audio: PreTrainedConfig) -> int:
    """The numbers per frame, including stacked frames."""
    names = ("num_mel_bins", "num_mels", "input_dim", "input_feat_size", "input_size", "feature_size")
    return first_int(audio, *names, default=80) * first_int(audio, "num_stacked_frames", default=1)


def samples_per_token(config: PreTrainedConfig) -> int:
    """The raw audio samples per token: the number that a sub-config says, or else the steps of one's convolutions.

    Raises:
        ValueError: no sub-config has them.
    """
    parts = [vars(config).get(key) for key in config.sub_configs]
    for part in parts:
        samples = first_int(part, "samples_per_token", "hop_length", default=0)
        if samples > 1:
            return samples
    for part in parts:  # only where no part says it: convolutions may be another tower's
        if strides := getattr(part, "conv_stride", None):
            return math.prod(strides)
    raise ValueError(f"{type(config).__name__} does not say how many samples of a sound become one token.")


def first_int(config: PreTrainedConfig | None, *names: str, default: int) -> int:
    """The first of these fields that is an integer in the config."""
    return next((getattr(config, name) for name in names if type(getattr(config, name, None)) is int), default)
