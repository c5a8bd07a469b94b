"""Which of transformers' losses `self.loss_function` is: by `self.loss_type`, which a model takes from its class's name.

This is the rule of `PreTrainedModel.__init__` and `PreTrainedModel.loss_function`.
"""

from __future__ import annotations

import ast
import re

from patchgen.anatomy.classes import ClassInfo, own_attribute, stores_of, targets
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.origins import origins
from patchgen.anatomy.own_losses import ALIGNED
from patchgen.errors import Missed

NEXT_TOKEN, SAME_TOKEN = "ForCausalLM", "ForMaskedLM"
FORMS = {NEXT_TOKEN: "", "ForConditionalGeneration": "", "CsmForConditionalGeneration": "", SAME_TOKEN: ALIGNED}
"""Type of a loss over a vocabulary -> its form; "" where it shifts the labels."""
# fmt: off
KEYS = (
    "ForSemanticSegmentation", NEXT_TOKEN, SAME_TOKEN, "ForQuestionAnswering", "ForSequenceClassification",
    "ForImageClassification", "ForVideoClassification", "ForAudioClassification", "ForTokenClassification",
    "ForSegmentation", "ForObjectDetection", "ForCTC", "ForConditionalGeneration", "DeformableDetrForObjectDetection",
    "ConditionalDetrForObjectDetection", "DabDetrForObjectDetection", "GroundingDinoForObjectDetection",
    "MMGroundingDinoForObjectDetection", "ConditionalDetrForSegmentation", "RTDetrForObjectDetection",
    "RTDetrV2ForObjectDetection", "DFineForObjectDetection", "Deimv2ForObjectDetection", "CsmForConditionalGeneration",
    "LwDetrForObjectDetection", "PocketTTSForConditionalGeneration", "GradiumPhononTTSForConditionalGeneration",
    "ParakeetForRNNT", "ParakeetForTDT", "RfDetrForObjectDetection", "RfDetrForInstanceSegmentation",
)
# fmt: on
"""The keys of transformers' LOSS_MAPPING, in its order: a class is of the first that its name holds, if it is none itself."""


def library_form(owner: str, anatomy: Anatomy) -> str:
    """The form of the transformers loss of a class and of those that inherit its forward; "" where it shifts the labels.

    Raises:
        Missed: it is not the loss of a language model, or nothing tells which one it is.
    """
    forward = anatomy.method(owner, "forward")
    heirs = [n for n in anatomy.classes if any(one.name == owner for one in anatomy.lineage(n))]
    found = {kind for name in heirs if anatomy.method(name, "forward") == forward for kind in _types(name, anatomy)}
    forms = {FORMS.get(kind) for kind in found}
    if None in forms or len(forms) != 1:
        raise Missed(f"one loss_type of {', '.join(FORMS)}, that is known", f"{owner}: {', '.join(sorted(found))}")
    return forms.pop() or ""


def type_by_name(name: str) -> str:
    """The loss type that transformers finds in the name of a class; that of the next token where it finds none."""
    found = re.search("|".join(KEYS), name)
    return name if name in KEYS else found[0] if found else NEXT_TOKEN


def _types(owner: str, anatomy: Anatomy) -> set[str]:
    """All that `self.loss_type` may be in an instance; what is not known as source."""
    if anatomy.is_stored_outside("loss_type", [info.name for info in anatomy.lineage(owner)]):
        return {"a loss_type that is assigned in the class, or from outside"}
    by_name = type_by_name(owner)
    chosen = next((info for info in anatomy.lineage(owner) if stores_of(info, "loss_type")), None)
    if chosen is None:
        return {by_name}
    found = set[str]() if _is_always_set(chosen) else {by_name}
    for value in stores_of(chosen, "loss_type"):
        for _, origin in origins(anatomy, chosen.name, value):
            match origin:
                case ast.Constant(None):
                    found.add(NEXT_TOKEN)
                case ast.Constant(str(kind)):
                    found.add(kind)
                case _:
                    found.add(ast.unparse(origin))
    return found


def _is_always_set(info: ClassInfo) -> bool:
    """Whether `__init__` assigns it under no condition."""
    init = info.methods.get("__init__")
    assigned = [n for n in (init.body if init else ()) if isinstance(n, ast.Assign | ast.AnnAssign)]
    return any(own_attribute(target) == "loss_type" for node in assigned for target in targets(node))
