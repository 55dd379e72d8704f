"""Rollouts for the examples: generated trees of token sequences, and the batch a trainer makes of them.

A rollout is one row of training data: token ids, which of them the policy produced, a reward, and the
group whose mean reward is its baseline. The generator draws random ids in the shapes that agents, groups of
samples and tree search leave behind; all randomness comes from one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rollout:
    """One trajectory.

    Args:
        input_ids: int64 [tokens].
        loss_mask: bool [tokens], True where the policy produced the token in this row.
        reward: what the trajectory earned.
        group: rollouts of one group share their baseline.
    """

    input_ids: Ids
    loss_mask: npt.NDArray[np.bool_]
    reward: float
    group: str


@dataclass(frozen=True)
class Batch:
    """The grid that a trainer hands to the model: B right-padded rows of T columns.

    Args:
        input_ids: int64 [B, T], 0 where padded.
        attention_mask: int64 [B, T], 1 at tokens, 0 at padding.
        weight: float32 [B, T - 1]; the loss is -(weight * log_probs).sum(). An advantage divided by the
            number of tokens with loss; 0 at prompts, observations and padding.
        lengths: int64 [B], tokens of each row.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    weight: torch.Tensor
    lengths: torch.Tensor

    def rows(self) -> list[Ids]:
        """The rows without their padding."""
        return [row[:n].numpy() for row, n in zip(self.input_ids.cpu(), self.lengths.tolist(), strict=True)]

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on another device."""
        return Batch(
            self.input_ids.to(device), self.attention_mask.to(device), self.weight.to(device), self.lengths
        )


@dataclass(frozen=True)
class Sharing:
    """How often a batch repeats itself, counted without any padding.

    Args:
        rows: number of rows.
        tokens: tokens of all rows.
        distinct_tokens: nodes of the prefix tree.
        pairs: (query, key) pairs of causal attention over all rows.
        distinct_pairs: the same over the prefix tree: the sum of its nodes' depths.
        heads: positions whose next token is looked up: all but the last of each row.
        distinct_heads: nodes with at least one child.
    """

    rows: int
    tokens: int
    distinct_tokens: int
    pairs: int
    distinct_pairs: int
    heads: int
    distinct_heads: int


def sharing(rows: Sequence[Ids]) -> Sharing:
    """Count distinct prefixes by sorting the rows and comparing neighbours; needs no tree.

    Notes:
        Big-endian bytes sort as the ids do. O(tokens log rows).
    """
    ordered = sorted(rows, key=lambda row: row.astype(">i8").tobytes())
    tokens = pairs = heads = distinct_tokens = distinct_pairs = distinct_heads = 0
    before = np.zeros(0, np.int64)
    for row in ordered:
        n, known = len(row), common_prefix(before, row)
        tokens, pairs, heads = tokens + n, pairs + n * (n + 1) // 2, heads + n - 1
        distinct_tokens += n - known
        distinct_pairs += n * (n + 1) // 2 - known * (known + 1) // 2
        # The last token of `before` gains its first child here if `row` goes on where `before` ended.
        distinct_heads += max(0, n - 1 - known) + (1 if 0 < known == len(before) < n else 0)
        before = row
    return Sharing(len(rows), tokens, distinct_tokens, pairs, distinct_pairs, heads, distinct_heads)


def common_prefix(left: Ids, right: Ids) -> int:
    """Number of leading tokens that two rows have in common."""
    n = min(len(left), len(right))
    parted = np.flatnonzero(left[:n] != right[:n])
    return int(parted[0]) if len(parted) else n


def advantages(rollouts: Sequence[Rollout]) -> tuple[npt.NDArray[np.float64], str | None]:
    """Rewards minus the group's mean, over its standard deviation (GRPO).

    Returns:
        One advantage per rollout, and a message if the rewards say nothing (then every advantage is 1).
    """
    reward = np.array([r.reward for r in rollouts])
    out = np.zeros(len(rollouts))
    for group in {r.group for r in rollouts}:
        member = np.array([r.group == group for r in rollouts])
        out[member] = (reward[member] - reward[member].mean()) / (reward[member].std() + 1e-6)
    if np.abs(out).max() < 1e-3:
        return np.ones(len(rollouts)), "all rewards of a group are equal: every advantage is set to 1"
    return out, None


def batch_of(rollouts: Sequence[Rollout]) -> tuple[Batch, list[str]]:
    """Pad the rollouts to a grid and weight their tokens.

    Returns:
        The batch, and what had to be replaced or guessed on the way.
    """
    advantage, message = advantages(rollouts)
    notes = [message] if message else []
    counted = [r.loss_mask for r in rollouts]
    if not any(mask[1:].any() for mask in counted):
        counted = [np.ones_like(mask) for mask in counted]
        notes.append("no token carries loss: the loss is taken over all tokens")
    shape = len(rollouts), max(len(r.input_ids) for r in rollouts)
    ids, mask, weight = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
    total = sum(int(row[1:].sum()) for row in counted)
    for b, (rollout, with_loss) in enumerate(zip(rollouts, counted, strict=True)):
        n = len(rollout.input_ids)
        ids[b, :n], mask[b, :n] = rollout.input_ids, 1
        weight[b, :n] = with_loss * advantage[b] / total
    lengths = torch.tensor([len(r.input_ids) for r in rollouts])
    # log_probs[b, t] belongs to token t + 1.
    batch = Batch(
        torch.from_numpy(ids), torch.from_numpy(mask), torch.from_numpy(weight[:, 1:].copy()), lengths
    )
    return batch, notes


class Writer:
    """Draws segments of random ids; siblings of one fork begin with different tokens."""

    def __init__(self, seed: int, vocab: int) -> None:
        self.random = np.random.default_rng(seed)
        self.vocab = vocab

    def segment(self, low: int, high: int | None = None, *, unlike: Sequence[Ids] = ()) -> Ids:
        """From `low` to `high` random tokens; the first differs from those of the segments in `unlike`."""
        n = low if high is None else int(self.random.integers(low, high + 1))
        ids = self.random.integers(1, self.vocab, max(1, n))
        while int(ids[0]) in {int(other[0]) for other in unlike}:
            ids[0] = self.random.integers(1, self.vocab)
        return ids

    def rollout(self, parts: Sequence[tuple[Ids, bool]], group: str = "0") -> Rollout:
        """Join (ids, carries loss) parts; the reward is a coin flip."""
        ids = np.concatenate([part for part, _ in parts])
        mask = np.concatenate([np.full(len(part), with_loss) for part, with_loss in parts])
        return Rollout(ids, mask, float(self.random.integers(0, 2)), group)


def agent(writer: Writer, rows: int, scale: float) -> list[Rollout]:
    """Trials of an agent: a system prompt with tool schemas, a task, then turns of action and observation.

    A trial repeats the turn of an earlier trial in the same state with probability 0.9, so trials part late.
    """
    size = sizes(scale)
    prompt = writer.segment(size(800))
    taken: dict[bytes, list[tuple[Ids, Ids]]] = {}
    found = []
    for _ in range(rows):
        parts = [(prompt, False)]
        state = b""
        for _ in range(3):
            turns = taken.setdefault(state, [])
            if turns and writer.random.random() < 0.9:
                turn = turns[int(writer.random.integers(len(turns)))]
            else:
                action = writer.segment(size(20), size(40), unlike=[first for first, _ in turns])
                turn = action, writer.segment(size(25), size(60))
                turns.append(turn)
            parts += [(turn[0], True), (turn[1], False)]
            state += turn[0].tobytes()
        # Every trial ends in words of its own.
        parts.append((writer.segment(size(15), size(35)), True))
        found.append(writer.rollout(parts))
    return found


def grpo(writer: Writer, rows: int, scale: float) -> list[Rollout]:
    """One prompt, independently sampled answers."""
    size = sizes(scale)
    prompt = writer.segment(size(700))
    answers: list[Ids] = []
    for _ in range(rows):
        answers.append(writer.segment(size(30), size(110), unlike=answers))
    return [writer.rollout([(prompt, False), (answer, True)]) for answer in answers]


def search(writer: Writer, rows: int, scale: float) -> list[Rollout]:
    """Segment-wise tree search: all live paths fork in two until there are enough of them."""
    size = sizes(scale)
    paths = [[(writer.segment(size(300)), False)]]
    for depth in range(6):
        grown: list[list[tuple[Ids, bool]]] = []
        for place, path in enumerate(paths):
            room = rows - len(grown) - (len(paths) - place)
            siblings: list[Ids] = []
            for _ in range(2 if depth and room > 0 else 1):
                siblings.append(writer.segment(size(50), size(110), unlike=siblings))
                grown.append([*path, (siblings[-1], True)])
        paths = grown
    return [writer.rollout(path) for path in paths[:rows]]


def comb(writer: Writer, rows: int, scale: float) -> list[Rollout]:
    """One episode whose past thoughts are stripped: one row a turn, all leaving one trunk."""
    size = sizes(scale)
    trunk = [(writer.segment(size(400)), False)]
    found = []
    for _ in range(rows):
        thought, action = writer.segment(size(15), size(35)), writer.segment(size(15), size(25))
        found.append(writer.rollout([*trunk, (thought, True), (action, True)]))
        trunk += [(writer.segment(size(15), size(25), unlike=[thought]), False)]
        trunk += [(writer.segment(size(20), size(40)), False)]
    return found


def sizes(scale: float) -> Callable[[int], int]:
    """Multiplies lengths by `scale`, down to one token."""
    return lambda tokens: max(1, round(tokens * scale))


SHAPES: dict[str, Callable[[Writer, int, float], list[Rollout]]] = {
    "agent": agent,
    "grpo": grpo,
    "search": search,
    "comb": comb,
}


def generate(
    shape: str = "agent", *, rows: int = 12, seed: int = 0, vocab: int = 2048, scale: float = 1.0
) -> list[Rollout]:
    """Draw rollouts of one shape.

    Args:
        shape: "agent", "grpo", "search" or "comb".
        rows: number of rollouts.
        seed: of all randomness.
        vocab: ids are drawn from 1 to vocab - 1.
        scale: multiplies all lengths.

    Example:
        >>> rollouts = generate("grpo", rows=8)
        >>> len(rollouts), sharing([r.input_ids for r in rollouts]).rows
        (8, 8)
    """
    return SHAPES[shape](Writer(seed, vocab), rows, scale)
