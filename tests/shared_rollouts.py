"""The rollout files that may lie beside the repository (../shared/rollouts), as JSON lines or Parquet.

They are read where they are and converted into a temporary folder; nothing of them is kept here.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parent.parent.parent / "shared" / "rollouts"


def available() -> bool:
    """Whether the folder is there."""
    return (FOLDER / "rollout_io.py").is_file()


needs_shared_rollouts = pytest.mark.skipif(not available(), reason="no folder ../shared/rollouts")


def module(name: str) -> ModuleType:
    """A module of that folder, by path: the folder is no package."""
    spec = importlib.util.spec_from_file_location(f"shared_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def load(name: str, **options: Any) -> list[dict[str, Any]]:
    """Records of one file, such as "tau_airline_small"."""
    stored = module("rollout_io").load(FOLDER / f"{name}.npz", **options)
    return [
        {
            "input_ids": ids.tolist(),
            "loss_mask": mask.tolist(),
            "reward": float(reward),
            "group": stored["task_names"][task],
        }
        for ids, mask, reward, task in zip(
            stored["ids"], stored["mask"], stored["reward"], stored["task"], strict=True
        )
    ]


def synthetic(preset: str, *, seed: int = 0, vocab: int = 2048) -> list[dict[str, Any]]:
    """Records of one of the generated presets, such as "edge"."""
    return [
        {
            "input_ids": row["ids"].tolist(),
            "loss_mask": row["mask"].tolist(),
            "reward": float(row["reward"]),
            "group": row["task"],
        }
        for row in module("synth").make(preset, seed, vocab)
    ]


def write_jsonl(records: Iterable[dict[str, Any]], path: Path) -> Path:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_parquet(records: Iterable[dict[str, Any]], path: Path) -> Path:
    """The same as Parquet; skips the test where pyarrow is missing."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.Table.from_pylist(list(records)), path)
    return path
