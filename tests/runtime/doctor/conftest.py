"""Small processors lie beside the tests of the data."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "data"))
