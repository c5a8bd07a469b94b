"""The pages: what stands in them, from the records and from a generation; `report` on the command line."""

from __future__ import annotations

import hashlib
import html
import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from patchgen import provenance, upstream
from patchgen.cli import app
from patchgen.errors import ConfigError, UpstreamNotFound
from patchgen.passes import all_passes
from patchgen.report import model, upgrade
from patchgen.runtime.verify.committed_models import CommittedModel
from patchgen.upgrade.findings import PERSON, REVIEW, ModelUpgrade, Site, Upgrade

MODEL = "llama"
OUTSIDE = re.compile(r"""(?:src|href)=["']?(?!#)(?:https?:)?//|@import|url\(""")


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of generated models with one in it."""
    root = tmp_path / "generated_models"
    shutil.copytree(provenance.generated_root() / MODEL, root / MODEL)
    for path in (root / MODEL).glob("verify*.json"):  # proofs of the file that stands there, whichever it is
        record = json.loads(path.read_text())
        record["sha256"] = hashlib.sha256((root / MODEL / f"modeling_{MODEL}.py").read_bytes()).hexdigest()
        path.write_text(json.dumps(record))
    monkeypatch.setattr(provenance, "generated_root", lambda: root)
    return root


def test_the_page_of_a_model_has_its_passes_census_proofs_and_provenance(models, tmp_path):
    folder = tmp_path / "pages"
    run("report", MODEL, "--output", str(folder))
    assert [path.name for path in folder.iterdir()] == [f"{MODEL}.html"]
    page, record = (folder / f"{MODEL}.html").read_text(), CommittedModel(MODEL).record
    plain = html.unescape(page.replace("<wbr>", ""))
    for step in record["passes"]:
        for hit in step["hits"] if step["name"] not in ("prune", "absolute_imports") else ():
            assert hit["site"] in plain and hit["what"].split("`")[0] in plain
    assert all(symbol in plain for symbol in record["census"])
    assert record["generated_sha256"] in page and record["command"] in page
    cases = {case["case"] for case in CommittedModel(MODEL).proof["cases"]}
    assert all(f"<td>{case}" in page for case in cases)
    assert not OUTSIDE.search(page)
    keys = set(re.findall(r' id="([^"]+)"', page))
    links = set(re.findall(r'href="#([^"]+)"', page))
    assert links and links <= keys
    assert len(keys) == len(re.findall(r' id="', page))


def test_colours_of_neighbouring_passes_are_far_from_each_other():
    hues = list(model.hues().values())
    assert len(hues) == len(all_passes())
    apart = [min(abs(a - b), 360 - abs(a - b)) for a, b in itertools.pairwise(hues)]
    assert min(apart) > 90


def test_the_index_tells_of_all_models_and_of_one_that_has_no_page(models, tmp_path):
    shutil.copytree(models / MODEL, models / "gone")
    path = models / "gone" / "provenance.json"
    path.write_text(path.read_text().replace('"model": "llama"', '"model": "gone"'))
    for kind in ("py", "diff"):
        (models / "gone" / f"modeling_{MODEL}.{kind}").rename(models / "gone" / f"modeling_gone.{kind}")
    run("report", "--output", str(tmp_path / "pages"))
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["index.html", f"{MODEL}.html"]
    page = (tmp_path / "pages" / "index.html").read_text()
    assert f'href="{MODEL}.html"' in page and 'href="gone.html"' not in page and "has no model &#39;gone&#39;" in page
    assert "../generated_models/llama/modeling_llama.diff" in page
    with pytest.raises(UpstreamNotFound, match=r"Not committed: gpt2"):
        run("report", "gpt2")


def test_a_committed_file_that_differs_is_said_and_its_proof_is_outdated(models):
    assert "not what generation gives now (shown here)" not in model.page(MODEL)
    path = models / MODEL / f"modeling_{MODEL}.py"
    path.write_text(path.read_text() + "# mine\n")
    page = model.page(MODEL)
    assert f"The committed modeling_{MODEL}.py is not what generation gives now (shown here)" in page
    assert ">outdated<" in page


def test_the_index_marks_models_that_are_not_what_generation_gives_now(models, tmp_path):
    def index() -> str:
        run("report", "--output", str(tmp_path / "pages"))
        return (tmp_path / "pages" / "index.html").read_text()

    run("generate", MODEL)
    assert ">stale</span>" not in index()
    path = models / MODEL / f"modeling_{MODEL}.py"
    path.write_text(path.read_text() + "# mine\n")
    page = index()
    assert (
        "1 stale</span>" in page and f'title="modeling_{MODEL}.py: not what generation gives now">stale</span>' in page
    )


def test_a_model_from_a_file_is_compared_with_that_file(tmp_path, models):
    source = tmp_path / "modeling_own.py"
    source.write_text(upstream.load(MODEL).text.replace('"""\n', '"""  # </script><img src=x>\n', 1))
    beside = f"configuration_{MODEL}.py"
    (tmp_path / beside).write_text(upstream.open_release().read(f"models/{MODEL}/{beside}"))
    run("generate", "own", "--source", str(source), "--output", str(models))
    page = model.page("own")
    assert "&lt;/script&gt;&lt;img src=x&gt;" in page and "<img" not in page
    source.unlink()
    with pytest.raises(UpstreamNotFound, match="modeling_own.py, which does not exist"):
        model.page("own")


def site(**facts: object) -> Site:
    told = {
        "place": "model",
        "kind": "changed",
        "file": "transformers/x.py",
        "symbol": "A.forward",
        "passes": ("fused_ops",),
    }
    return Site(**told | {"verdict": REVIEW, "reason": "a <site>"} | facts)


def test_the_page_of_an_upgrade_has_three_columns_or_the_edit_or_two():
    sites = (
        site(old_upstream="a\nb\n", new_upstream="a\nc\n", generated_then="a\nours\nc\n", old_line=7, new_line=9),
        site(kind="hand edit", symbol="B", old_upstream="a\n", new_upstream="x\n", edit="mine\n", verdict=PERSON),
        site(kind="gone", place="helper", symbol="helper", old_upstream="gone_line\n" * 40),
        site(kind="refused", symbol="", reason="The pass 'x' missed"),
    )
    found = Upgrade("1.0", "2.0", (ModelUpgrade("m", "1.0", "2.0", PERSON, "two sites", sites),))
    page = upgrade.page(found.models[0])
    heads = re.findall(r'<div class="heads">(.*?)</div>', page)
    assert [re.findall("<span>(.*?)</span>", head) for head in heads] == [
        ["upstream 1.0", "upstream 2.0", "generated then"],
        ["upstream 1.0", "upstream 2.0", "the edit"],
        ["upstream 1.0", "upstream 2.0"],
    ]
    first = re.findall(r'<div class="r.*?</div>', page)[:3]
    numbers = [re.findall(r"<b>(\d*)</b>", row) for row in first]
    assert numbers == [["7", "9", "1"], ["", "", "2"], ["8", "10", "3"]]
    assert "a &lt;site&gt;" in page and page.count("data-site=") == 4 and page.count("needs a person") == 2
    assert not OUTSIDE.search(page)
    assert 'href="upgrade_m.html"' in upgrade.index(found) and "1 needs a person" in upgrade.index(found)


def test_stretches_that_stayed_are_folded():
    body = "".join(f"line_{number} = {number}\n" for number in range(60))
    one = site(old_upstream=body, new_upstream=body.replace("= 30\n", "= 31\n"), generated_then=body)
    page = upgrade.page(ModelUpgrade("m", "1", "2", REVIEW, "", (one,)))
    assert re.findall(r"(\d+) lines are the same", page) == ["24", "23"]


def test_an_upgrade_to_the_same_release_has_nothing_to_show(tmp_path):
    run("report", MODEL, "--upgrade", "--output", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["upgrade.html", f"upgrade_{MODEL}.html"]
    assert (
        "Nothing that this model takes from upstream has changed." in (tmp_path / f"upgrade_{MODEL}.html").read_text()
    )
    assert "same" in (tmp_path / "upgrade.html").read_text()
    with pytest.raises(ConfigError, match="--to names the release of an upgrade"):
        run("report", MODEL, "--to", "5.17.0")
