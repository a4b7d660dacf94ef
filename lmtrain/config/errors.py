"""The error a user sees when something they wrote or gave is wrong."""


class UserError(ValueError):
    """A mistake in a config, an argument or an input file; the message says what, where, and what to do.

    The command line prints the message alone, without a traceback, and exits with code 2.
    """
