"""Pages for reviewers: a generated model beside its upstream, an index of all models, a move to another release.

lines.py     which line came from where, and which pass wrote or removed it      highlight.py  lines as coloured HTML
sections.py  aligned lines, in sections that a browser lays out when they come into view
model.py     the page of a model                                                  proofs.py     what is recorded of proofs
index.py     the page over all models                                             upgrade.py    three columns
"""
