"""Which imported helpers training, or building a model, can run, and which are reached only through code that it does not run.

The closure of `reach.py` assumes that code runs whatever it names. Much of that is reached only through a few places of
transformers: decoding, checks for installed packages, checks of names of kernels, which the run chose itself. A symbol that is
also reached another way counts as run, unless it is in `FILES_NOT_RUN`; one that the modeling file names itself always does.
"""

from __future__ import annotations

from patchgen.upgrade.reach import SymbolPlace

FILES_NOT_RUN = {
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
"""Files and folders that compute nothing in training -> what they do instead (for readers of this file)."""
NOT_FOLLOWED_FROM = {
    ("configuration_utils.py", "PreTrainedConfig.__repr__"): "prints a configuration",
    ("modeling_flash_attention_utils.py", "lazy_import_flash_attention"): "loads a kernel by its name",
    ("modeling_utils.py", "PreTrainedModel._check_and_adjust_attn_implementation"): "checks a name that the run chose",
    (
        "modeling_utils.py",
        "PreTrainedModel._check_and_adjust_experts_implementation",
    ): "checks a name that the run chose",
}
"""Symbols that count as run although what they call does not, because that computes nothing in training -> what it does
instead (for readers of this file)."""


def training_follows(caller: SymbolPlace, callee: SymbolPlace) -> bool:
    """Whether training that runs `caller` can run `callee`, which `caller` names."""
    return caller not in NOT_FOLLOWED_FROM and not callee[0].startswith(tuple(FILES_NOT_RUN))
