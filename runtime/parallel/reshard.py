"""Parameters that a forward without a backward leaves gathered."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters: of the root, and of units that stay gathered after their forward (`reshard_after_forward=False`).

    A backward frees them; after a forward without one, `model.parameters()` are full ones instead of the shards that an
    optimizer, gradients and checkpoints need. `FSDPModule.reshard` frees those of one module only.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
