"""Pages for reviewers: a generated model beside its upstream, an index of all models, a move to another release.

lines.py     the origin of each line, and the pass that wrote or removed it       highlight.py  lines as coloured HTML
sections.py  aligned lines, in sections that a browser lays out when they come into view
model.py     the page of a model                                                  proofs.py     tables of recorded proofs
index.py     the page over all models                                             upgrade.py    the page of a move
"""
