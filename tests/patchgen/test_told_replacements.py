"""A module that replaces what it defined above: the generated file computes something else, and the proof tells it."""

from __future__ import annotations

import pytest
from changed_sources import OWN_POSITIONS, changed
from judged import TOLD, judged

from patchgen.runtime.verify import told

ROTATE = "def rotate_half(x):"
APPLY = '@use_kernel_forward_from_hub("rotary_pos_emb")\ndef apply_rotary'
OTHER_NORM = "def softer(self, x):\n    return x\n\n\n"

REPLACED = {
    "a helper of the norm": "Gemma3RMSNorm._norm = softer",
    "a helper, by setattr": 'setattr(Gemma3RMSNorm, "_norm", softer)',
}


@pytest.mark.slow
@pytest.mark.parametrize("code", REPLACED.values(), ids=REPLACED)
def test_a_replaced_helper_is_told(code: str):
    found = judged(changed("fused_ops", "gemma3", code, (ROTATE, f"{OTHER_NORM}{code}\n\n\n{ROTATE}")))
    assert (found.kind, found.by) == (TOLD, told.PROOF), found


@pytest.mark.slow
def test_a_replaced_rotation_is_told_by_the_kernel_in_its_place():
    """The file has the replacement as well; the kernel, which a run must ask for, has not."""
    change = changed("fused_ops", "qwen3_moe", "the rotation", (APPLY, f"rotate_half = torch.neg\n\n\n{APPLY}"))
    found = judged(change, implementations=("compiled",))
    assert (found.kind, found.by) == (TOLD, told.PROOF) and "rotary=compiled" in found.detail, found


MERGE = "        spatial_merge_size = self.config.vision_config.spatial_merge_size"
KEPT = "        self.rope_deltas = None  # cache rope_deltas here\n"
POSITIONS = {
    "not computed": (
        (OWN_POSITIONS, OWN_POSITIONS.replace("            position_ids = ", "            other_ids = ")),
    ),
    "by a method of another name": (("get_rope_index", "rope_index_of"),),
    "from what a step changes": (
        (KEPT, f"{KEPT}        self.steps = 0\n"),
        (OWN_POSITIONS, f"        self.steps = self.steps + 1\n{OWN_POSITIONS}"),
        (MERGE, f"{MERGE} + self.steps"),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("edits", POSITIONS.values(), ids=POSITIONS)
def test_positions_that_a_run_computes_otherwise_are_told(edits: tuple[tuple[str, str], ...]):
    """A run computes them by `get_rope_index`, where there is one."""
    found = judged(changed("position_id_func", "qwen3_vl", "positions", *edits))
    assert (found.kind, found.by) == (TOLD, told.PROOF), found
