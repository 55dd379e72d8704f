"""The training step of `examples.train_step` on every shape: `python -m examples.bench.end_to_end`.

Appends one line per shape to a CSV file, with the machine, so that runs can be compared later.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from examples import train_step
from examples.rollouts import SHAPES

FIELDS = (
    "time", "shape", "rows", "grid", "tokens", "packed", "token_sharing", "pair_sharing", "dense_stock_s",
    "dense_causal_s", "tree_s", "speedup", "over_stock", "ideal", "ideal_by_flops", "of_ideal", "log_probs",
    "gradient", "device", "threads", "torch", "clock",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 if the law was broken anywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.bench.end_to_end",
        description="One training step per shape; other arguments go to examples.train_step.",
    )
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--csv", type=Path, default=Path("out/end_to_end.csv"), help="file to append to")
    options, others = parser.parse_known_args(arguments)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for shape in options.shapes:
            result = Path(folder) / f"{shape}.json"
            print(f"==== {shape}", flush=True)
            status = train_step.main(
                [
                    "--shape",
                    shape,
                    "--json",
                    str(result),
                    "--min-speedup",
                    "0",
                    "--min-of-ideal",
                    "0",
                    *others,
                ]
            )
            if status:
                failed.append(shape)
            append(options.csv, line_of(shape, json.loads(result.read_text())))
            # The next shape has another grid: what was compiled for this one would only be guarded against.
            torch._dynamo.reset()
    print(f"appended {len(options.shapes)} lines to {options.csv}")
    if failed:
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


def line_of(shape: str, result: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the CSV file."""
    counted = result["sharing"]
    stock, causal = (middle(run["seconds"]) for run in result["dense"])
    tree = middle(result["tree"]["seconds"])
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "shape": shape,
        "rows": counted["rows"],
        "grid": result["grid"],
        "tokens": counted["tokens"],
        "packed": counted["distinct_tokens"],
        "token_sharing": round(counted["tokens"] / counted["distinct_tokens"], 3),
        "pair_sharing": round(counted["pairs"] / counted["distinct_pairs"], 3),
        "dense_stock_s": round(stock, 4),
        "dense_causal_s": round(causal, 4),
        "tree_s": round(tree, 4),
        "speedup": round(result["speedup"], 3),
        "over_stock": round(stock / tree, 3),
        "ideal": round(result["ideal"], 3),
        "ideal_by_flops": round(result["ideal_by_flops"], 3),
        "of_ideal": round(result["of_ideal"], 3),
        "log_probs": f"{result['law']['log_probs']:.1e}",
        "gradient": f"{result['law']['gradient']:.1e}",
        "device": result["machine"]["device"],
        "threads": result["machine"]["threads"],
        "torch": result["machine"]["torch"],
        "clock": result["options"]["clock"],
    }


def middle(seconds: Sequence[float]) -> float:
    """Median."""
    return float(torch.tensor(seconds, dtype=torch.float64).quantile(0.5))


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Add one line, with the header if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as stream:
        writer = csv.DictWriter(stream, FIELDS)
        if new:
            writer.writeheader()
        writer.writerow(line)


if __name__ == "__main__":
    sys.exit(main())
