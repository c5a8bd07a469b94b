"""Functions of the user's own: rows to messages, to texts or to inputs, checked on the first rows with the row named."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from PIL import Image
from small_processors import byte_tokenizer, image_processor, template

from patchgen.runtime.data import DataConfig, DataError, SourceConfig, build_loader, train_tokenizer
from patchgen.runtime.data.transform import Transform, load_function
from patchgen.runtime.parallel.batch import IGNORED

TOKENIZER = byte_tokenizer(template(), {})
CODE = """
import functools
import operator

import torch

def messages(row):
    return [{"role": "user", "content": row["q"]}, {"role": "assistant", "content": row["a"]}]

def fields(row):
    return {"messages": messages(row)}

def shown(row):
    content = [{"type": "image"}, {"type": "text", "text": row["q"]}]
    return {"messages": [{"role": "user", "content": content}, messages(row)[1]], "images": ["x.png"]}

def text(row):
    return row["q"] + row["a"]

def inputs(row):
    ids = [ord(letter) % 50 for letter in row["q"] + row["a"]]
    return {"input_ids": ids, "labels": [-100] * len(row["q"]) + ids[len(row["q"]):]}

def other_labels(row):
    return inputs(row) | {"labels": torch.ones(len(inputs(row)["input_ids"]), dtype=torch.long)}

def seen(row):
    ids = torch.tensor(inputs(row)["input_ids"])[None]
    media = {"pixel_values": torch.ones(2, 3, 4, 4), "mm_token_type_ids": torch.zeros_like(ids)}
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids), **media}

def third(row):
    if row["q"] == "q2":
        raise KeyError("nothing here")
    return messages(row)

def nothing(row): return None
def wrong_messages(row): return ["hello"]
def no_labels(row): return {"input_ids": [1, 2]}
def short_labels(row): return {"input_ids": [1, 2], "labels": [1]}
def unknown_field(row): return {"input_ids": [1, 2], "labels": [1, 2], "pixels": [1.0]}
def no_numbers(row): return {"input_ids": ["a"], "labels": [1]}
def masked(row): return {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1, 0]}
def odd_positions(row): return {"input_ids": [1, 2], "labels": [1, 2], "position_ids": [[0, 1]] * 5}
def raises(row): return row["gone"]
def two_rows(row): return {"input_ids": torch.ones(1, 2, 3, dtype=torch.long), "labels": [1] * 6}

class Asker:
    def __call__(self, row):
        return messages(row)

def with_role(role, row):
    return [{"role": role, "content": row["q"]}, {"role": "assistant", "content": row["a"]}]

def logged(function):
    return functools.wraps(function)(lambda row: function(row))

def asking(role):
    return lambda row: with_role(role, row)

asker = Asker()
closure = asking("user")
method = asker.__call__
partial = functools.partial(with_role, "user")
decorated = logged(messages)
first = operator.itemgetter("q")
not_a_function = 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Five rows, and a module of functions beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(CODE)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"q{n}", "a": f"a{n}"}) + "\n" for n in range(5)))
    Image.new("RGB", (30, 30)).save(tmp_path / "x.png")
    return tmp_path


def loader_of(folder, function: str, kind: str = "chat", **changes):
    spec = function if ":" in function else f"{folder / 'own.py'}:{function}"
    config = DataConfig(
        sources=(SourceConfig(str(folder / "rows.jsonl"), transform=spec),),
        kind=kind,
        cache_dir=str(folder / "cache"),
        **{"tokens_per_batch": 400, "epochs": 1, "shuffle": False, **changes},
    )
    return build_loader(
        config, tokenizer=TOKENIZER, processor=image_processor(), batch_index=0, num_batches=1, agree=int
    )


def learned(loader, tokenizer=TOKENIZER) -> str:
    labels = torch.cat([batch["labels"][0] for batch in loader])
    return tokenizer.decode(labels[labels != IGNORED])


@pytest.mark.parametrize("function", ["messages", "fields"])
@pytest.mark.parametrize("streaming", [False, True])
def test_rows_become_messages(folder, function, streaming):
    loader = loader_of(folder, function)
    assert learned(loader) == "".join(f"a{n}<|im_end|>" for n in range(5))
    if streaming:
        source = SourceConfig(str(folder / "rows.jsonl"), transform=f"{folder / 'own.py'}:{function}", streaming=True)
        config = DataConfig(sources=(source,), kind="chat", epochs=1, packing=False)
        stream = build_loader(config, tokenizer=TOKENIZER, batch_index=0, num_batches=1, agree=int)
        assert learned(stream) == "".join(f"a{n}<|im_end|>" for n in range(5))


def test_rows_become_texts_of_which_a_tokenizer_is_trained(folder):
    assert "q0a0" in TOKENIZER.decode(next(loader_of(folder, "text", "text"))["input_ids"][0])
    source = SourceConfig(str(folder / "rows.jsonl"), transform=f"{folder / 'own.py'}:text")
    tokenizer = train_tokenizer(DataConfig(sources=(source,), cache_dir=str(folder)), vocab_size=260)
    assert tokenizer.decode(tokenizer("q0a0")["input_ids"]) == "q0a0"


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_become_messages_with_images(folder, workers):
    processor = image_processor()
    (batch,) = loader_of(folder, "shown", "multimodal", num_workers=workers)
    assert batch["pixel_values"].shape[0] == 5
    assert int((batch["input_ids"] == processor.image_token_id).sum()) == 20


