"""`python -m twolane.engine`: the engine process."""

import os
import sys

from twolane.engine.process import main

code = main()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)  # a lane may be in the middle of a long launch that nobody waits for
