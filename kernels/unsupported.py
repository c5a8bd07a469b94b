"""The error of an implementation that does not have what a call asks of it."""


class UnsupportedOptionError(ValueError, NotImplementedError):
    """A backend has no kernel for an option, a size or a device; the message names it. Another backend may."""
