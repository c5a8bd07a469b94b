"""What we know of an upstream file: its classes, their roles, who builds whom. Found by structure, never by model name."""

from patchgen.anatomy.classes import Build, ClassInfo
from patchgen.anatomy.graph import Anatomy, study
from patchgen.anatomy.roles import Role

__all__ = ["Anatomy", "Build", "ClassInfo", "Role", "study"]
