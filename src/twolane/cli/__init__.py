"""The command line: one file a command."""

import os
import signal

if os.getpid() == 1:
    # The first process of a container ignores SIGTERM until it handles it, and imports take a
    # second. The status is that of shells.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
