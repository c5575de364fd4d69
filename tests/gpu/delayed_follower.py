"""A rank other than 0 that is held up now and then."""

import os

if __name__ == "__main__":
    if os.environ.get("EMULATED"):
        from tests.kernels.emulated import install as emulate

        emulate()
    from tests.gpu.delayed import install
    from twolane.lanes.ranks.cuda_follower import main

    install(os.getpid())
    main()
