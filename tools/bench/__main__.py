"""`python -m tools.bench out=FOLDER [key=value...]`."""

import sys

from tools.bench.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
