"""Mutants of upstream sources, on which the generator is tested: the generator must refuse each, or its file must compute the same.

edits.py        a place in a source, and new text for it
expressions.py  operators on one expression         statements.py      operators on one statement
whole_file.py   renames, helpers, moves             configuration.py   another default of the config
losses.py       formulas and factors of losses  hidden_values.py  masks, hooks, state and lengths, on hidden values
draw.py         a random sample of mutants          rounds.py          many mutants of many models, recorded in a file
table.py        the counts of verdicts, and their page

All but the last two take and give text, as the generator does: `patchgen/runtime/verify/mutants.py` runs the mutants.
"""
