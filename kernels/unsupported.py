"""The error of an implementation that does not support a call."""


class UnsupportedOptionError(ValueError, NotImplementedError):
    """A backend has no kernel for an option, a size or a device, which the message names; another backend may."""
