"""`python -m accelerate.commands.config` is `accelerate config`."""

from accelerate.commands.config.config import main

if __name__ == "__main__":
    main()
