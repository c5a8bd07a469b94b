"""Minimal and joint passes of towers, against the passes that upstream makes; ranks are compared in tests/distributed."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from dataclasses import dataclass, field

import chosen_models
import pytest
import torch
import torch.nn.functional as F
from rounding import require_equal_up_to_rounding
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import CLIPVisionConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from patchgen.runtime import minimal_media, parallel, registry
from patchgen.runtime.parallel import ParallelConfig, checkpointing, towers
from patchgen.runtime.parallel.run_context import RunContext
from patchgen.runtime.verify.comparison import train_step
from patchgen.runtime.verify.inputs import Case
from patchgen.runtime.verify.model_pair import build_model, perturb
from patchgen.runtime.verify.multimodal_inputs import media_cases
from patchgen.runtime.verify.small_config import small_config

MODELS = chosen_models.with_hits("dummy_forward")
JOINT = [model for model in MODELS if "ops.encode_vision(" in registry.find_model(model).file.read_text()]
TOWERS = (
    "visual",
    "audio_tower",
    "vision_tower",
    "vision_model",
    "multi_modal_projector",
    "embed_vision",
    "embed_audio",
)
TOWERS += ("image_newline",)


@dataclass(frozen=True)
class TwoBatches:
    """What towers read of a state: ranks with batches of their own. No collective is made: the heads are left out."""

    config: ParallelConfig
    sp: int = 1
    ep: int = 1
    context: RunContext = field(default_factory=RunContext)


@functools.cache
def model_and_cases(name: str):
    generated = registry.find_model(name)
    head = generated.heads[0]
    upstream_class = getattr(generated.upstream(), head)
    config = small_config(upstream_class.config_class).config
    cases = media_cases(build_model(upstream_class, config)).cases
    model = build_model(getattr(generated.load(), head), config)
    perturb(model)
    return getattr(model, "model", model), {case.name: without(case, "labels") for case in cases}


def without(case: Case, *names: str) -> Case:
    return Case(case.name, {name: value for name, value in case.batch.items() if name not in names})


def of_towers(step) -> dict:
    return {
        name: gradient for name, gradient in step.gradients.items() if gradient is not None and name.startswith(TOWERS)
    }


def text_of(case: Case) -> Case:
    """The samples of a case as if they were text: no media, and placeholders that nothing fills."""
    return Case("text", {name: case.batch[name] for name in ("input_ids", "attention_mask")})


@contextlib.contextmanager
def counted(model: nn.Module):
    """How often each tower runs within the block."""
    runs: Counter[str] = Counter()
    towers_of = [(name, module) for name, module in model.named_children() if name.startswith(TOWERS)]
    hooks = [module.register_forward_hook(lambda *_, name=name: runs.update([name])) for name, module in towers_of]
    yield runs
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("model_name", chosen_models.models(MODELS))
def test_text_alone_gives_every_parameter_of_every_tower_a_zero_gradient(model_name: str) -> None:
    """The parameters that get one are those that real inputs give one: FSDP reduces the same on all ranks."""
    model, cases = model_and_cases(model_name)
    widest = cases.get("sound") or cases.get("mixed") or cases.get("video") or cases["images"]
    plain = train_step(model, text_of(widest))
    with parallel.using(TwoBatches(ParallelConfig.for_world(2))):
        with counted(model) as runs:
            real = train_step(model, widest)
        with counted(model) as dummy_runs:
            dummy = train_step(model, text_of(widest))
    assert dummy_runs.items() <= runs.items()  # each gathers weights
    assert not of_towers(plain)
    # A projector beside the tower's method is of the root's unit, which fills up what a rank lacks (`unused.py`).
    lacking = set(of_towers(real)) - set(of_towers(dummy))
    assert set(of_towers(dummy)) <= set(of_towers(real))
    assert all(name.startswith("multi_modal_projector.") for name in lacking)
    assert all(not gradient.any() for gradient in of_towers(dummy).values())
    assert plain.outputs.keys() == dummy.outputs.keys() and plain.outputs
    assert all(torch.equal(dummy.outputs[name], output) for name, output in plain.outputs.items())


LAYOUTS = {"batches of their own": {}, "one sequence": {"sp": 2}}
# Of a shared sequence only the layout is told: that ranks divide the rows of towers is compared in tests/distributed.


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_name", chosen_models.models(JOINT))
def test_images_and_videos_in_one_pass(model_name: str, layout: str) -> None:
    """One call of the tower in place of two, and the same numbers but for the order of sums."""
    model, cases = model_and_cases(model_name)
    calls = []
    tower = model.visual
    handle = tower.register_forward_hook(lambda *_: calls.append(1))
    try:
        apart = train_step(model, cases["handed in"])
        num_apart = len(calls)
        with parallel.using(TwoBatches(ParallelConfig.for_world(2, **LAYOUTS[layout]))):
            joint = train_step(model, cases["handed in"])
    finally:
        handle.remove()
    assert (num_apart, len(calls) - num_apart) == (2, 1)
    for name, output in apart.outputs.items():
        require_equal_up_to_rounding(joint.outputs[name], output, what=name)
    gradients = {name: gradient for name, gradient in apart.gradients.items() if gradient is not None}
    # A small gradient may be the difference of large numbers, and has their rounding errors.
    floor = 1e-2 * max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        require_equal_up_to_rounding(joint.gradients[name], gradient, floor=floor, what=name)


@pytest.mark.parametrize("model_name", ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe"])
def test_one_pass_with_router_logits(model_name: str) -> None:
    """Upstream's recorder adds router logits, which no field of a tower's output names, to what a tower returns."""
    model, cases = model_and_cases(model_name)
    case = cases["handed in"]
    recorded = Case(case.name, {**case.batch, "output_router_logits": True})
    apart = train_step(model, recorded).outputs["last_hidden_state"]
    with parallel.using(TwoBatches(ParallelConfig.for_world(2))):
        joint = train_step(model, recorded).outputs["last_hidden_state"]
    require_equal_up_to_rounding(joint, apart, what="last_hidden_state")


class NormLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


@pytest.mark.parametrize("mode", [*checkpointing.MODES, "reentrant", "not reentrant"])
def test_a_minimal_image_leaves_the_statistics_of_a_batch_norm(mode: str) -> None:
    """They are saved with the model, and are of images that are there: a layer that the backward computes again sees none."""

    class WithBatchNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = NormLayer()
            self.config = CLIPVisionConfig(image_size=8, patch_size=4)

        def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
            pixels = pixel_values * self.layer.norm.weight.sum()
            if mode in checkpointing.MODES:
                return self.layer(pixels)
            return checkpoint(self.layer, pixels, use_reentrant=mode == "reentrant")  # by the module itself

    model = WithBatchNorm()
    runs = []
    model.layer.norm.register_forward_pre_hook(lambda *_: runs.append(mode))
    if mode in checkpointing.MODES:
        checkpointing.apply(model, mode)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = TwoBatches(ParallelConfig.for_world(2))
    embeds = towers.absent_tower(torch.ones(1, 2, 3), None, model.get_image_features, state)
    embeds.sum().backward()
    assert model.layer.norm.weight.grad is not None
    assert len(runs) == 1 + (mode not in ("none", "offload"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_ranks_that_share_one_batch_need_no_dummy() -> None:
    embeds = torch.zeros(1, 2, 3)
    state = TwoBatches(ParallelConfig.for_world(2, sp=2), sp=2)
    assert towers.absent_tower(embeds, None, model_and_cases("qwen3_vl")[0].get_image_features, state) is embeds


def test_a_minimal_image_has_a_row_for_each_rank_of_a_sequence() -> None:
    model, _ = model_and_cases("qwen3_vl")
    minimal = minimal_media.minimal_inputs(model.get_image_features, sp=4, like=torch.zeros(1))
    assert minimal["image_grid_thw"].tolist() == [[1, 8, 2]]
    assert minimal["pixel_values"].shape[0] == 16


FORMS = {  # upstream's head -> the shape of its smallest image, sound or video
    "llava.Llava": {"image": (1, 3, 32, 32)},
    "llava_next.LlavaNext": {"image": (1, 3, 3, 32, 32)},
    "idefics3.Idefics3": {"image": (1, 1, 3, 32, 32)},
    "smolvlm.SmolVLM": {"image": (1, 1, 3, 32, 32)},
    "gemma4.Gemma4": {"image": (1, 9, 192), "video": (1, 9, 192), "audio": (1, 16, 32)},
    "lfm2_vl.Lfm2Vl": {"image": (1, 4, 192)},
    "paddleocr_vl.PaddleOCRVL": {"image": (4, 3, 8, 8)},
    "video_llama_3.VideoLlama3": {"image": (1, 192), "video": (1, 192)},
    "minicpmv4_6.MiniCPMV4_6": {"image": (1, 3, 8, 128), "video": (1, 3, 8, 128)},
    "ernie4_5_vl_moe.Ernie4_5_VLMoe": {"video": (8, 192)},  # whole pairs of frames
    "inkling2.Inkling2": {"image": (1, 16, 16, 3)},
    "granite_docling.GraniteDocling": {"image": (1, 3, 32, 32)},
    "unlimited_ocr.UnlimitedOcr": {"image": (1, 3, 32, 32)},
}


@pytest.mark.parametrize("name", FORMS)
def test_the_smallest_input_of_towers_of_many_forms(name: str) -> None:
    """Found on a copy with one number for all weights; upstream's own class takes it and its features are finite."""
    module, head = name.split(".")
    modeling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    upstream_class = getattr(modeling, f"{head}ForConditionalGeneration")
    model = build_model(upstream_class, small_config(upstream_class.config_class).config).model
    for kind, shape in FORMS[name].items():
        features = getattr(model, f"get_{kind}_features")
        minimal = minimal_media.minimal_inputs(features, sp=1, like=torch.zeros(1))
        assert minimal is not None, minimal_media.refusal(features, sp=1, like=torch.zeros(1))
        assert tuple(next(iter(minimal.values())).shape) == shape
        assert all(one.numel() and one.isfinite().all() for one in minimal_media.feature_tensors(features(**minimal)))


