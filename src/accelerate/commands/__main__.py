"""Entry point of `python -m accelerate.commands`, which is the same as `accelerate`."""

from accelerate.commands.accelerate_cli import main

if __name__ == "__main__":
    main()
