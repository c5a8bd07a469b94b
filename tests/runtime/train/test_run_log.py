"""What a run leaves behind and shows: the log, trackers, terminal lines, the page."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import types
from pathlib import Path

import pytest

from patchgen.runtime import launch
from patchgen.runtime.train import check_run, page, run_log, view
from patchgen.runtime.train.recipe import RecipeError, from_dict, to_dict
from patchgen.runtime.train.records import Evaluation, RunStart, StepRecord, Summary, TrainingStopped
from patchgen.runtime.train.sources import SourceFigures

RECIPE = to_dict(from_dict({"model": {"source": "qwen3"}, "data": {}, "train": {"steps": 4}}))
START = RunStart(
    name="mine", directory="runs/mine", steps=4, first_step=0, devices=2, device="cpu", parameters=3_000_000,
    active_parameters=1_000_000, report="Qwen3 <on> ranks", recipe=RECIPE,
)  # fmt: skip
END = Summary(steps=4, reason="steps", directory="runs/mine", export="runs/mine/export", data="all samples used")


def record(step: int, loss: float = 2.0, **more) -> StepRecord:
    values = {"grad_norm": 0.5, "lr": 1e-3, "tokens": 640, "labels": 600, "seconds": 0.5, "tflops": 0.25}
    return StepRecord(step=step, loss=loss, tokens_per_second_per_device=640.0, **values | more)


def test_a_continued_run_drops_the_lines_of_steps_that_are_taken_again(tmp_path):
    log = run_log.RunLog(tmp_path)
    log.on_start(START)
    assert run_log.read_summary(tmp_path) is None
    for step in (1, 2, 3):
        log.on_step(record(step, loss=float(step)))
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a crash in the middle of a line
    again = run_log.RunLog(tmp_path)
    again.on_start(RunStart(**vars(START) | {"first_step": 2}))
    again.on_step(record(3, loss=30.0))
    again.on_evaluation(Evaluation(step=3, loss=1.5, labels=10, seconds=0.1))
    again.on_end(END)
    entries = run_log.read(tmp_path)
    assert [(entry["step"], entry.get("loss")) for entry in entries] == [(1, 1.0), (2, 2.0), (3, 30.0), (3, None)]
    assert entries[-1]["eval_loss"] == 1.5
    assert run_log.read_summary(tmp_path)["reason"] == "steps"
    assert "steps: 4" in (tmp_path / "recipe.yaml").read_text()


@pytest.mark.parametrize("line", [b'{"step": 1, "lo', b"\xff\xfe", b"\0\0\0\0", b"7", b'{"loss": 2.0}', b""])
def test_a_broken_line_inside_the_log_stops_a_run_that_continues_it_and_is_named(line, tmp_path):
    whole = b'{"step": 2, "loss": 1.0}'
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join([whole, line, whole, b""]))
    with pytest.raises(
        TrainingStopped, match=r"steps.jsonl, line 2, is not an entry of the log .*: b.* To fix: delete"
    ):
        run_log.RunLog(tmp_path).on_start(START)
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join([whole, line, b""]))
    with pytest.raises(TrainingStopped, match="line 2, is not an entry"):  # whole: no crash made it
        run_log.read(tmp_path)
    (tmp_path / "steps.jsonl").write_bytes(b"\n".join([whole, line]))
    assert run_log.read(tmp_path) == [{"step": 2, "loss": 1.0}]


def test_the_check_of_a_run_tells_a_broken_log_in_a_sentence(tmp_path, monkeypatch, capsys):
    (tmp_path / "steps.jsonl").write_text("7\n")
    monkeypatch.setattr("sys.argv", ["check_run", str(tmp_path)])
    assert check_run.main() == 1
    assert "steps.jsonl, line 1, is not an entry of the log" in capsys.readouterr().err


def test_tensorboard_gets_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = run_log.Tracker("tensorboard", "patchgen", tmp_path)
    tracker.on_start(START)
    tracker.on_step(record(1, loss=3.5, grad_norm=float("nan")))
    tracker.on_end(END)
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("train/loss")[0].value == 3.5
    assert "train/grad_norm" not in events.Tags()["scalars"]


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(RecipeError, match="log.trackers names 'wandb', which is not installed"):
        run_log.Tracker("wandb", "patchgen", tmp_path)


def start_in_wandb(directory: Path) -> None:
    tracker = run_log.Tracker("wandb", "patchgen", directory)
    tracker.on_start(START)
    tracker.on_step(record(1))
    tracker.close()


def test_a_restarted_run_is_one_run_in_wandb_and_another_folder_is_another(tmp_path, monkeypatch):
    """What `wandb.init` is given; the next test gives it to wandb itself."""
    asked = []
    package = types.SimpleNamespace(
        init=lambda **given: asked.append(given), log=lambda *_, **__: None, finish=lambda: None
    )
    monkeypatch.setitem(sys.modules, "wandb", package)
    for name in ("one", "one", "two"):
        (tmp_path / name).mkdir(exist_ok=True)
        start_in_wandb(tmp_path / name)
    first, again, other = asked
    assert first == again and first["id"] != other["id"]
    assert first["resume"] == "allow" and first["dir"] == str(tmp_path / "one")
    assert (tmp_path / "one" / run_log.TRACKED).read_text().strip() == first["id"]


def test_an_id_that_was_cut_off_is_drawn_anew(tmp_path):
    """By a full disk or a kill: wandb refuses an empty one at each restart."""
    (tmp_path / run_log.TRACKED).write_text("\n")
    drawn = run_log.tracked_id(tmp_path)
    assert drawn and run_log.tracked_id(tmp_path) == drawn


def test_an_id_that_cannot_be_kept_stops_the_run(tmp_path):
    with pytest.raises(TrainingStopped, match="wandb_id cannot be written"):
        run_log.tracked_id(tmp_path / "gone")


def test_wandb_takes_what_it_is_given(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for _ in range(2):
        start_in_wandb(tmp_path)
    run_id = (tmp_path / run_log.TRACKED).read_text().strip()
    runs = [path.name for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert len(runs) == 2 and all(name.endswith(run_id) for name in runs)


def test_plain_lines_have_every_second_step_and_every_skipped_one(capsys):
    shown = view.PlainView(every=2)
    shown.on_start(START)
    for step in (1, 2, 3):
        shown.on_step(record(step, mfu=0.417, peak_memory_gib=62.04, expert_load=1.5, skipped=step == 3))
    shown.on_end(END)
    text = capsys.readouterr().out
    assert "mine: 3.0 M parameters, 1.0 M of them active per token, on 2 x cpu" in text
    assert "step     1/4" not in text, "every second step"
    assert "step     2/4   loss 2.0000   norm 0.500   lr 1.00e-03   tok/s/device 640" in text
    assert "MFU 41.7%   peak 62.0 GiB   busiest expert 1.5x   left 0:00:01" in text
    assert "norm 0.500 SKIPPED" in text, "a skipped step is always shown"
    assert "step 4: all steps taken   run: runs/mine   export: runs/mine/export" in text


def test_samples_that_were_left_out_are_reported_at_the_end():
    assert "samples" not in view.ending(END)
    some = Summary(**vars(END) | {"data": "2 bad (first: a.jsonl:3: no field 'text')"})
    assert view.ending(some).endswith("\nsamples: 2 bad (first: a.jsonl:3: no field 'text')")


def test_a_run_that_skipped_steps_says_so_and_ends_with_a_status_of_its_own():
    """A run whose weights hardly changed is no success; of a long one a step in a hundred may be skipped."""
    some = Summary(**vars(END) | {"steps": 6, "skipped": 4})
    assert "skipped: 4 of 6 steps changed no weight" in view.ending(some) and "skipped" not in view.ending(END)
    assert [launch.exit_status(one) for one in (END, some)] == [0, launch.SKIPPED]
    assert launch.exit_status(Summary(**vars(END) | {"steps": 1000, "skipped": 10})) == 0
    assert launch.exit_status(Summary(**vars(some) | {"reason": "stop"})) == launch.STOPPED


def test_skipped_steps_are_counted_up_to_the_step_of_a_resume(tmp_path):
    entries = [{"step": step, "skipped": step in (2, 3, 5)} for step in range(1, 7)]
    (tmp_path / run_log.STEPS).write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    assert [run_log.num_skipped(tmp_path, step) for step in (1, 3, 6)] == [0, 2, 3]


def test_the_live_view_draws_on_a_terminal(monkeypatch):
    import io

    from rich.console import Console

    screen = io.StringIO()
    monkeypatch.setattr(view, "Console", lambda: Console(file=screen, force_terminal=True, width=100))
    shown = view.LiveView()
    shown.on_start(START)
    for step in (1, 2, 3, 4):
        shown.on_step(record(step, loss=5.0 - step))
    shown.on_evaluation(Evaluation(step=4, loss=1.25, labels=10, seconds=0.1))
    shown.on_end(END)
    assert "Qwen3 <on> ranks" in screen.getvalue()
    assert "1.0000" in screen.getvalue()


def test_a_sparkline_shows_the_shape():
    assert view.sparkline([3, 2, 1, 0], 10) == "█▅▃ "
    assert len(view.sparkline(list(range(1000)), 50)) == 50
    assert view.sparkline([float("nan")], 10) == ""
    assert view.sparkline([1.0, 1.0], 10) == "  "


def test_the_page_is_one_file_with_plots_and_escapes_what_it_shows(tmp_path):
    log = run_log.RunLog(tmp_path)
    listener = page.RunPage(tmp_path)
    for one in (log, listener):
        one.on_start(START)
    for step in (1, 2, 3, 4):
        log.on_step(record(step, loss=5.0 - step if step != 2 else float("nan")))
    for one in (log, listener):
        one.on_end(END)
    text = (tmp_path / "index.html").read_text()
    assert text.count("<svg") == 4, "loss, tokens, norm and learning rate; no expert load"
    assert "Qwen3 &lt;on&gt; ranks" in text
    assert "src=" not in text and "href=" not in text, "nothing is fetched"
    assert ("last loss", "1.0000") in page.figures(run_log.read(tmp_path))
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_shows_first_what_the_recipe_changes(tmp_path):
    freeze = ["a.*", "<b>"]
    sections = {"train": {"steps": 7}, "lora": {"rank": 8}, "name": "mine"}
    recipe = from_dict({"model": {"source": "qwen3", "freeze": freeze}, "data": {}, **sections})
    page.RunPage(tmp_path).on_start(RunStart(**vars(START) | {"recipe": to_dict(recipe)}))
    text = (tmp_path / "index.html").read_text()
    table, _, rest = text.partition('<table class="recipe keys">')[2].partition("</table>")
    rows = [tuple(row.split("<td>")[1:]) for row in table.split("<tr>")[2:]]
    shown = {key: value.removesuffix("</tr>\n").strip() for key, value in rows}
    assert shown == {
        "model.source": "qwen3", "model.freeze.0": "a.*", "model.freeze.1": "&lt;b&gt;", "data": "{}", "train.steps": "7",
        "lora.rank": "8", "name": "mine",
    }  # fmt: skip
    assert "max_skipped: 20" in rest and "max_skipped" not in table, "all of it, as YAML, is folded away"


def test_figures_of_sources_are_logged_shown_and_tracked(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log, listener, plain = run_log.RunLog(tmp_path), page.RunPage(tmp_path), view.PlainView()
    tracker = run_log.Tracker("tensorboard", "patchgen", tmp_path)
    for one in (log, listener, plain, tracker):
        one.on_start(START)
        for step in (1, 2):
            sources = {"a <b>": SourceFigures(40 * step, 30, 2.5 / step), "rest": SourceFigures(600, 0, None)}
            one.on_step(record(step, sources=sources))
        one.on_evaluation(
            Evaluation(step=2, loss=1.5, labels=10, seconds=0.1, sources={"a <b>": SourceFigures(9, 8, 1.5)})
        )
        one.on_end(END)
        one.close()
    first, _, evaluated = run_log.read(tmp_path)
    assert first["sources"] == {
        "a <b>": {"tokens": 40, "labels": 30, "loss": 2.5},
        "rest": {"tokens": 600, "labels": 0, "loss": None},
    }
    assert evaluated["eval_sources"] == {"a <b>": {"tokens": 9, "labels": 8, "loss": 1.5}}
    assert "a <b> 1.2500 (80 tokens)   rest - (600 tokens)" in capsys.readouterr().out
    text = (tmp_path / "index.html").read_text()
    assert "<td>a &lt;b&gt;<td>120<td>60" in text
    for title in ("loss by source", "evaluation loss by source"):
        assert (title in text) == (title == "loss by source"), "one evaluation is no curve"
    assert "</i>a &lt;b&gt;</span>" in text
    assert "</i>rest" not in text, "it never had a label"
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [one.value for one in events.Scalars("train/loss/a <b>")] == [2.5, 1.25]


def test_the_page_is_alive_while_a_run_takes_its_steps(tmp_path):
    """It loads itself again until the run has ended."""
    log, listener = run_log.RunLog(tmp_path), page.RunPage(tmp_path, seconds=0)

    def shown() -> str:
        return (tmp_path / "index.html").read_text()

    for one in (log, listener):
        one.on_start(START)
    assert "step 0 of 4: running" in shown()
    for step in (1, 2, 3):
        for one in (log, listener):
            one.on_step(record(step))
        assert f"step {step} of 4: running" in shown() and '<meta http-equiv="refresh"' in shown()
    assert "<svg" in shown()
    listener.seconds = 1000.0
    log.on_step(record(4))
    listener.on_step(record(4))
    assert "step 3 of 4" in shown(), "now and then, not at every step"
    listener.on_end(END)
    assert "step 4 of 4: all steps taken" in shown() and "refresh" not in shown()
    assert not list(tmp_path.glob("*.new"))


def test_a_page_that_takes_long_to_write_is_written_less_often(tmp_path, monkeypatch):
    """That of a run of a hundred thousand steps takes seconds, in which no step is taken."""
    for seconds, is_written in ((10.0, True), (1e-9, False)):
        monkeypatch.setattr(page, "WRITE_SECONDS", seconds)
        listener = page.RunPage(tmp_path, seconds=1e-3)
        listener.on_start(START)
        time.sleep(2e-3)
        listener.on_step(record(1))
        assert ("step 1 of 4" in (tmp_path / "index.html").read_text()) == is_written


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_reported_with_path_and_space(tmp_path):
    """/dev/full refuses every write. The run ends or goes on as the recipe says."""
    for on_failed in ("stop", "continue"):
        log = run_log.RunLog(tmp_path / on_failed, on_failed=on_failed)
        log.on_start(START)
        log._file.close()
        message = r"steps.jsonl cannot be written \(\d.* GB free there\): No space left on device"
        raises = pytest.raises(TrainingStopped, match=message)
        reported = raises if on_failed == "stop" else pytest.warns(match=message)
        with Path("/dev/full").open("a", buffering=1) as log._file, contextlib.suppress(OSError):
            with reported:
                log.on_step(record(1))
            log.close()


def test_a_log_that_cannot_be_started_stops_the_run_with_advice_that_helps(tmp_path):
    """Without the folder or steps.jsonl there is no log, so `checkpoint.on_failed: continue` would change nothing."""
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "steps.new").mkdir(parents=True)
    for place in ("file", "run"):
        with pytest.raises(
            TrainingStopped, match="To fix: free space there, or name another log.directory"
        ) as stopped:
            run_log.RunLog(tmp_path / place, on_failed="continue").on_start(START)
        assert "on_failed" not in str(stopped.value)


def test_files_of_a_run_are_in_utf_8_whatever_the_locale_says(tmp_path, monkeypatch):
    start = RunStart(**vars(START) | {"name": "größer", "report": "2 → 4"})
    write = Path.write_text  # of a locale with Latin-1, in which an arrow cannot be written
    monkeypatch.setattr(Path, "write_text", lambda *args, encoding="latin-1": write(*args, encoding=encoding))
    for listener in (run_log.RunLog(tmp_path), page.RunPage(tmp_path)):
        listener.on_start(start)
        listener.close()
    text = (tmp_path / "index.html").read_bytes().decode("utf-8")
    assert "größer" in text and '<meta charset="utf-8"' in text
    assert (tmp_path / "report.txt").read_bytes().decode("utf-8") == "2 → 4\n"


def test_without_matplotlib_the_picture_is_left_out_with_a_message(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    page.write_png([{"step": 1, "loss": 1.0}], tmp_path / "report.png")
    assert not list(tmp_path.iterdir())
    assert "matplotlib is not installed" in capsys.readouterr().out
