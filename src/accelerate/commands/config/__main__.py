"""Entry point of `python -m accelerate.commands.config`, which is the same as `accelerate config`."""

from accelerate.commands.config.config import main

if __name__ == "__main__":
    main()