def test_rows_become_inputs(folder):
    (batch,) = loader_of(folder, "inputs")
    ids = [ord(letter) % 50 for n in range(5) for letter in f"q{n}a{n}"]
    assert sorted(batch["input_ids"][0].tolist()) == sorted(ids)
    assert int((batch["labels"] != IGNORED).sum()) == 10
    (batch,) = loader_of(folder, "other_labels", "multimodal")
    assert set(batch["labels"][0].tolist()) == {1}
    (batch,) = loader_of(folder, "seen", "multimodal")
    assert batch["pixel_values"].shape == (10, 3, 4, 4)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3] * 5]
    with pytest.raises(
        DataError, match=r"rows.jsonl:1: .* data.kind = chat supports only input_ids, and labels that are the same"
    ):
        loader_of(folder, "other_labels")


WRONG = {
    "nothing": "returned None; expected a list of messages, a dict with",
    "text": "returned str 'q0a0'; expected a list of messages",
    "wrong_messages": "returned messages of which message 0 is 'hello', expected a dict with a role",
    "no_labels": "returned input_ids without labels, only input_ids",
    "short_labels": r"returned labels of shape \(1,\) for 2 input_ids",
    "unknown_field": "returned the field 'pixels'. No rule says how",
    "no_numbers": r"returned input_ids as list \['a'\], expected a tensor of numbers",
    "masked": "returned an attention_mask with zeros",
    "odd_positions": r"returned position_ids of shape \(5, 2\), expected \(n,\), \(3, n\) or \(4, n\)",
    "two_rows": r"returned input_ids of shape \(1, 2, 3\), expected \(n,\) or \(1, n\)",
    "raises": "refuses the row: KeyError: 'gone'.*All of the first 5 rows of",
    "not_a_function": "own.py has no function 'not_a_function'; its functions: asking, closure, decorated, fields, inputs,",
    "gone.py:f": "there is no file gone.py",
    "gone_module:f": "gone_module cannot be imported: ModuleNotFoundError.*searched on Python.s path and in /",
}


@pytest.mark.parametrize("kind", ["chat", "multimodal"])
@pytest.mark.parametrize("function", WRONG)
def test_what_no_row_may_become_is_refused_on_the_first_rows_with_the_row(folder, function, kind):
    """Whatever `on_bad` says: such a function is wrong for every row."""
    place = "" if ":" in function or function == "not_a_function" else r"rows.jsonl:1: the transform .*own.py:\w+ "
    with pytest.raises(DataError, match=place + f".*{WRONG[function]}" if not place else place + WRONG[function]):
        loader_of(folder, function, kind, on_bad="skip")


@pytest.mark.parametrize("kind", ["chat", "multimodal"])
def test_a_row_that_it_cannot_take_is_a_bad_sample(folder, kind):
    loader = loader_of(folder, "third", kind, on_bad="skip")
    assert learned(loader, image_processor().tokenizer) == "".join(f"a{n}<|im_end|>" for n in (0, 1, 3, 4))
    assert loader.counters.counts == {"bad": 1}
    assert loader.counters.places[0][1].endswith("rows.jsonl:3")
    with pytest.raises(
        DataError, match="rows.jsonl:3: .*own.py:third refuses the row: KeyError: 'nothing here'.*on_bad"
    ):
        list(loader_of(folder, "third", kind))


def test_a_module_of_the_folder_that_the_run_starts_in_is_found(folder):
    (folder / "own_module_of_a_test.py").write_text(CODE)
    assert learned(loader_of(folder, "own_module_of_a_test:messages")).startswith("a0<|im_end|>")


def test_tokens_are_made_anew_where_the_function_changed(folder):
    made = Transform(f"{folder / 'own.py'}:messages", SourceConfig("x", transform="a:b"), "chat")
    before = made.fingerprint()
    assert pickle.loads(pickle.dumps(made)) == made
    (folder / "own.py").write_text(CODE + "\n")
    assert made.fingerprint() != before


@pytest.mark.parametrize("name", ["asker", "partial", "decorated"])
def test_an_object_that_is_called_is_a_transform_too(folder, name):
    """Its fingerprint raised a TypeError without the name of the source, after the first rows had passed."""
    assert learned(loader_of(folder, name)) == "".join(f"a{n}<|im_end|>" for n in range(5))


@pytest.mark.parametrize("name", ["asker", "partial", "decorated", "closure", "method", "first"])
def test_tokens_are_made_anew_where_an_object_that_is_called_changed(folder, name):
    """Of a closure or a method that another file makes, that file has the arguments, and did not count."""
    (folder / f"use_{name}.py").write_text(f"from code_{name} import {name}\n")
    (folder / f"code_{name}.py").write_text(CODE)
    transform = Transform(f"use_{name}:{name}", SourceConfig("x", transform="a:b"), "chat")
    before = transform.fingerprint()
    (folder / f"use_{name}.py").write_text(f"from code_{name} import {name}  # changed\n")
    changed = transform.fingerprint()
    assert changed != before
    (folder / f"code_{name}.py").write_text(CODE + "\n")
    assert (transform.fingerprint() != changed) == (name != "first")  # built in: only the file that names it is known


@pytest.mark.parametrize("spec", ["module", "module:", ":function"])
def test_a_spec_without_both_halves_is_refused(spec):
    with pytest.raises(ValueError, match="must be module:function or file.py:function"):
        SourceConfig("x", transform=spec)


def test_a_file_that_the_users_module_lacks_is_not_told_as_the_module(tmp_path):
    (tmp_path / "own.py").write_text("open('words.txt')\n\ndef fields(row):\n    return row\n")
    with pytest.raises(DataError, match=r"own.py cannot be imported: FileNotFoundError.*words.txt"):
        load_function(f"{tmp_path / 'own.py'}:fields")
