"""One small training step of a generated file, watched: what decides, at run time, in which layouts ranks agree.

reads.py         which values of tensors does Python read, and do other values run other modules?
                 several ranks are ruled out: they would wait for each other
lengths.py       what is computed from the length of a sequence, or from its largest position?
                 slices of a sequence are ruled out, which are shorter
kept_values.py   what does a step keep, and does the next step read it?
                 several ranks are ruled out: each would keep another value
lines.py         which lines did no proof run?

`facts.py` has the facts and what they rule out; `observer.py` runs the steps.
"""
