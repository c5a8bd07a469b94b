"""patchgen compiles a Hugging Face modeling file into a modeling file that trains in parallel."""

import os

__version__ = "0.2.0"

if os.environ.get("PATCHGEN_RECORD_CODE"):  # before any module that is to be recorded
    from patchgen import executed_code

    executed_code.start()
