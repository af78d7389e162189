# SPDX-License-Identifier: Apache-2.0
"""Prints a report about files as JSON, with a sample of their words chosen by the run's seed."""

import json
import os
import random
import sys
from pathlib import Path

import tally


def main():
    files = sorted(Path(name) for name in sys.argv[1:])
    count = tally.words("\n".join(file.read_text(encoding="utf-8") for file in files))
    chooser = random.Random(int(os.environ.get("CLOISTER_SEED", "0")))
    report = {
        "files": [file.name for file in files],
        "frequent": count[:5],
        "sample": sorted(chooser.sample([word for word, _ in count], 3)),
        # The date of the sources, not of the run (reproducible-builds.org/specs/source-date-epoch).
        "dated": int(os.environ.get("SOURCE_DATE_EPOCH", "0")),
    }
    json.dump(report, sys.stdout, indent=2, sort_keys=True)
    print()


if __name__ == "__main__":
    main()
