"""`python -m tools.profile conf=NAME [key=value...]`."""

import sys

from tools.profile.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
