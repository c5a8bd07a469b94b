"""What a modeling file raises while it is proven becomes one error that says what, where, and with which config."""

from __future__ import annotations

import contextlib
import inspect
import linecache
import traceback
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

from patchgen.commands import mends
from patchgen.errors import ConfigError

if TYPE_CHECKING:
    from patchgen.runtime.registry import GeneratedModel

MAX_WIDTH = 300
"""Characters of a config in a message."""


@contextlib.contextmanager
def told(subject: GeneratedModel, head: str | None) -> Generator[None, None, None]:
    """Turns what the file of `subject` or its generated form raises into a ConfigError."""
    from patchgen.runtime.failures import reraise_machine_failure
    from patchgen.runtime.verify.small_config import UPSTREAM_REFUSALS

    try:
        yield
    except (*UPSTREAM_REFUSALS, ArithmeticError, NameError, OSError) as error:
        reraise_machine_failure(error)
        raise ConfigError(_message(subject, head or subject.heads[0], error)) from error


def _message(subject: GeneratedModel, head: str, error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    source, generated = _files(subject)
    in_generated = any(frame.filename == str(generated) for frame in frames)
    place = next((frame for frame in reversed(frames) if frame.filename in (str(source), str(generated))), None)
    if in_generated:
        what = f"the generated class of '{subject.name}' does not run in a form in which the file itself does"
    elif place is None:
        what = f"'{subject.name}' could not be compared, and no line of its file was running: this may be a fault of patchgen"
    else:
        what = f"the file of '{subject.name}' itself does not run in this form, so there is nothing to compare with"
    lines = [f"{what}:", f"  {type(error).__name__}: {_one_line(str(error))}"]
    if place is not None and place.lineno is not None:
        code = linecache.getline(place.filename, place.lineno).strip()
        lines.append(f"  at       {place.filename} line {place.lineno}: {code}")
    lines.append(f"  config   {_tried(subject, head)}")
    return "\n".join([*lines, f"  to fix   {_advice(error, in_generated=in_generated)}"])


def _files(subject: GeneratedModel) -> tuple[Path | None, Path]:
    """The file that a model was generated from, and the generated one; None: that one cannot be imported."""
    try:
        source = subject.upstream().__file__
    except Exception:  # it is what failed; the user's code may raise anything
        source = None
    return (Path(source) if source else subject.source, subject.file)


def _tried(subject: GeneratedModel, head: str) -> str:
    """The small config that the proof builds the head with, as source."""
    from patchgen.runtime.verify import given_config
    from patchgen.runtime.verify.small_config import REFUSALS, SmallConfigError

    try:
        config_class = getattr(subject.upstream(), head).config_class
        overrides = given_config.read(subject.directory).small_config(config_class).overrides
    except (SmallConfigError, *REFUSALS, ImportError, NameError) as error:
        return f"none could be made: {_one_line(str(error))}"
    text = f"{config_class.__name__}({', '.join(f'{name}={value!r}' for name, value in overrides.items())})"
    return f"{_one_line(text)}; all other fields have their defaults ({inspect.getsourcefile(config_class)})"


def _advice(error: Exception, *, in_generated: bool) -> str:
    mend = mends.explaining(error)
    if mend is not None:
        return f"{mend.write}    (for {mend.name}; transformers 5: {mend.now}; {mends.PAGE})"
    if in_generated:
        return (
            "report it with this message; until then leave the pass out that wrote this line (`expect` in the config)"
        )
    return (
        "mend the file so that its class builds and computes a loss with this config, or verify it with another: "
        "`--set field=value`, or `--config config.json` of a checkpoint; `patchgen inspect FILE` and "
        f"{mends.PAGE} list what transformers 5 no longer has"
    )


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_WIDTH else f"{text[:MAX_WIDTH]}..."
