"""The one kind of error that is shown to a person as a sentence, without a traceback."""


class UserError(ValueError):
    """Something the user can mend: bad input, a missing file, flags that contradict each other.

    The message is one clear sentence: what is wrong, the value seen, what to do. The command-line programs print it
    and exit with status 2; library callers catch it as the `ValueError` that it is. Line breaks, which messages of other
    libraries quoted in it may bring, become spaces.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).splitlines()))
