"""Program that the launcher starts in place of a script, which runs it with `script.py`."""

import sys

from accelerate.launch.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
