"""`python -m tools.predict out=FOLDER [key=value...]`."""

import sys

from tools.predict.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
