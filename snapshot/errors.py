"""The one exception for bad input: a line that names what is wrong and what to do, and exit code 2."""


class Refused(Exception):
    """Bad usage or a bad snapshot. The message is one line for the user."""
