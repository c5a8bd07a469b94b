"""Which of transformers' losses `self.loss_function` is: by `self.loss_type`, which defaults to one found in the class's name.

This is the rule of `PreTrainedModel.__init__` and `PreTrainedModel.loss_function`.
"""

# pyright: reportMatchNotExhaustive=false
from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Mapping

from patchgen.anatomy.classes import FunctionNode, mentions, stores_of
from patchgen.anatomy.graph import Anatomy
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
    """The form of the transformers loss of a class: by the `loss_type` that its `__init__` names, else by its name. "" where the
    loss shifts the labels, and where it is another: a run refuses any but that of a language model."""
    forms = _forms(anatomy)
    kind = type_by_name(owner, forms)
    for value in next(filter(None, (stores_of(info, "loss_type") for info in anatomy.lineage(owner))), ()):
        if isinstance(value, ast.Constant):
            kind = str(value.value or NEXT_TOKEN)
    return forms.get(kind) or ""


def type_by_name(name: str, known: Collection[str]) -> str:
    """The loss type that transformers derives from a class's name: the name itself if it is a known type, else the first known
    type in it, else `NEXT_TOKEN`."""
    found = re.search("|".join(known), name)
    return name if name in known else found[0] if found else NEXT_TOKEN
