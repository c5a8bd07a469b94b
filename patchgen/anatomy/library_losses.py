"""Which of transformers' losses `self.loss_function` is: by `self.loss_type`, which defaults to one found in the class's name.

This is the rule of `PreTrainedModel.__init__` and `PreTrainedModel.loss_function`.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Mapping

from patchgen.anatomy.classes import ClassInfo, FunctionNode, mentions, own_attribute, stores_of, targets
from patchgen.anatomy.graph import Anatomy
from patchgen.anatomy.origins import origins
from patchgen.anatomy.own_losses import ALIGNED
from patchgen.errors import Missed
from patchgen.upstream import open_release
from patchgen.wheels import installed_version

NEXT_TOKEN = "ForCausalLM"
FUNCTIONS = {"ForCausalLMLoss": "", "ForMaskedLMLoss": ALIGNED}
"""transformers' function -> the form of its loss, "" where it shifts the labels; others are not losses of language models."""
LOSS_FILE, LOSS_TABLE = "loss/loss_utils.py", "LOSS_MAPPING"


@functools.lru_cache(maxsize=8)
def forms_in(text: str) -> Mapping[str, str | None]:
    """Loss type -> form, in the order of transformers' table in a file with this text; the form is None for other losses.
    Raises Missed if the file does not have exactly one such table, as a dict of string literals."""
    nodes = [node for node in ast.parse(text).body if not isinstance(node, FunctionNode | ast.ClassDef)]
    match [node for node in nodes if mentions(node, LOSS_TABLE)]:
        case [ast.Assign([ast.Name()], ast.Dict(keys, values)) | ast.AnnAssign(ast.Name(), _, ast.Dict(keys, values))]:
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) == len(keys):
                return {name: FUNCTIONS.get(ast.unparse(value)) for name, value in zip(names, values, strict=True)}
    table = f"the table {LOSS_TABLE} of transformers' {LOSS_FILE}"
    raise Missed(f"{table}, as one dict of strings in an installed release")


def _forms(anatomy: Anatomy) -> Mapping[str, str | None]:
    """`forms_in` of the file's release, or of the installed release if the file belongs to none."""
    release = anatomy.upstream.release or (open_release() if installed_version() else None)
    return forms_in((release and release.read(LOSS_FILE)) or "")


def library_form(owner: str, anatomy: Anatomy) -> str:
    """The form of the transformers loss of a class and of the subclasses that inherit its forward; "" if it shifts labels.
    Raises Missed if it is not the loss of a language model, or nothing tells which one it is."""
    forward = anatomy.method(owner, "forward")
    heirs = (name for name in anatomy.below(owner) if anatomy.method(name, "forward") == forward)
    found = {kind for name in heirs for kind in _types(name, anatomy)}
    known = {kind: form for kind, form in _forms(anatomy).items() if form is not None}
    forms = {known.get(kind) for kind in found}
    if None in forms or len(forms) != 1:
        raise Missed(f"one loss_type of {', '.join(known)}, that is known", f"{owner}: {', '.join(sorted(found))}")
    return forms.pop() or ""


def type_by_name(name: str, known: Collection[str]) -> str:
    """The loss type that transformers derives from a class's name: the name itself if it is a known type, else the first known
    type in it, else `NEXT_TOKEN`."""
    found = re.search("|".join(known), name)
    return name if name in known else found[0] if found else NEXT_TOKEN


def _types(owner: str, anatomy: Anatomy) -> set[str]:
    """Every value that `self.loss_type` may have in an instance; of one that is not known, its source."""
    if anatomy.is_stored_outside("loss_type", [info.name for info in anatomy.lineage(owner)]):
        return {"a loss_type that is assigned in the class, or from outside"}
    by_name = type_by_name(owner, _forms(anatomy))
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
    """Whether `__init__` assigns `self.loss_type` unconditionally."""
    init = info.methods.get("__init__")
    assigned = [n for n in (init.body if init else ()) if isinstance(n, ast.Assign | ast.AnnAssign)]
    return any(own_attribute(target) == "loss_type" for node in assigned for target in targets(node))
