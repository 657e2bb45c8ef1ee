"""What the launcher starts in place of a script; `script.py` does the work, out of reach of that one."""

import sys

from accelerate.launch.script import main

if __name__ == "__main__":
    main(sys.argv[1:])
