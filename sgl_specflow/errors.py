"""The error that refuses a configuration at start-up."""


class SpecflowConfigError(ValueError):
    """A start that cannot work. Its text says what was given, what is allowed and what to do."""

    def __init__(self, *, given: str, allowed: str, todo: str):
        super().__init__(f"sgl_specflow: given {given}. Allowed: {allowed}. To do: {todo}.")
        self.given, self.allowed, self.todo = given, allowed, todo
