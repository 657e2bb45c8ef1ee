"""Menu on the terminal that asks a question with several answers."""

from __future__ import annotations

from accelerate.settings import TerminalPrompt


class BulletMenu:
    """Menu that asks for one of several answers.

    Args:
        prompt: Question. None prints no question.
        choices: Answers.
    """

    def __init__(self, prompt: str | None = None, choices: list[str] | None = None) -> None:
        self.prompt = prompt
        self.choices = [str(choice) for choice in choices or []]
        self.position = 0

    def run(self, default_choice: int = 0) -> int:
        """Asks the question, and returns the index of the answer, from 0.

        Args:
            default_choice: Index of the answer that is selected first.

        Raises:
            KeyboardInterrupt: The user pressed Ctrl-C.
        """
        numbered = {f"{number}. {choice}": number for number, choice in enumerate(self.choices, start=1)}
        offers = list(numbered)
        answer = TerminalPrompt().choose(self.prompt or "", offers, offers[default_choice])
        self.position = numbered[answer] - 1
        return self.position
