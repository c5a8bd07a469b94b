"""Changed upstream sources, to hold the generator to its promise on: refused, or equal to what was changed.

edits.py        a place in a source, and new text for it
expressions.py  operators on one expression         statements.py  operators on one statement
whole_file.py   renames, helpers, moves             configuration.py   another default of the config
losses.py       formulas and factors of losses
draw.py         N of all of them, by a seed
rounds.py       many of many models, kept in a file table.py       what became of them

The first seven take and give text, as the generator does: `patchgen/runtime/verify/mutants.py` runs what they make.
"""
