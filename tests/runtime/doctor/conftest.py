"""Small processors lie beside the tests of the data; the small model that knows its data is made once."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "data"))


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session")
def toy(tmp_path_factory, home):
    import toys

    return toys.text_toy(tmp_path_factory.mktemp("text"))
