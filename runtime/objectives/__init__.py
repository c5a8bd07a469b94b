"""Training objectives. `docs/objectives.md` explains how to choose one and how to write one.

base.py             the base class
choose.py           from a recipe to the objective
batch.py            the inputs of a loss, on any layout of ranks
learning.py         reference and teacher forwards before the training one
reference.py        the reference model's log-probability of each document, computed once and cached
heads.py            task heads on generated models
encoder_decoder.py  next-token prediction by generated encoder-decoders
dpo.py, reward.py, classification.py, tokens.py, embedding.py, distillation.py     the built-in objectives
"""

from patchgen.runtime.objectives.base import NextToken, Objective
from patchgen.runtime.objectives.batch import Batch

__all__ = ["Batch", "NextToken", "Objective"]
