"""Which imported helpers training, or the making of a model, can run, and which only stand behind code that it does not run.

The closure of `reach.py` takes whatever code reads for what it runs. Much of that stands behind a few places of transformers
alone: what decodes, what asks which packages there are, what checks the name of a kernel that the run chooses itself. What
another way leads to as well counts, and so does what the modeling file reads itself.
"""

from __future__ import annotations

from patchgen.upgrade.reach import Place

ASIDE = {
    "cache_utils.py": "keeps what decoding needs",
    "generation/": "decodes",
    "integrations/eager_paged.py": "attends in the caches of decoding",
    "integrations/flash_paged.py": "attends in the caches of decoding",
    "integrations/sdpa_paged.py": "attends in the caches of decoding",
    "integrations/hub_kernels.py": "loads kernels of the hub",
    "model_debugging_utils.py": "prints what modules compute",
    "utils/import_utils.py": "says which packages there are",
    "utils/logging.py": "prints",
}
"""Files and folders that compute nothing in training: what they do instead."""
LEADING_ASIDE = {
    ("configuration_utils.py", "PreTrainedConfig.__repr__"): "prints a configuration",
    ("modeling_flash_attention_utils.py", "lazy_import_flash_attention"): "loads a kernel by its name",
    ("modeling_utils.py", "PreTrainedModel._check_and_adjust_attn_implementation"): "checks a name that the run chose",
    (
        "modeling_utils.py",
        "PreTrainedModel._check_and_adjust_experts_implementation",
    ): "checks a name that the run chose",
}
"""Symbols that count themselves, while what they lead to is run for something else than to compute: for what."""


def runs(place: Place, other: Place) -> bool:
    """Whether training, where it runs `place`, may run `other`, which that leads to."""
    return place not in LEADING_ASIDE and not other[0].startswith(tuple(ASIDE))
