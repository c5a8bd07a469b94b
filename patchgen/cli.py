"""The command line: one function per command, each a few calls into the package."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from patchgen import commands, executed_code
from patchgen.errors import ConfigError, PatchgenError
from patchgen.runtime.process_exit import end_process

app = typer.Typer(
    name="patchgen",
    help="Compiles Hugging Face modeling files into modeling files that train in parallel.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Several = list[str] | None
Models = Annotated[Several, Argument(help="model types, such as qwen3_moe, unless an option like --all names them")]
ModelsOrAll = Annotated[Several, Argument(help="model types, such as qwen3_moe; without any, all committed ones")]
Model = Annotated[str, Argument(help="a model type, for example qwen3_moe", show_default=False)]
Transformers = Annotated[str | None, Option("--transformers", help="a release, for example 5.17.0")]
Every = Annotated[bool, Option("--all", help="every committed model")]
Source = Annotated[Path | None, Option("--source", help="a modeling file, or a folder with one")]
Code = Annotated[str | None, Option(help="the architecture, if transformers does not know it: folder or module")]
Reviewed = Annotated[
    Several, Option(help="a hand edit's target, as Class.method, that you compared with the new upstream; repeatable")
]
Assignments = Annotated[Several, Option("--set", help="a value of the recipe, such as parallel.ep=2; repeatable")]
GeneratedIn = Annotated[str | None, Option("--generated", help="with --code: the folder that generate wrote to")]


@app.command()
def init(folder: Annotated[Path, Argument(help="the root of the project")] = Path()) -> None:
    """Start a repository of your own: a patchgen.toml, and the folders for models, configs and passes that it names.

    Example: patchgen init
    """
    commands.starting.init(folder)


@app.command()
def generate(
    models: Models = None,
    every: Every = False,
    transformers: Transformers = None,
    source: Source = None,
    config: Annotated[
        Path | None, Option("--config", help="the config of --source; by default patchgen_NAME.py beside it")
    ] = None,
    output: Annotated[Path | None, Option(help="the folder to write, instead of generated_models/")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="show, write nothing")] = False,
    force: Annotated[bool, Option("--force", help="overwrite manual edits of generated files")] = False,
    reviewed: Reviewed = None,
    head: Annotated[
        Several, Option(help="a class to generate for, instead of upstream's causal head; repeatable")
    ] = None,
) -> None:
    """Write modeling file, diff and provenance of models. Exit 1 if one is refused; the others are written.

    Example: patchgen generate qwen3_moe --transformers 5.24.0
    """
    options = {"config": config, "dry_run": dry_run, "force": force, "reviewed": reviewed or [], "heads": head or []}
    commands.generation.generate(models or [], every, transformers, source, output, **options)


@app.command()
def check(models: ModelsOrAll = None) -> None:
    """Regenerate in memory and compare bytes. Exit 1 if a committed file or a recorded proof is stale, a model has no proof,
    or an example of the project's passes fails; without MODELS also if a folder of models has no provenance.json.

    Example: patchgen check qwen3_moe
    """
    raise typer.Exit(commands.generation.check(models or []))


@app.command()
def diff(model: Model, transformers: Transformers = None, source: Source = None) -> None:
    """Show what each pass changes when the model is generated now.

    Example: patchgen diff qwen3_moe
    """
    commands.inspection.diff(model, transformers, source)


@app.command()
def explain(
    subject: Annotated[str | None, Argument(help="a pass or a model; without one, all passes are listed")] = None,
    transformers: Transformers = None,
    source: Source = None,
) -> None:
    """Explain a pass (purpose, examples) or a model (each site, before and after).

    Example: patchgen explain fused_loss
    """
    commands.inspection.explain(subject, transformers, source)


@app.command()
def inspect(
    subject: Annotated[str, Argument(help="a model type, or the path of a modeling file")],
    transformers: Transformers = None,
) -> None:
    """Show the anatomy: each class with its role and why, what each pass would hit, and a draft config.

    Example: patchgen inspect mixtral
    """
    commands.inspection.inspect(subject, transformers)


@app.command()
def new(
    model: Model,
    transformers: Transformers = None,
    source: Source = None,
    force: Annotated[bool, Option("--force", help="overwrite a config that exists")] = False,
) -> None:
    """Write a draft config into patchgen/model_configs/, or into the folder of configs of the project.

    Example: patchgen new olmoe
    """
    commands.inspection.new(model, transformers, source, force=force)


@app.command()
def mutate(
    models: Annotated[Several, Argument(help="one or more model types, such as qwen3_moe")] = None,
    count: Annotated[int, Option(help="how many mutants to run per model")] = 100,
    seed: Annotated[int, Option(help="random seed of the mutants")] = 0,
    jobs: Annotated[int, Option(min=1, help="processes")] = 2,
    ranks: Annotated[bool, Option("--ranks", help="also compare some of the equal ones on two ranks")] = False,
    records: Annotated[Path | None, Option(help="append a line per mutant to this file, and resume from it")] = None,
    output: Annotated[Path | None, Option(help="write the table to this .json file, and a page from it")] = None,
) -> None:
    """Mutate upstream sources: the generator must refuse each, or its file must compute the same. Exit 1 if one is wrong.

    Example: patchgen mutate qwen3_moe --count 200
    """
    raise typer.Exit(
        commands.mutating.mutate(models or [], count, seed, jobs, ranks=ranks, records=records, output=output)
    )


@app.command()
def report(
    models: ModelsOrAll = None,
    output: Annotated[Path | None, Option(help="the folder to write, instead of reports/")] = None,
    upgrade: Annotated[bool, Option("--upgrade", help="show what a move to another release changes")] = False,
    to: Annotated[
        str | None, Option("--to", help="with --upgrade: a release, a wheel or a folder, instead of the installed one")
    ] = None,
) -> None:
    """Write pages for review: upstream and generated side by side, passes, census, proofs. For all, also an index.

    Example: patchgen report qwen3_moe
    """
    if to is not None and not upgrade:
        raise ConfigError("--to names the release of an upgrade. To fix: give --upgrade with it.")
    if upgrade:
        commands.reporting.report_upgrade(models or [], to, output)
    else:
        commands.reporting.report(models or [], output)


@app.command(name="list")
def list_models() -> None:
    """List the committed models: source release, passes, proof.

    Example: patchgen list
    """
    commands.generation.list_models()


@app.command()
def upgrade(
    models: ModelsOrAll = None,
    to: Annotated[
        str | None, Option("--to", "--transformers", help="a release, wheel or folder, instead of the installed one")
    ] = None,
    apply: Annotated[
        bool, Option("--apply", help="regenerate, prove in the release's own environment, write")
    ] = False,
    reviewed: Reviewed = None,
    as_json: Annotated[bool, Option("--json", help="print the findings as JSON")] = False,
    verbose: Annotated[bool, Option("--verbose", help="show the sources of imported helpers, too")] = False,
    python: Annotated[
        Path | None, Option(help="with --apply: prove in this Python, which has the release, not a new environment")
    ] = None,
    jobs: Annotated[int, Option(min=1, help="processes")] = 2,
) -> None:
    """Show what a move to another release changes, site by site. Exit 0: unchanged; 10: review; 20: needs a person. With
    --apply 0: every model was moved; 20: one was not.

    Example: patchgen upgrade qwen3_moe --to 5.17.0
    """
    if python is not None and not apply:
        raise ConfigError("--python is the interpreter in which --apply proves. To fix: give --apply with it.")
    options = {"reviewed": reviewed or [], "as_json": as_json, "verbose": verbose, "python": python, "jobs": jobs}
    raise typer.Exit(commands.upgrading.upgrade(models or [], to, apply=apply, **options))


@app.command()
def verify(
    models: Models = None,
    every: Every = False,
    directory: Annotated[Path | None, Option(help="a generated model outside generated_models/")] = None,
    head: Annotated[str | None, Option(help="the class to prove; by default only the first head is")] = None,
    ranks: Annotated[int, Option(min=1, help="prove on this many gloo ranks, against one")] = 1,
    sp: Annotated[int, Option(min=1, help="with --ranks: how many of them share a sequence")] = 1,
    ep: Annotated[int, Option(min=1, help="with --ranks: how many of them share the experts")] = 1,
    fsdp: Annotated[bool, Option("--fsdp", help="with --ranks: shard the parameters over them")] = False,
    outdated: Annotated[bool, Option("--outdated", help="only models whose recorded proof is stale")] = False,
    config: Annotated[
        Path | None, Option(help="prove with a small form of this config.json, and keep it beside the model")
    ] = None,
    settings: Annotated[
        Several, Option("--set", help="a field of the small config, as in field=value; repeatable; kept as well")
    ] = None,
    against: Annotated[
        str | None, Option(help="prove with another release, such as 5.20.0, in its own environment")
    ] = None,
    python: Annotated[Path | None, Option(help="with --against: prove in this Python, which has the release")] = None,
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Prove generated models equal to upstream: loss, logits, every gradient, in one process and on two ranks with FSDP,
    shared experts and a shared sequence. Exit 1 if one is not.

    Example: patchgen verify qwen3_moe; a layout of more ranks: patchgen verify qwen3_vl --ranks 4 --sp 2 --fsdp
    """
    if against is not None:
        others = {"--directory": directory, "--head": head, "--ranks": ranks > 1, "--outdated": outdated}
        others |= {"--sp": sp > 1, "--ep": ep > 1, "--fsdp": fsdp, "--code": code, "--generated": generated}
        others |= {"--config": config, "--set": settings}
        if conflicts := [name for name, value in others.items() if value]:
            what = "proves the first head of committed files as they are, in one process"
            raise ConfigError(f"--against {what}. To fix: omit {', '.join(conflicts)}.")
        raise typer.Exit(commands.upgrading.verify_against(models or [], against, every=every, python=python))
    if python is not None:
        raise ConfigError("--python is the interpreter in which --against proves. To fix: give --against with it.")
    if outdated and directory is not None:
        raise ConfigError("--outdated selects committed models, --directory another file. To fix: omit one of them.")
    if ranks == 1 and (sp > 1 or ep > 1 or fsdp):
        raise ConfigError("--sp, --ep and --fsdp lay out several ranks. To fix: give their number, as in --ranks 4.")
    layout = commands.proof.Layout(ranks, sp=sp, ep=ep, fsdp=fsdp) if ranks > 1 else None
    options = {"every": every, "directory": directory, "head": head, "outdated": outdated}
    options |= {"code": code, "generated_folder": generated, "config": config, "settings": settings or []}
    raise typer.Exit(commands.proof.verify(models or [], layout, **options))


