"""`python -m tilescale_net`."""

import sys

from tilescale_net.cli import main

sys.exit(main())
