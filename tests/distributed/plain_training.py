"""Training with transformers and torch alone: what runs of the recipe `cases_trainer.recipe_of` are compared with.

Nothing of the runtime but the packed rows themselves: transformers' model in fp32 with its own loss, torch's AdamW and
clipping, and a schedule written out again.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn


def plain_loop(model: nn.Module, steps: int, rows: list[dict]) -> list[float]:
    """The losses before each update, of the parameters of `model` that require gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    vectors = [parameter for parameter in trained if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(steps):
        documents = []
        for row in rows[4 * step : 4 * step + 4]:
            bounds = row["cu_seq_lens_q"].tolist()
            documents += [row["input_ids"][:, a:b] for a, b in itertools.pairwise(bounds)]
        count = sum(ids.shape[1] - 1 for ids in documents)
        total = 0.0
        for ids in documents:
            if ids.shape[1] > 1:  # unpacked: each document is a row of its own
                loss = model(input_ids=ids, labels=ids).loss * (ids.shape[1] - 1) / count
                loss.backward()
                total += float(loss.detach())
        done = (step - 3) / (steps - 3)
        share = (step + 1) / 3 if step < 3 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * share
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
