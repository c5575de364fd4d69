"""A rank other than 0 on an emulated GPU."""

import os

from tests.kernels.emulated import install

if __name__ == "__main__":
    if os.environ.get("STACKS"):
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS"]), exit=False)
    install()
    from twolane.lanes.ranks.cuda_follower import main

    main()
