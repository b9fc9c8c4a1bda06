"""`python -m pagegen` is `pagegen`."""

import sys

from pagegen.cli import main

if __name__ == "__main__":
    sys.exit(main())
