"""Options, declared once, from which flags, file keys, variables, questions and reference pages derive."""

from accelerate.base import attach

__getattr__, __dir__, __all__ = attach(__name__)
