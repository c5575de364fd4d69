"""`python -m twolane.engine`: the engine process."""

import gc
import logging
import os
import sys

# oneDNN, and PyTorch above it, each keep a compiled kernel for every shape that was ever
# multiplied, up to these many; the default of 1,024 grows to hundreds of megabytes.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "128")

gc.disable()  # nothing that is imported is garbage, and looking for some takes a tenth of the time
from twolane.engine.process import main  # noqa: E402

gc.enable()

code = main()
sys.stdout.flush()
logging.shutdown()
os._exit(code)  # a lane may be in the middle of a long launch that nobody waits for