@app.command()
def sweep(
    family: Annotated[str, Option(help="text, moe, media, vision, audio, omni or heads")] = "text",
    jobs: Annotated[int | None, Option(min=1, help="processes, instead of 2")] = None,
    transformers: Transformers = None,
    only: Annotated[Several, Option(help="only this model type; repeatable")] = None,
    output: Annotated[
        Path | None, Option(help="the folder of the record and its page, instead of records/ and docs/")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="repeat what an earlier run has done")] = False,
    sp: Annotated[int, Option(min=1, help="compare on this many ranks that share a sequence, instead of proving")] = 1,
    ep: Annotated[
        int, Option(min=1, help="compare on this many ranks that share the experts, instead of proving")
    ] = 1,
    world: Annotated[
        int | None,
        Option(
            min=1,
            help="2: compare on two ranks in every way, instead of proving; with --sp or --ep: their number",
        ),
    ] = None,
) -> None:
    """Generate and prove every model type of a family, into docs/coverage.md (heads: docs/heads.md) and records/. Resumable.

    A type is proven when it agrees in one process and, with --world 2, on two ranks.

    Example: patchgen sweep --family moe --jobs 2; then patchgen sweep --family moe --world 2
    """
    if sp > 1 or ep > 1 or world is not None:
        if transformers is not None:
            raise ConfigError(
                "--world, --sp and --ep compare with the installed release. To fix: omit --transformers."
            )
        if jobs is not None:
            raise ConfigError("--world, --sp and --ep compare one type at a time, on all ranks. To fix: omit --jobs.")
        layouts = commands.sweeping.layouts_of(sp, ep, world or 2)
        raise typer.Exit(commands.sweeping.sweep_ranks(family, only or [], layouts, output, fresh=fresh))
    if family == commands.head_sweep.FAMILY:
        raise typer.Exit(commands.head_sweep.sweep(jobs or 2, transformers, only or [], output, fresh=fresh))
    raise typer.Exit(commands.sweeping.sweep(family, jobs or 2, transformers, only or [], output, fresh=fresh))