def test_the_copy_of_stacked_experts_is_taken_by_grouped_products() -> None:
    """They refuse weights without strides."""
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.zeros(2, 8, 16))
    copy = minimal_media.bare_copy(experts, torch.zeros(1))
    out = F.grouped_mm(torch.ones(6, 8), copy.weight, offs=torch.tensor([2, 6], dtype=torch.int32))
    assert torch.allclose(out, torch.full((6, 16), 8 * minimal_media.CONSTANT_WEIGHT))


def test_a_copy_runs_nothing_of_the_model() -> None:
    """Neither through a forward that wraps the model's own (`gathered_attention`) nor through a compiled call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    forward = model[0].forward
    model[0].forward = lambda hidden: forward(hidden)
    model[1].compile(backend="eager")
    model[2].register_forward_pre_hook(lambda *_: pytest.fail("the hook of the model runs"))
    for parameter in model.parameters():
        nn.init.constant_(parameter, torch.nan)
    assert minimal_media.bare_copy(model, torch.zeros(1))(torch.ones(1, 4)).isfinite().all()


def test_a_tower_of_sounds_of_one_length() -> None:
    """Voxtral's takes 3000 frames; the model is on the meta device, of which the search reads nothing but shapes."""
    from transformers import VoxtralConfig, VoxtralForConditionalGeneration

    tower = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 4}
    config = VoxtralConfig(text_config={"model_type": "llama", "num_hidden_layers": 1}, audio_config=tower)
    with torch.device("meta"):
        model = VoxtralForConditionalGeneration(config).model
    model.audio_tower.embed_positions.to_empty(device="cpu")
    minimal = minimal_media.minimal_inputs(model.get_audio_features, sp=1, like=torch.zeros(1))
    assert minimal["input_features"].shape == (1, 128, 3000)


