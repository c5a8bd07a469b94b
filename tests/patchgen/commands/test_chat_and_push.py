"""What is done with a finished run: it answers as transformers generates, and goes to the Hub with its card."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml
from invoked import invoke
from typer.testing import CliRunner

from patchgen.cli import app
from patchgen.commands import pushing
from patchgen.errors import ConfigError, PatchgenError

pytest.importorskip("torch")
WORDS = "{% for message in messages %}{{ message.content }} {% endfor %}"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The folder of a run, as the trainer leaves it: export, log, recipe, summary."""
    import trainer_models

    folder = tmp_path_factory.mktemp("finished") / "run"
    trainer_models.build(generated=False).save_pretrained(folder / "export")
    trainer_models.tokenizer().save_pretrained(folder / "export")
    sources = {"/home/someone/acme/rows.jsonl": {"tokens": 60, "labels": 50, "loss": 1.0}}
    figures = {"tokens": 64, "skipped": False, "sources": sources}
    steps = [{"step": step, "loss": 5 - step / 10, **figures} for step in range(1, 31)]
    entries = [*steps, {"step": 30, "eval_loss": 2.25, "labels": 9}]
    (folder / "steps.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    recipe = {
        "model": {"source": "Qwen/Qwen3-30B-A3B", "code": "/home/someone/acme/code"},
        "data": {
            "sources": [
                {"path": "s3://key:token@bucket/rows.jsonl"},
                {"path": "/home/someone/acme/*.jsonl", "name": "~/acme/more"},
            ],
            "kind": "chat",
        },
        "eval_data": {"sources": [{"path": "/home/someone/acme/held_out.jsonl"}]},
        "train": {"prompts": ["the secret of acme"], "steps": 30},
        "optim": {"lr": 3e-4},
        "log": {"directory": str(folder)},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    summary = {
        "steps": 30,
        "reason": "steps",
        "best_step": 30,
        "best_loss": 2.25,
        "exported_step": 30,
        "data": "/home/someone",
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def generated(run: Path, text: str) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(run / "export")
    inputs = tokenizer(text, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    made = model.generate(inputs.input_ids, do_sample=False, max_new_tokens=5)
    return tokenizer.decode(made[0, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_a_prompt_is_continued_as_transformers_does(run):
    told = invoke("chat", str(run), "--prompt", "red green one", "--tokens", "5").stdout
    assert told.strip().splitlines()[-1].split() == generated(run, "red green one").split()


def test_a_session_with_a_template_keeps_what_was_said(run, tmp_path):
    """The second answer continues the first question, the first answer and the second question."""
    import shutil

    shutil.copytree(run, place := tmp_path / "chat")
    (place / "export" / "chat_template.jinja").write_text(WORDS)
    told = CliRunner().invoke(app, ["chat", str(place), "--tokens", "5"], input="red green\nthe sea\n\nnot read\n")
    assert told.exit_code == 0, told
    first = generated(run, "red green ")
    second = generated(run, f"red green {first} the sea ")
    assert told.stdout.split()[-len([*first.split(), *second.split()]) :] == [*first.split(), *second.split()]


@pytest.mark.parametrize("command", [("chat", "{}", "--prompt", "a"), ("push", "{}", "me/model")])
def test_a_folder_without_a_model_says_what_to_do(command, tmp_path):
    with pytest.raises(ConfigError, match=r"patchgen export .* --output FOLDER"):
        invoke(*(word.format(tmp_path) for word in command))
    with pytest.raises(ConfigError, match="There is no folder"):
        invoke(*(word.format(tmp_path / "none") for word in command))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"patchgen merge .*adapter --output FOLDER"):
        invoke(*(word.format(tmp_path) for word in command))


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that an upload of small files uses."""

    repositories: dict[str, dict] = {}  # name -> files, and whether it is private
    refused = False
    said: list[str] = []  # about each commit

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.refused:
            return self.answer({"error": "no rights"}, 403)
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.repositories[name] = {
                "private": "private" in (asked.get("visibility"), asked.get("private") and "private"),
                "files": {},
            }
            return self.answer({"url": f"http://{self.headers['Host']}/{name}", "name": name})
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = self.path.removeprefix("/api/models/").partition("/main")[0]
        if "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
            return self.answer({"files": modes})
        for line in body.decode().splitlines():
            value = (entry := json.loads(line))["value"]
            self.said.append(line if entry["key"] == "header" else "")
            if entry["key"] == "file":
                content = base64.b64decode(value["content"])
                self.repositories[name.removesuffix("/commit")]["files"][value["path"]] = content
        url = f"http://{self.headers['Host']}/{name}"
        self.answer({"commitUrl": f"{url}/commit/1", "commitOid": "1", "success": True, "pullRequestUrl": None})

    def answer(self, value: dict, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(value).encode())

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(monkeypatch) -> Iterator[type[Hub]]:
    from huggingface_hub import constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_token")
    monkeypatch.setattr(Hub, "repositories", {})
    monkeypatch.setattr(Hub, "refused", False)
    monkeypatch.setattr(Hub, "said", [])
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_push_uploads_the_model_and_a_card_of_its_run(run, hub):
    (run / "export" / ".env").write_text("TOKEN=1")
    told = invoke("push", str(run), "me/model", "--private").output
    pushed = hub.repositories["me/model"]
    assert "/me/model" in told and pushed["private"] is True
    exported = {path.name: path.read_bytes() for path in (run / "export").iterdir() if path.name != ".env"}
    card = pushed["files"].pop("README.md").decode()
    assert pushed["files"] == exported and {"model.safetensors", "config.json", "tokenizer.json"} <= set(exported)
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == "Qwen/Qwen3-30B-A3B" and front["library_name"] == "transformers"
    for fact in (
        "| 1 | 4.9000 |",
        "| 30 | 2.0000 |",
        "2.2500, after step 30",
        "after step 30",
        "optim.lr: 0.0003",
        "`rows.jsonl`",
    ):
        assert fact in card, fact
    for secret in ("someone", "acme", "token@", str(run.parent)):
        assert secret not in card + "".join(hub.said), secret
    assert "transformers' own class" not in card, "the run had code of its own"


def test_a_loss_that_is_not_finite_is_not_in_a_card():
    assert pushing._spread([(1, 2.0), (2, None), (3, 1.0)]) == [(1, 2.0), (3, 1.0)]


def test_a_card_that_is_there_is_kept_and_a_refusal_is_one_error(run, hub, monkeypatch):
    (run / "export" / "README.md").write_text("mine\n")
    invoke("push", str(run), "me/model")
    assert hub.repositories["me/model"]["files"]["README.md"] == b"mine\n"
    hub.refused = True
    with pytest.raises(PatchgenError, match=r"me/model was not pushed: .*403 (.*\n)*To fix: `hf auth login`"):
        invoke("push", str(run), "me/model")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PatchgenError, match="whether the Hub can be reached"):
        invoke("push", str(run), "me/model")