@app.command()
def mesh(
    world: Annotated[int, Option(help="the number of ranks")],
    dp_replicate: Annotated[int, Option(help="copies of the sharded model (HSDP)")] = 1,
    sp: Annotated[int, Option(help="ranks that share a sequence (Ulysses)")] = 1,
    ep: Annotated[int, Option(help="ranks that share the experts")] = 1,
) -> None:
    """Draw the layout of ranks: which share a sequence, experts or a shard.

    Example: patchgen mesh --world 16 --ep 4 --sp 2
    """
    commands.proof.mesh(world, dp_replicate=dp_replicate, sp=sp, ep=ep)


@app.command()
def train(
    recipe: Annotated[Path, Argument(help="a YAML file, for example recipes/qwen3_moe_toy.yaml")],
    processes: Annotated[int, Option("--nproc", min=1, help="ranks on this machine")] = 1,
    nodes: Annotated[str, Option("--nnodes", help="machines, or min:max of them")] = "1",
    rdzv_endpoint: Annotated[str, Option(help="host:port of the rendezvous of several machines")] = "",
    assignments: Assignments = None,
    allow_missing: Annotated[
        Several, Option(help="a pattern of parameters that the weights may lack, such as 'lm_head.*'; repeatable")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="start over; an earlier run is moved aside")] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="show ranks, kernels, cost and memory; train nothing")] = False,
    device: Annotated[
        str | None, Option(help="with --dry-run: plan for h100, h200, b200 or cpu, instead of what this machine has")
    ] = None,
    verbose: Annotated[bool, Option("--verbose", help="with --dry-run: also the recipe with all defaults")] = False,
    print_config: Annotated[bool, Option("--print-config", help="show the recipe with all defaults")] = False,
    script: Annotated[str | None, Option(help="print a start script: slurm or ssh")] = None,
) -> None:
    """Train a recipe: on this machine, on several, or as a rank of torchrun. An existing run is resumed.

    Example: patchgen train recipes/qwen3_moe_toy.yaml --nproc 2 --set parallel.ep=2
    """
    if allow_missing:
        assignments = [*(assignments or []), f"model.allow_missing={json.dumps(allow_missing)}"]
    ranks = {"processes": processes, "nodes": nodes, "rdzv_endpoint": rdzv_endpoint}
    display = {
        "dry_run": dry_run,
        "device": device,
        "verbose": verbose,
        "print_config": print_config,
        "script": script,
    }
    raise typer.Exit(commands.training.train(recipe, assignments or [], fresh=fresh, **ranks, **display))


