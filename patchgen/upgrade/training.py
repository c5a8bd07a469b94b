"""Which imported helpers training, or building a model, can run, and which are reached only through code that it does not run.

The closure of `reach.py` assumes that code runs whatever it names. Much of that is reached only through a few places of
transformers: decoding, checks for installed packages, checks of names of kernels, which the run chose itself. A symbol
that is also reached another way, or that the modeling file names itself, counts as run.
"""

from __future__ import annotations

from patchgen.upgrade.reach import SymbolPlace

NOT_TRAINING = {
    "cache_utils.py": "caches for decoding",
    "generation/": "decodes",
    "integrations/eager_paged.py": "attention in the caches of decoding",
    "integrations/flash_paged.py": "attention in the caches of decoding",
    "integrations/sdpa_paged.py": "attention in the caches of decoding",
    "integrations/hub_kernels.py": "loads kernels from the hub",
    "model_debugging_utils.py": "prints what modules compute",
    "utils/import_utils.py": "checks for installed packages",
    "utils/logging.py": "prints",
}
"""Files and folders that compute nothing in training -> what they do instead."""
LEADS_OUTSIDE_TRAINING = {
    ("configuration_utils.py", "PreTrainedConfig.__repr__"): "prints a configuration",
    ("modeling_flash_attention_utils.py", "lazy_import_flash_attention"): "loads a kernel by its name",
    ("modeling_utils.py", "PreTrainedModel._check_and_adjust_attn_implementation"): "checks a name that the run chose",
    (
        "modeling_utils.py",
        "PreTrainedModel._check_and_adjust_experts_implementation",
    ): "checks a name that the run chose",
}
"""Symbols that count as run, but not for what they call, which computes nothing in training -> what it does instead."""


def training_follows(place: SymbolPlace, other: SymbolPlace) -> bool:
    """Whether training that runs `place` can run `other`, to which `place` leads."""
    return place not in LEADS_OUTSIDE_TRAINING and not other[0].startswith(tuple(NOT_TRAINING))
