"""Which tensors of a model are biases of its routers for selection alone: added to the scores by which experts are chosen, and not
to the weights of the chosen.

    scores  = sigmoid(x @ gate.T)            [tokens, E]
    index   = topk(scores + bias, K)         the bias decides which experts a token gets,
    weights = scores.gather(index)           and nothing else

Their names differ (`e_score_correction_bias`, `expert_bias`), and so do the modules that own them; some are buffers, others
parameters without a gradient. So candidates are tried, in a small model of the same options: with a bias that exceeds all scores
every token must get the experts with the largest one, and a bias twice as large must change nothing that the experts are given.

E experts   K experts per token
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from patchgen.runtime import parallel, seams
from patchgen.runtime.parallel import sharding
from patchgen.runtime.parallel.experts_calls import num_experts_of, routing_index
from patchgen.runtime.train import reading
from patchgen.runtime.verify import given_config
from patchgen.runtime.verify.inputs import text_cases
from patchgen.runtime.verify.model_pair import build_model
from patchgen.runtime.verify.small_config import SmallConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

STEP = 64.0
"""Between the biases of two experts in a trial: far more than their scores differ by."""


def find(model: PreTrainedModel) -> dict[str, str]:
    """Path of an experts module -> name of the buffer or parameter that is the bias of its router; without those that have none.

    Args:
        model: of a generated class, sharded or not, also on the meta device. A small model of the class runs on the CPU.
    """
    if not any(candidates(model, experts) for experts in _experts_modules(model)):
        return {}
    with reading.kept_generators():
        known = in_small_model(small_model(_unsharded_class(model), model.config))
    names = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    found = {}
    for experts in _experts_modules(model):
        block = _block_of(experts)
        for block_class, relative in known:
            if isinstance(model.get_submodule(block), block_class) and (name := _join(block, relative)) in names:
                found[experts] = name
    return found


def _unsharded_class(model: nn.Module) -> type[PreTrainedModel]:
    """The class of a model before `fully_shard`, which replaces it by one derived from it."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


def _experts_modules(model: nn.Module) -> list[str]:
    """The path of each experts module, in the order of the model."""
    return [*dict.fromkeys(path.rpartition(".")[0] for path in sharding.expert_paths(model))]


def _block_of(experts: str) -> str:
    """The path of the module around experts, in which their router is."""
    return experts.rpartition(".")[0]


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# ------------------------------------------------------------------------------------------------- trials


def small_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """A model of these options at small sizes, on the CPU; it draws random numbers."""
    given = given_config.of_class(model_class)
    try:
        small = given.shrink(config).config
    except SmallConfigError:  # its options do not fit small sizes; those of the class's defaults do
        small = given.small_config(type(config)).config
    return build_model(model_class, small).eval()


@torch.no_grad()
def in_small_model(model: PreTrainedModel) -> list[tuple[type[nn.Module], str]]:
    """The classes of blocks around experts, and the name of the bias in each, by trial."""
    ids = text_cases(model.config, type(model))[0].batch["input_ids"][
        :1
    ]  # classifiers take several rows with padding only
    eager = dict.fromkeys(seams.names(), seams.EAGER)
    with parallel.using(None), seams.using(**eager):
        return [
            (type(model.get_submodule(_block_of(experts))), relative)
            for experts in _experts_modules(model)
            for relative, candidate in candidates(model, experts)
            if _decides_selection_alone(model, ids, experts, candidate)
        ]


def candidates(model: nn.Module, experts: str) -> list[tuple[str, Tensor]]:
    """The floating-point tensors around experts, but not in them, that have a number per expert and get no gradient."""
    block, num_experts = _block_of(experts), num_experts_of(model.get_submodule(experts))
    inside, owner = f"{experts.removeprefix(f'{block}.')}.", model.get_submodule(block)
    return [
        (name, tensor)
        for name, tensor in (*owner.named_buffers(), *owner.named_parameters())
        if tensor.is_floating_point() and tensor.numel() == num_experts and not tensor.requires_grad
        if not name.startswith(inside)
    ]


def _decides_selection_alone(model: nn.Module, ids: Tensor, experts: str, candidate: Tensor) -> bool:
    before, order = candidate.clone(), torch.arange(candidate.numel(), dtype=candidate.dtype)
    try:
        for increasing in (order, order.flip(0)):  # along the numbers of experts, by which some routers group them
            given = []
            for scale in (STEP, 2 * STEP):
                candidate.copy_((scale * increasing).view_as(candidate))
                given.append(_given_to(model, ids, experts))
            first, second = given
            index = routing_index(experts, first)
            if index is None or not _are_equal(first, second):
                return False
            expected = increasing.topk(index.shape[-1]).indices.sort().values
            if not bool((index.sort(-1).values == expected).all()):
                return False
        return True
    finally:
        candidate.copy_(before)


def _given_to(model: nn.Module, ids: Tensor, experts: str) -> list[Tensor]:
    """The tensors that an experts module is called with in a forward of `ids`, int64 `[B, S]`."""
    given: list[Tensor] = []

    def note(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        given.extend(value.clone() for value in (*args, *kwargs.values()) if isinstance(value, Tensor))

    handle = model.get_submodule(experts).register_forward_pre_hook(note, with_kwargs=True)
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    return given


def _are_equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(*pair) for pair in zip(first, second, strict=True))
