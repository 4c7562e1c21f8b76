"""The README's picture: the same prompts and noise before and after a run.

    python benchmarks/picture.py RUN docs/before-after.png [--columns 8]

Takes the first sample of prompts evenly spaced over the evaluated ones: no picture is chosen by its result.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def evaluation(path: Path) -> tuple[np.ndarray, list[dict]]:
    return np.load(path)["images"], json.loads(path.with_suffix(".json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--columns", type=int, default=8)
    arguments = parser.parse_args()
    files = sorted((arguments.run / "evaluations").glob("*.npz"))
    before, after = evaluation(files[0]), evaluation(files[-1])
    first = [i for i, row in enumerate(before[1]) if row["sample"] == 0]
    chosen = [first[i * len(first) // arguments.columns] for i in range(arguments.columns)]
    figure = Figure(figsize=(1.25 * arguments.columns, 3.3), layout="constrained")
    axes = figure.subplots(2, arguments.columns)
    for row, (label, (images, records)) in enumerate((("before", before), ("after", after))):
        for axis, i in zip(axes[row], chosen, strict=True):
            axis.imshow(images[i], interpolation="nearest")
            met = all(records[i]["verdict"].values())
            axis.set_xlabel("✓" if met else "✗", color="#1a7f37" if met else "#b3261e", fontsize=11, labelpad=1)
            axis.set_xticks([])
            axis.set_yticks([])
            if row == 0:
                axis.set_title(textwrap.fill(records[i]["prompt"], 15), fontsize=8)
        axes[row][0].set_ylabel(label, fontsize=10)
    figure.savefig(arguments.out, dpi=110)


if __name__ == "__main__":
    main()