@app.command()
def doctor(
    recipe: Annotated[Path, Argument(help="a YAML file, as `train` takes it")],
    assignments: Assignments = None,
    skip: Annotated[Several, Option(help="a check to skip, by its name in the table; repeatable")] = None,
    as_json: Annotated[bool, Option("--json", help="the table as JSON")] = False,
    memory: Annotated[
        float | None, Option(help="the most GiB that a model may take: a larger one is checked layer by layer")
    ] = None,
) -> None:
    """Check a recipe's checkpoint and data here: what passed, what failed, how to fix it. Exit 1 if a check failed.

    Example: patchgen doctor recipes/qwen3_moe_toy.yaml --skip layout
    """
    options = {"skip": skip or [], "as_json": as_json, "memory": memory}
    raise typer.Exit(commands.doctor.doctor(recipe, assignments or [], **options))


@app.command()
def data(
    recipe: Annotated[Path, Argument(help="a YAML file, for example recipes/qwen3_moe_toy.yaml")],
    rows: Annotated[int, Option(min=1, help="packed rows to show")] = 1,
    html: Annotated[Path | None, Option(help="write a page instead of text")] = None,
    evaluation: Annotated[bool, Option("--eval", help="show eval_data instead")] = False,
    assignments: Assignments = None,
) -> None:
    """Show what a recipe trains on: its packed rows with the tokens that have a loss marked, counts, lengths.

    Example: patchgen data recipes/qwen3_moe_toy.yaml --rows 2 --html data.html
    """
    commands.data.show(recipe, assignments or [], rows=rows, html=html, evaluation=evaluation)


Layout = Annotated[str | None, Option("--layout", help="per-expert or stacked; by default as in the original")]
DType = Annotated[str | None, Option("--dtype", help="bfloat16, float16 or float32, instead of the original's")]


