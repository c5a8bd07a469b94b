"""What is known of an upstream file: its classes, their roles, which class builds which. Found by structure, never by name."""

from patchgen.anatomy.classes import Build, ClassInfo
from patchgen.anatomy.graph import Anatomy, study
from patchgen.anatomy.roles import Role

__all__ = ["Anatomy", "Build", "ClassInfo", "Role", "study"]
