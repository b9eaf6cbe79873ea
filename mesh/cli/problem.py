"""What a command tells its user when it cannot go on."""


class Problem(Exception):
    """Ends a command with exit code 1. `message` says what is wrong, `advice` what to do about it."""

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(f"{message}\n{advice}" if advice else message)
        self.message = message
        self.advice = advice
