"""`python -m kvcomm`: the command line."""

import sys

from kvcomm.cli import main

sys.exit(main())
