from patchgen.runtime.checkpoint.errors import CheckpointError
from patchgen.runtime.checkpoint.load import LoadReport, load_pretrained
