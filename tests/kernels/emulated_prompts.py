"""The process that computes prompts, on an emulated GPU."""

import os

from tests.kernels.emulated import install

if __name__ == "__main__":
    if os.environ.get("STACKS"):
        import faulthandler

        faulthandler.dump_traceback_later(float(os.environ["STACKS"]), exit=False)
    install()
    from twolane.lanes.disaggregated.cuda_prefill import main

    main()
