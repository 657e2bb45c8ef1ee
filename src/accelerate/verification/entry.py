"""Program that records the training of a script, which it runs with `program.py`."""

import sys

from accelerate.verification.program import main

if __name__ == "__main__":
    main(sys.argv[1:])
