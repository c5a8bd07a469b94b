"""Changed upstream sources, to hold the generator to its promise on: refused, or equal to what was changed.

edits.py        a place in a source, and new text for it
expressions.py  operators on one expression         statements.py  operators on one statement
whole_file.py   renames, helpers, moves             draw.py        N of all of them, by a seed

Text in, text out, as the generator itself: `patchgen/runtime/verify/mutants.py` runs them.
"""
