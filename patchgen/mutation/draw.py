"""Random mutants of a source: operators take turns while they have any left; an operator's places come in random order."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator

from patchgen.mutation import configuration as configurations
from patchgen.mutation.edits import Mutant, Place, Source
from patchgen.mutation.expressions import EXPRESSION_OPERATORS, ExpressionOperator
from patchgen.mutation.hidden_values import HIDDEN_VALUE_OPERATORS
from patchgen.mutation.losses import LOSS_OPERATORS
from patchgen.mutation.statements import STATEMENT_OPERATORS, StatementOperator
from patchgen.mutation.whole_file import FILE_OPERATORS, FileOperator

Operator = ExpressionOperator | StatementOperator | FileOperator
OPERATORS: tuple[Operator, ...] = (
    *EXPRESSION_OPERATORS,
    *STATEMENT_OPERATORS,
    *FILE_OPERATORS,
    *LOSS_OPERATORS,
    *HIDDEN_VALUE_OPERATORS,
)
# By name, the operator on the configuration file included. What keeps the meaning is meant to compute the same.
NAMES = {operator.name: operator.keeps_meaning for operator in OPERATORS} | {configurations.NAME: False}
"""Every operator -> whether it keeps the meaning."""


def draw(
    text: str,
    seed: int,
    executed: Callable[[int, int], bool] = lambda first, last: True,
    configuration: configurations.Configuration | None = None,
    operators: Container[str] = NAMES,
) -> Iterator[Mutant]:
    """Random mutants of a source until there are no more, at most two per place and operator; none twice.

    Args:
        text: the source.
        seed: equal seeds give equal mutants.
        executed: whether the statement from the first line to the last runs in training. Mutants start at such statements
            only; what an operator changes with them, such as the other uses of a name that it renames, may lie elsewhere.
        configuration: the configuration file beside it, if any; its defaults are changed too, whatever `operators` are.
        operators: the names of the operators on the source.
    """
    generator = random.Random(seed)
    source = Source(text)
    places = list(source.places(executed))
    waiting: dict[str, Iterator[Callable[[], Mutant]]] = {}
    for operator in OPERATORS:
        if operator.name not in operators:
            continue
        shuffled = list(places)
        generator.shuffle(shuffled)
        waiting[operator.name] = _from_places(operator, shuffled, generator)
    if configuration is not None:
        changes = list(configuration.mutants(text))
        generator.shuffle(changes)
        waiting[configurations.NAME] = iter(changes)
    seen = {Mutant("", "", "", text, True).digest}  # the unchanged source
    names = list(waiting)
    generator.shuffle(names)  # a short round has other operators with another seed
    while names:
        for name in list(names):
            mutant = next((m for m in (make() for make in waiting[name]) if m.digest not in seen), None)
            if mutant is None:
                names.remove(name)
                continue
            seen.add(mutant.digest)
            yield mutant


def _from_places(operator: Operator, places: list[Place], generator: random.Random) -> Iterator[Callable[[], Mutant]]:
    """At most two mutants per place, so that long statements do not crowd out the others."""
    for place in places:
        mutants = list(operator.mutants(place))
        generator.shuffle(mutants)
        yield from mutants[:2]
