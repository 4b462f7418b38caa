"""`python -m tools.distill target=demo out=FOLDER [key=value...]`."""

import sys

from tools.distill.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
