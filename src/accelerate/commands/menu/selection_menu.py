"""A question with several answers."""

from __future__ import annotations

from accelerate.settings import TerminalPrompt


class BulletMenu:
    """Asks for one of several answers.

    Args:
        prompt: The question; None: none is printed.
        choices: The answers.
    """

    def __init__(self, prompt: str | None = None, choices: list[str] | None = None) -> None:
        self.prompt = prompt
        self.choices = [str(choice) for choice in choices or []]
        self.position = 0

    def run(self, default_choice: int = 0) -> int:
        """Ask, and return the index of the answer, from 0.

        Args:
            default_choice: The index of the answer that is offered first.

        Raises:
            KeyboardInterrupt: The user left the question.
        """
        numbered = {f"{number}. {choice}": number for number, choice in enumerate(self.choices, start=1)}
        offers = list(numbered)
        answer = TerminalPrompt().choose(self.prompt or "", offers, offers[default_choice])
        self.position = numbered[answer] - 1
        return self.position
