"""Hand edits under upstream changes: 40 methods are overridden, then moved to two later releases.

    python benchmarks/bench_hand_edits.py            # into benchmarks/results_hand_edits.csv, a minute or two

Each override is the old release's method, with which a person would begin; so the model generates as before, and the override
hides upstream's later changes of the method. `patchgen upgrade` must report every target that changed or is gone, and no other.
The expected changes are read from the wheels by other code: the method's text, parsed and printed again without docstrings.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import random
import tempfile
import textwrap
from dataclasses import replace
from pathlib import Path

from patchgen import pipeline, provenance
from patchgen.errors import PatchgenError
from patchgen.model_configs import ModelConfig, config_for
from patchgen.passes.hand_edits import OverrideMethod
from patchgen.runtime.verify.committed_models import committed
from patchgen.upgrade import compare_model, releases
from patchgen.upstream import Release, Upstream, load_from

RESULTS = Path(__file__).with_name("results_hand_edits.csv")
FIELDS: tuple[str, ...] = ("model", "target", "made_with", "moved_to", "independent", "reported", "verdict", "agrees")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--made-with", default="5.13.0")
    parser.add_argument("--moved-to", nargs="+", default=["5.17.0", "5.23.0"])
    parser.add_argument("--models", nargs="+", default=committed())
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    old = releases.find(options.made_with).release
    drawn = draw(old, options.models, options.count, options.seed)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for model, targets in drawn.items():
            config = override(load_from(old, model), targets)
            provenance.write(pipeline.generate(load_from(old, model), config), Path(folder) / model)
            for to in options.moved_to:
                rows += moved(model, targets, options.made_with, to, Path(folder), config)
                print(f"{model} {options.made_with} -> {to}: {len(targets)} edits", flush=True)
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    changed = [row for row in rows if row["independent"] != "same"]
    wrong = [row for row in rows if row["agrees"] != "yes"]
    print(f"{len(rows)} edits moved, {len(changed)} targets changed or gone, {len(wrong)} reported wrongly")


def draw(old: Release, models: list[str], count: int, seed: int) -> dict[str, list[str]]:
    """Methods of those committed models that generate from the old release: model -> `Class.method`."""
    methods = []
    for model in models:
        try:
            generated = pipeline.generate(load_from(old, model))
        except PatchgenError as error:
            print(f"{model}: {old.origin} is refused: {str(error).splitlines()[0]}", flush=True)
            continue
        symbols = json.loads(generated.provenance)["symbols"]
        methods += [(model, name) for name in methods_of(generated.upstream.text) if name.partition(".")[0] in symbols]
    drawn: dict[str, list[str]] = {}
    for model, name in sorted(random.Random(seed).sample(methods, count)):
        drawn.setdefault(model, []).append(name)
    return drawn


def methods_of(text: str) -> dict[str, str]:
    """`Class.method` -> source, of the methods that a class defines once."""
    sources_by_name: dict[str, list[str]] = {}
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                start = min([member.lineno, *(decorator.lineno for decorator in member.decorator_list)])
                lines = text.splitlines()[start - 1 : member.end_lineno]
                sources_by_name.setdefault(f"{node.name}.{member.name}", []).append(textwrap.dedent("\n".join(lines)))
    return {name: sources[0] for name, sources in sources_by_name.items() if len(sources) == 1}


def override(old: Upstream, targets: list[str]) -> ModelConfig:
    """The model's config with each target overridden by itself."""
    sources = methods_of(old.text)
    edits = tuple(OverrideMethod(target, sources[target], "an override to be carried on") for target in targets)
    config = config_for(old.model)
    return replace(config, edits=(*config.edits, *edits))


def moved(model: str, targets: list[str], made_with: str, to: str, root: Path, config: ModelConfig) -> list[dict]:
    """A row per target: its change according to the wheels, and according to `patchgen upgrade`."""
    comparison = compare_model(model, to, root, config=config)
    sites = {site.symbol: site for site in comparison.sites if site.kind == "hand edit"}
    before, after = (methods_of(text_in(version, model)) for version in (made_with, to))
    rows = []
    for target in targets:
        is_same = target in after and plain(before[target]) == plain(after[target])
        independent = "same" if is_same else "changed" if target in after else "gone"
        site = sites.get(target)
        reported = "same" if site is None else "changed" if site.new_upstream else "gone"
        names = {"model": model, "target": target, "made_with": made_with, "moved_to": to}
        agrees = "yes" if reported == independent else "no"
        verdict = site.verdict if site else 0
        rows.append(names | {"independent": independent, "reported": reported, "verdict": verdict, "agrees": agrees})
    return rows


def text_in(version: str, model: str) -> str:
    """The modeling file, read from the release without patchgen's reader of symbols."""
    return load_from(releases.find(version).release, model).text


def plain(source: str) -> str:
    """A method as Python prints it, without its docstring."""
    (function,) = ast.parse(source).body
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function)


if __name__ == "__main__":
    main()
