"""A rank other than 0 that comes to a channel and is lost while the others connect it."""

import os
import signal
import sys

from twolane.lanes.ranks import cpu_follower
from twolane.parallel import group


def main() -> int:
    def lost(*_: object) -> None:
        os.kill(os.getpid(), getattr(signal, os.environ["LOST_BY"]))
        signal.pause()

    group.gloo = lost  # type: ignore[assignment]
    return cpu_follower.main()


if __name__ == "__main__":
    sys.exit(main())
