"""Parameters that a forward without a backward leaves gathered."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from patchgen.runtime.parallel import undivided


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters: of the root, and of units that stay gathered after their forward (`reshard_after_forward=False`).

    A backward frees them; after a forward without one, `model.parameters()` are full ones instead of the shards that an
    optimizer, gradients and checkpoints need. `FSDPModule.reshard` frees those of one module only.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reshard_after_error(model: nn.Module) -> None:
    """`reshard` after a forward that raised: its units are still in it, where they would not reshard.

    Args:
        model: the root, as it was called.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # from torch 2.13 on
        model.reset_iter_state()
        return
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._state_ctx.iter_forward_root = None
            for running in (state, *undivided.param_groups(module)):
                running._training_state = TrainingState.IDLE
    reshard(model)
