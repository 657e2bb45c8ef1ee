"""The acceptance run: one command that shows on a machine with an accelerator what works there, and how fast.

`python -m tests.gpu_acceptance` starts each part of `table.py` as a process of its own.
"""
