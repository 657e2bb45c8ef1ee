"""`python -m accelerate.commands` is `accelerate`."""

from accelerate.commands.accelerate_cli import main

if __name__ == "__main__":
    main()
