"""`python -m tools.figures figure=NAME out=FOLDER [key=value...]`."""

import sys

from tools.figures.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