@app.command()
def export(
    run: Annotated[Path, Argument(help="a run's folder, or one of its checkpoints", show_default=False)],
    output: Annotated[Path, Option(help="the folder to write")],
    step: Annotated[int | None, Option(help="a step, instead of the newest complete checkpoint")] = None,
    layout: Layout = None,
    dtype: DType = None,
    source: Annotated[
        Path | None,
        Option(help="the original, for its tokenizer and what the run did not load; by default the run's own"),
    ] = None,
    trained_only: Annotated[
        bool, Option("--trained-only", help="omit what the run did not load of the original (talker, vision tower)")
    ] = False,
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Write the weights of a training checkpoint as transformers and vLLM load them. Needs no GPU.

    Example: patchgen export runs/one --output exported
    """
    options = {"step": step, "layout": layout, "dtype": dtype, "source": source, "trained_only": trained_only}
    commands.checkpoints.export(run, output, **options, code=code, generated=generated)


@app.command()
def chat(
    model: Annotated[Path, Argument(help="a run's folder, or a checkpoint", show_default=False)],
    prompt: Annotated[str | None, Option(help="one prompt, instead of a session")] = None,
    tokens: Annotated[int, Option(help="the most tokens of an answer")] = 256,
    temperature: Annotated[float, Option(help="of sampling; 0: the likeliest token")] = 0.0,
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Let a trained model answer: one prompt, or a session on the terminal.

    Example: patchgen chat runs/one --prompt "Name three primes."
    """
    commands.chat.chat(model, prompt=prompt, tokens=tokens, temperature=temperature, code=code, generated=generated)


@app.command()
def push(
    model: Annotated[Path, Argument(help="a run's folder, or a checkpoint", show_default=False)],
    repository: Annotated[str, Argument(help="its name on the Hugging Face Hub: OWNER/NAME", show_default=False)],
    private: Annotated[bool, Option("--private", help="make a new repository private")] = False,
) -> None:
    """Upload a trained model to the Hub, with a card made from its run: recipe, data, proof, curve.

    Example: patchgen push runs/one me/my-model --private
    """
    print(commands.pushing.push(model, repository, private=private))


@app.command()
def merge(
    adapter: Annotated[Path, Argument(help="a folder that PEFT saved, such as runs/one/adapter", show_default=False)],
    output: Annotated[Path, Option(help="the folder to write")],
    source: Annotated[
        Path | None, Option(help="the checkpoint it was trained on; by default the one that its config names")
    ] = None,
    layout: Layout = None,
    dtype: DType = None,
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Write a checkpoint with an adapter merged into it. Needs no GPU, and little memory.

    Example: patchgen merge runs/one/adapter --output merged --source Qwen3-30B-A3B
    """
    options = {"source": source, "layout": layout, "dtype": dtype}
    commands.checkpoints.merge(adapter, output, **options, code=code, generated=generated)


@app.command()
def convert(
    source: Annotated[Path, Argument(help="a Hugging Face checkpoint", show_default=False)],
    output: Annotated[Path, Argument(help="the folder to write", show_default=False)],
    layout: Annotated[str | None, Option(help="per-expert or stacked; by default as transformers saves")] = None,
    dtype: DType = None,
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Write a checkpoint with its experts one by one, or stacked. Needs no GPU, and little memory.

    Example: patchgen convert Qwen3-30B-A3B stacked --layout stacked
    """
    commands.checkpoints.convert(source, output, layout=layout, dtype=dtype, code=code, generated=generated)


@app.command()
def fingerprint(
    directory: Annotated[Path, Argument(help="a Hugging Face checkpoint, or a run", show_default=False)],
    code: Code = None,
    generated: GeneratedIn = None,
) -> None:
    """Print a hash per tensor, equal for equal weights in any layout, and one hash of all.

    Example: patchgen fingerprint exported
    """
    commands.checkpoints.fingerprint(directory, code=code, generated=generated)


def main() -> None:
    """Entry point: errors meant for the user are printed without a traceback."""
    if sys.argv[1:2] in (["verify"], ["sweep"]):
        executed_code.start()  # before anything imports what a proof runs
    try:
        app()
    except PatchgenError as error:
        print(f"patchgen: {error}", file=sys.stderr)
        end_process(1)
    except SystemExit as stop:
        if isinstance(stop.code, str):
            raise
        end_process(stop.code or 0)


if __name__ == "__main__":
    main()
