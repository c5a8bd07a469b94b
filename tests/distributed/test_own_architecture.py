"""docs/own_architecture.md as it stands: generated, proven, trained on two ranks by the command line, exported, loaded."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from rounding import require_equal_up_to_rounding
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.commands import checkpoints, generation
from patchgen.runtime import launch, registry
from patchgen.runtime.train import recipe, run_log
from patchgen.runtime.verify import media_ranks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "own_architecture.md").read_text(encoding="utf-8")
FEATURES = "ops.local_features(image_features, special_image_mask))"
COMMANDS = [shlex.split(line) for line in re.findall(r"^    patchgen (.*)$", PAGE, flags=re.MULTILINE)]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """What the reader brings: the code, a checkpoint of it with a tokenizer and a processor, pictures with questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "runtime" / "data"))
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(ROOT / "tests" / "patchgen" / "data" / "lattice_moe", "lattice_moe")
    Path("recipe.yaml").write_text(blocks("yaml")[0])
    draw = random.Random(0)
    with Path("pictures.jsonl").open("w") as file:
        for number in range(24):
            size = draw.randrange(10, 40), draw.randrange(10, 40)
            Image.frombytes("RGB", size, draw.randbytes(3 * size[0] * size[1])).save(f"{number}.png")
            question = [{"type": "image", "image": f"{number}.png"}, {"type": "text", "text": "How wide?"}]
            answer = {"role": "assistant", "content": [{"type": "text", "text": str(size[0])}]}
            file.write(json.dumps({"messages": [{"role": "user", "content": question}, answer]}) + "\n")
    return tmp_path


def checkpoint():
    """The reader's model, saved with its processor."""
    from lattice_moe.configuration_lattice_moe import LatticeMoeConfig
    from lattice_moe.image_processing_lattice_moe import LatticeMoeImageProcessor
    from lattice_moe.modeling_lattice_moe import LatticeMoeForConditionalGeneration
    from lattice_moe.processing_lattice_moe import LatticeMoeProcessor
    from small_processors import byte_tokenizer, template

    text = template("<image>")
    tokenizer = byte_tokenizer(text, {"image_token": "<image>"})
    LatticeMoeProcessor(LatticeMoeImageProcessor(), tokenizer, chat_template=text).save_pretrained("checkpoint")
    torch.manual_seed(0)
    config = LatticeMoeConfig(image_token_id=tokenizer.convert_tokens_to_ids("<image>"))
    model = LatticeMoeForConditionalGeneration(config)
    model.save_pretrained("checkpoint")
    return model


def test_the_page_works_as_written(place):
    before = checkpoint()
    for command in COMMANDS:
        if command[0] != "train":  # the others need no process of their own
            done = CliRunner().invoke(app, command, catch_exceptions=False)
            assert done.exit_code == 0, done.output
            continue
        words = [sys.executable, "-m", "patchgen.cli", *command]
        started = subprocess.run(words, capture_output=True, text=True, timeout=240)
        assert started.returncode == 0, started.stdout + started.stderr
        assert "sp 2, ep 2" in started.stdout and "tokens exchanged over ep 2" in started.stdout
    proof, ranks = (
        json.loads(Path(f"generated/lattice_moe/{name}.json").read_text()) for name in ("verify", "verify_ranks")
    )
    assert (proof["status"], proof["not_compared"]) == ("proven", {})
    assert "images" in ranks["layouts"]["2 ranks, sp 2, ep 2, FSDP"]["cases"]
    assert len(run_log.read(Path("run"))) == 3
    names = {}
    exec(blocks("python")[-1], names)
    after = names["model"]
    assert type(after) is type(before)
    moved = [name for name, one in after.named_parameters() if not torch.equal(one, before.get_parameter(name))]
    assert any(".experts.3.down_proj" in name for name in moved), (
        "a list of experts, and the second rank's are trained"
    )
    assert "model.vision_tower.spacing_embed.weight" in moved, "the input of its own reached its tower"
    again = type(before).from_pretrained("exported")
    ids = torch.arange(24)[None]
    require_equal_up_to_rounding(again(ids).logits, after(ids).logits)

    Path("pyproject.toml").write_text(blocks("toml")[0])
    checkpoints.convert(Path("exported"), Path("stacked"), layout="stacked", dtype=None, code=None, generated=None)
    assert json.loads(Path("stacked/config.json").read_text())["model_type"] == "lattice_moe"


COMMANDS_OF_A_MACHINE = {  # as sshd does: the words of a command are one text for a shell
    "ssh": '#!/bin/bash\nexec bash -c "$3"\n',
    "patchgen": f'#!/bin/bash\nexec {sys.executable} -m patchgen.cli "$@"\n',
}


@pytest.mark.slow  # seven processes; `patchgen train` of the page starts its ranks by `launch()`, too
def test_a_program_and_a_start_script_train_it_as_well(place, monkeypatch):
    """`launch()` with two ranks, and what `--script` prints on two machines of one rank each: the same steps."""
    checkpoint()
    source, to = Path("lattice_moe"), Path("generated")
    generation.generate(["lattice_moe"], False, None, source, to, dry_run=False, force=False)
    monkeypatch.setenv("HOME", str(place))  # the second start reads what the first has found out of the model
    assert launch.launch(recipe.load(Path("recipe.yaml"), {"log.directory": "by_launch"}), processes=2) == 0

    for name, text in COMMANDS_OF_A_MACHINE.items():
        file = place / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
        file.chmod(0o755)
    words = ["train", "recipe.yaml", "--nproc", "1", "--nnodes", "2", "--set", "log.directory=by_script"]
    printed = CliRunner().invoke(app, [*words, "--script", "ssh"], catch_exceptions=False)
    assert printed.exit_code == 0, printed.output
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    Path("start.sh").write_text(printed.output.replace(":29500", f":{port}"))
    path = f"{place / 'bin'}:{os.environ['PATH']}"
    started = ["bash", "start.sh"]
    machines = os.environ | {"PATH": path, "HOSTS": "localhost localhost"}
    done = subprocess.run(started, capture_output=True, text=True, timeout=240, env=machines)
    assert done.returncode == 0, done.stdout + done.stderr

    runs = [[entry["loss"] for entry in run_log.read(Path(run))] for run in ("by_launch", "by_script")]
    assert len(runs[0]) == 3 and runs[0] == runs[1]
    assert Path("by_launch/export/config.json").is_file() and Path("by_script/export/config.json").is_file()


def test_a_fault_that_only_slices_show_is_found_on_ranks(place, two_ranks):
    """Each rank would take the features of the first tokens of the sequence, whichever of them it holds."""
    generation.generate(
        ["lattice_moe"], False, None, Path("lattice_moe"), Path("generated"), dry_run=False, force=False
    )
    found = registry.read_model(Path("generated/lattice_moe").resolve())
    text = found.file.read_text()
    assert text.count(FEATURES) == 1
    found.file.write_text(text.replace(FEATURES, "image_features)"))
    found = replace(found, source=found.find_source(Path("lattice_moe").resolve()))
    results = media_ranks.verify_on_ranks(found, two_ranks, sp=2, fsdp=False, cases=("text", "boundary"))
    assert [(one.case, bool(one.reason)) for one in results] == [("text", False), ("boundary", True)]
    assert "gradient" in results[1].reason or "loss" in results[1].reason
