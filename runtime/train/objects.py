"""Python's collector of cycles, kept from walking over what stays."""

from __future__ import annotations

import gc


def freeze_objects() -> None:
    """Leaves all objects that live now out of later collections, after a last one.

    Libraries, model and compiled code are some millions of objects that live as long as the run. A full collection walks over
    them, a few tenths of a second each, in which the host launches nothing.
    """
    gc.collect()
    gc.freeze()
