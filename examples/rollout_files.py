"""Reads rollout files: JSON lines (`.jsonl`, `.jsonl.gz`) and Parquet (`.parquet`).

A record has `input_ids` (token ids), and may have `loss_mask` (0 or 1 per token; without it every token
carries loss), `reward` (a number, else 0) and `group` (text or integer: rows whose mean reward is the
baseline). Every mistake in a file is reported with the file, the line or record and the field.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from examples.rollouts import Rollout
from treecompile import RolloutFileError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
FIELDS = ("input_ids", "loss_mask", "reward", "group")
LARGEST_ID = 2**31 - 1


def read_rollouts(
    path: str | Path, *, max_rows: int = 64, max_tokens: int = 32768
) -> tuple[list[Rollout], list[str]]:
    """Read a rollout file up to a size.

    Args:
        path: the file; its suffix tells its kind.
        max_rows: rows to keep.
        max_tokens: grid tokens to keep: rows times the longest row.

    Returns:
        The rollouts, and one message for each thing that was cut.

    Raises:
        RolloutFileError: the file, the line and the field, and what is wrong there.
    """
    path = Path(path)
    kept: list[Rollout] = []
    notes: list[str] = []
    longest = 0
    for rollout in records(path):
        longest = max(longest, len(rollout.input_ids))
        if len(kept) == max_rows:
            notes.append(
                f"kept the first {max_rows:,} rows (--max-rows); the rest of {path.name} was not read"
            )
            break
        if kept and longest * (len(kept) + 1) > max_tokens:
            notes.append(
                f"kept the first {len(kept):,} rows: another one makes more than {max_tokens:,} grid tokens "
                f"(--max-tokens); the rest of {path.name} was not read"
            )
            break
        if longest > max_tokens:
            notes.append(f"row 1 has {longest:,} tokens: cut to its first {max_tokens:,} (--max-tokens)")
            rollout = Rollout(
                rollout.input_ids[:max_tokens], rollout.loss_mask[:max_tokens], rollout.reward, rollout.group
            )
            longest = max_tokens
        kept.append(rollout)
    if not kept:
        raise RolloutFileError(
            file=path, problem="holds no rollouts", remedy="write one record per line, or per Parquet row"
        )
    return kept, notes


def records(path: Path) -> Iterator[Rollout]:
    """All rollouts of a file, one at a time, validated."""
    if not path.name.endswith(SUFFIXES):
        raise RolloutFileError(
            file=path, problem="has an unknown suffix", remedy="use one of " + ", ".join(SUFFIXES)
        )
    if not path.is_file():
        raise RolloutFileError(file=path, problem="no such file", remedy="check the path")
    lines = parquet_records(path) if path.suffix == ".parquet" else json_records(path)
    for line, record in lines:
        yield rollout_of(record, path, line)


def json_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, record) of a file of JSON lines; blank lines are passed over."""
    line = 0
    try:
        with open_text(path) as stream:
            for line, text in enumerate(stream, 1):
                if text.strip():
                    yield line, json_object(text, path, line)
    except UnicodeDecodeError as error:
        raise RolloutFileError(
            file=path,
            line=line + 1,
            problem=f"is not UTF-8 ({error.reason})",
            remedy="write the file as UTF-8",
        ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RolloutFileError(
            file=path,
            line=line + 1,
            problem=f"broken gzip data ({error})",
            remedy="copy or write the file again",
        ) from None


def open_text(path: Path) -> IO[str]:
    """The file as text, unpacked if its name ends in .gz."""
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def json_object(text: str, path: Path, line: int) -> Mapping[str, Any]:
    """One line as a JSON object."""
    try:
        record = json.loads(text.rstrip())
    except (ValueError, RecursionError) as error:
        where = (
            f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        )
        raise RolloutFileError(
            file=path,
            line=line,
            problem=f"is not valid JSON: {where}",
            remedy="write one complete JSON object per line",
        ) from None
    if not isinstance(record, dict):
        raise RolloutFileError(
            file=path,
            line=line,
            problem=f"holds {kind(record)}, not an object",
            remedy='write lines such as {"input_ids": [1, 2, 3]}',
        )
    return record


def parquet_records(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(record number, record) of a Parquet file."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise RolloutFileError(
            file=path,
            problem="needs pyarrow, which is not installed",
            remedy='pip install "treecompile[parquet]", or write the rollouts as JSON lines',
        ) from None
    line = 0
    try:
        with parquet.ParquetFile(path) as file:
            columns = [name for name in FIELDS if name in file.schema_arrow.names]
            for batch in file.iter_batches(batch_size=64, columns=columns):
                for record in batch.to_pylist():
                    line += 1
                    yield line, {name: value for name, value in record.items() if value is not None}
    except (ArrowException, OSError) as error:
        first = str(error).splitlines()[0]
        raise RolloutFileError(
            file=path, problem=f"cannot be read as Parquet ({first})", remedy="write the file again"
        ) from None


def rollout_of(record: Mapping[str, Any], path: Path, line: int) -> Rollout:
    """One validated rollout."""

    def fail(field: str, problem: str, remedy: str = "") -> RolloutFileError:
        return RolloutFileError(file=path, line=line, field=field, problem=problem, remedy=remedy)

    if "input_ids" not in record:
        near = ", ".join(sorted(record)) or "none"
        raise fail("input_ids", "is missing", f"the record has the fields: {near}")
    ids = integers(record["input_ids"], "input_ids", fail)
    if not len(ids):
        raise fail("input_ids", "is empty", "leave the record out, or give it a token")
    if ids.min() < 0:
        place = int(np.argmin(ids >= 0))
        raise fail("input_ids", f"has the negative id {ids[place]} at index {place}", "leave padding out")
    if ids.max() > LARGEST_ID:
        raise fail("input_ids", f"has the id {ids.max()}, above {LARGEST_ID}", "token ids fit 31 bits")
    mask = np.ones(len(ids), np.int64)
    if record.get("loss_mask") is not None:
        mask = integers(record["loss_mask"], "loss_mask", fail, booleans=True)
        if len(mask) != len(ids):
            raise fail(
                "loss_mask",
                f"has {len(mask)} entries for {len(ids)} tokens",
                "give one entry per token of input_ids",
            )
        if not np.isin(mask, (0, 1)).all():
            place = int(np.argmin(np.isin(mask, (0, 1))))
            raise fail("loss_mask", f"has {mask[place]} at index {place}", "use 0 and 1 only")
    return Rollout(ids, mask.astype(bool), reward_of(record, fail), group_of(record, fail))


def integers(value: Any, field: str, fail: Any, *, booleans: bool = False) -> npt.NDArray[np.int64]:
    """A JSON or Arrow list as int64; nothing is rounded or parsed."""
    if not isinstance(value, list):
        raise fail(field, f"is {kind(value)}, not a list of integers")
    for index, item in enumerate(value):
        if not isinstance(item, int) or (isinstance(item, bool) and not booleans):
            raise fail(field, f"has {kind(item)} at index {index}, not an integer")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise fail(field, "has an integer beyond 64 bits", "token ids fit 31 bits") from None


def reward_of(record: Mapping[str, Any], fail: Any) -> float:
    """The reward, 0 if there is none."""
    value = record.get("reward")
    if value is None:
        return 0.0
    if not isinstance(value, (int, float)):
        raise fail("reward", f"is {kind(value)}, not a number")
    if not math.isfinite(value):
        raise fail("reward", f"is {value}", "use a finite number")
    return float(value)


def group_of(record: Mapping[str, Any], fail: Any) -> str:
    """The group, one for all rows without any."""
    value = record.get("group")
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise fail("group", f"is {kind(value)}, not text or an integer")
    return str(value)


def kind(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {
        bool: "a boolean",
        int: "an integer",
        float: "a number with a point",
        str: "text",
        list: "a list",
    }
    if value is None:
        return "null"
    return names.get(type(value), "an object" if isinstance(value, dict) else type(value).__name__)


def fit_vocabulary(rollouts: Sequence[Rollout], vocab: int) -> tuple[list[Rollout], int, list[str]]:
    """Map ids to the vocabulary of a small model so that equal ids stay equal and different ones different.

    Args:
        rollouts: rows whose ids may lie beyond the model's vocabulary.
        vocab: size of that vocabulary.

    Returns:
        The rows, the size of the vocabulary that they need, and a message if something was changed.
    """
    distinct = np.unique(np.concatenate([r.input_ids for r in rollouts]))
    if distinct[-1] < vocab:
        return list(rollouts), vocab, []
    needed = max(vocab, math.ceil((len(distinct) + 1) / 64) * 64)
    # 0 stays free: it is what padding holds.
    mapped = [
        Rollout(np.searchsorted(distinct, r.input_ids) + 1, r.loss_mask, r.reward, r.group) for r in rollouts
    ]
    note = f"mapped {len(distinct):,} distinct ids (largest {distinct[-1]:,}) to 1..{len(distinct):,}"
    if needed > vocab:
        note += f"; the demo model's vocabulary grows from {vocab:,} to {needed:,}"
    return mapped, needed, [note]
