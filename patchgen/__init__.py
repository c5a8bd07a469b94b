"""patchgen compiles a Hugging Face modeling file into a modeling file that trains in parallel."""

__version__ = "0.2.0"
