"""What a playout buffer does to each system: `python benchmarks/playout.py FOLDER`.

FOLDER has results of `twolane simulate … --result-file FOLDER/SYSTEM-MS.json`, one for each system
and length of the buffer in milliseconds. It writes their figures without the samples, each with the
command that made it, to results/playout-simulated.json.
"""

import argparse
import json
from pathlib import Path

from twolane.results.provenance import provenance, save

OUT = Path(__file__).parent / "results" / "playout-simulated.json"
LONGEST = 2000
"""Characters of the longest figure that is kept: longer ones are samples."""


def main() -> None:
    """Gather the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the results")
    given = parser.parse_args()
    found = {}
    for path in sorted(given.folder.glob("*.json")):
        result = json.loads(path.read_text())
        found[path.stem] = {
            key: value for key, value in result.items() if len(json.dumps(value)) < LONGEST
        }
    save(OUT, provenance({"runs": len(found)}), {"found": found})


if __name__ == "__main__":
    main()