def test_speech_is_audio() -> None:
    assert minimal_media.kind_of("get_speech_features") == "audio"


def test_what_was_computed_for_images_and_for_videos_is_joined() -> None:
    image, video = torch.tensor([0, 4, 12]), torch.tensor([0, 6])
    joined = towers.join_precomputed(
        {
            "image_cu_seqlens": image,
            "video_cu_seqlens": video,
            "image_max_seqlen": 8,
            "video_max_seqlen": 6,
            "image_split_sizes": [1, 2],
            "video_split_sizes": [3],
            "image_position_ids": torch.zeros(12, 2),  # of the images alone: left out
            "cu_seq_lens_q": image,  # of the text
            "output_router_logits": True,
        }
    )
    assert joined.pop("image_cu_seqlens").tolist() == [0, 4, 12, 18]
    assert joined == {"image_max_seqlen": 8, "image_split_sizes": [1, 2, 3], "output_router_logits": True}


def test_longest_sequence_is_read_once_or_handed_in() -> None:
    bounds = torch.tensor([0, 3, 10])
    kwargs = {"max_seqlen": 12, "other": 1}
    assert towers.max_seqlen(bounds, kwargs) == 12
    assert kwargs == {"other": 1}
    assert towers.max_seqlen(bounds, kwargs) == 7
    with torch.autograd._unsafe_preserve_version_counter(bounds):  # unseen: whoever reads again reads 47
        bounds[-1] = 50
    assert towers.max_seqlen(bounds, None) == 7
    bounds[-1] = 60
    assert towers.max_seqlen(bounds, None) == 57


@pytest.mark.parametrize("error", [None, ValueError()])
def test_a_tower_for_which_no_input_can_be_made_is_refused_in_words(error, monkeypatch):
    """Its config gives no size, or reading one raises an error without a message."""

    class Tower(nn.Module):
        def get_image_features(self) -> None: ...

    def none_to_try(*_arguments, **_options):
        if error is not None:
            raise error
        yield from ()

    monkeypatch.setattr(minimal_media, "candidates", none_to_try)
    features, like = Tower().get_image_features, torch.zeros(1)
    assert minimal_media.minimal_inputs(features, sp=1, like=like) is None
    assert minimal_media.refusal(features, sp=1, like=like)
