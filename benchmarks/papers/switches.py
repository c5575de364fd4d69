"""Runs with one switch changed, which show what decides a difference from a paper's figure."""

import math
from dataclasses import replace

import msgspec
from bullet import BUDGETS, CODE, FIG15, FIG17, FIG18, SHARE, SLOS, runs
from device import ask, contention
from duetserve import EIGHT, FIG6
from duetserve import SYSTEMS as SPLITS
from muxwise import REAL
from study import APART, Experiment, Run, beside

from twolane.sim.gpus import GPUS

HOST = {f"h100+{ms}ms": GPUS["h100"].sampling_seconds + ms / 1e3 for ms in (5, 10, 20)}
"""Seconds that every step takes longer, while the GPU waits for its scheduler."""
UNCAPPED = {f"{name}-uncapped": name for name in ("h100", "h200")}
STILL = msgspec.structs.replace(GPUS["h100"], name="h100-still", in_flight=1e-6, spill=1e-9)
"""A GPU whose prefill keeps no reads in flight."""
GPUS.update({name: msgspec.structs.replace(GPUS["h100"], name=name, sampling_seconds=seconds)
             for name, seconds in HOST.items()})  # fmt: skip
GPUS[STILL.name] = STILL
GPUS.update({name: msgspec.structs.replace(GPUS[of], name=name, power_units=math.inf)
             for name, of in UNCAPPED.items()})  # fmt: skip

SENT = {name: REAL[name].rate for name in ("8B toolagent", "70B toolagent")}
BATCHES = {"and blocking": "muxwise:layer_wise=false,query_sync=false,max_batch_tokens=16384"}
EXPERIMENTS = {
    "switch-host": Experiment(
        where="DuetServe Fig. 6, steps that wait for the host",
        runs=beside({f"code 16/s, {gpu}": replace(FIG6["code 16/s"], gpu=gpu) for gpu in HOST},
                    SPLITS),
        seeds=1,
    ),
    "switch-power": Experiment(
        where="MuxWise Fig. 11, without a power cap",
        runs={f"8B on {gpu}": ask(contention, gpu, "qwen3-8b")
              for gpu in (*UNCAPPED.values(), *UNCAPPED, STILL.name)},
    ),
    "switch-tpot": Experiment(
        where="Bullet Fig. 15, a shorter bound on TPOT",
        runs={
            f"{name}: Bullet {tpot * 1e3:g} ms": Run(
                FIG15[name],
                f"bullet:ttft_per_token={SLOS[FIG15[name].dataset][0]},tpot_seconds={tpot}",
            )
            for name in (*SHARE, *CODE)
            for tpot in (0.075, 0.1)
        },
        shown=("mean_ttft", "mean_tpot", "throughput", "attainment"),
        seeds=1,
    ),
    "switch-rate": Experiment(
        where="Bullet Fig. 15, 17, 18 and DuetServe Tab. 3, more requests/s",
        runs={
            **runs({f"code {n}/s": replace(FIG15[CODE[0]], rate=float(n)) for n in (7, 10)},
                   {"Bullet": "", **BUDGETS}),
            **runs({"70B ShareGPT 6/s": replace(FIG17["ShareGPT 3/s"], rate=6.0)},
                   {"Bullet": "", "chunked 2048": BUDGETS["chunked 2048"]}),
            **runs({"235B 12/s": replace(FIG18["235B"], rate=12.0)},
                   {"Bullet": "", "chunked 1024": BUDGETS["chunked 1024"]}),
            **beside({"32B on 8 H100 48/s": replace(EIGHT["32B on 8 H100"], rate=48.0)},
                     {"DuetServe": "duetserve", "Dynamo 4P4D": APART}),
            **beside({f"{name} cold": replace(REAL[name], prefix_cache=False) for name in SENT},
                     {"muxwise": "muxwise", "SGLang-PD": APART}),
            **beside({f"half of {name}": replace(REAL[name], rate=rate / 2)
                      for name, rate in SENT.items()},
                     {"muxwise": "muxwise", "SGLang-PD": APART}),
            **beside({"8B toolagent, long batches": REAL["8B toolagent"]}, BATCHES),
        },
        seeds=1,
    ),
}  # fmt: skip
MISSING: dict[str, str] = {}
