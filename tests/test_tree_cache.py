"""The content-compared cache."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from treecompile.runtime import cache as cache_module
from treecompile.runtime.cache import TreeCache
from treecompile.runtime.tree import RolloutTree

IDS = np.array([[1, 2, 3], [1, 2, 4]])


def tree_of(cache: TreeCache[RolloutTree], ids: np.ndarray, **options: object) -> RolloutTree:
    return cache.get([ids], lambda: RolloutTree.from_grid([ids]), **options)  # type: ignore[arg-type]


def test_equal_contents_share_one_tree() -> None:
    cache: TreeCache[RolloutTree] = TreeCache()
    tree = tree_of(cache, IDS)
    assert tree_of(cache, IDS.copy()) is tree
    assert (cache.hits, cache.misses, len(cache)) == (1, 1, 1)


@pytest.mark.parametrize(
    "other",
    [IDS + 1, IDS.astype(np.int32), IDS.reshape(3, 2), IDS[:1], torch.from_numpy(IDS)],
    ids=["values", "dtype", "shape", "rows", "tensor"],
)
def test_other_contents_do_not(other: np.ndarray | torch.Tensor) -> None:
    cache: TreeCache[str] = TreeCache()
    cache.get([IDS], lambda: "first")
    assert cache.get([other], lambda: "second") == "second"
    assert cache.get([IDS], lambda: "third") == "first"


def test_devices_options_and_absent_arrays_are_part_of_the_key() -> None:
    cache: TreeCache[int] = TreeCache()
    calls = [
        cache.get([IDS, None], lambda: 0),
        cache.get([IDS, None], lambda: 1, device="cuda:0"),
        cache.get([IDS, None], lambda: 2, device="cuda:1"),
        cache.get([IDS, None], lambda: 3, options=("step",)),
        cache.get([IDS, IDS], lambda: 4),
        cache.get([None, IDS], lambda: 5),
        cache.get([IDS, None], lambda: 6, device="cuda:1"),
    ]
    assert calls == [0, 1, 2, 3, 4, 5, 2]


def test_a_collision_of_fingerprints_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_fingerprint", lambda array: 0)
    cache: TreeCache[RolloutTree] = TreeCache()
    other = IDS.copy()
    other[1, 2] = 3
    assert (tree_of(cache, IDS).n, tree_of(cache, other).n) == (4, 3)
    assert (tree_of(cache, IDS).n, tree_of(cache, other).n) == (4, 3)
    assert (cache.hits, cache.misses) == (2, 2)


def test_a_change_that_the_samples_miss_is_seen() -> None:
    ids = np.zeros((64, 4096), np.int64)
    other = ids.copy()
    other[17, 1234] = 1
    assert cache_module._fingerprint(ids) == cache_module._fingerprint(other)
    cache: TreeCache[RolloutTree] = TreeCache()
    assert tree_of(cache, ids).n < tree_of(cache, other).n


@pytest.mark.parametrize(
    ("dtype", "as_tensor"),
    [
        *((dtype, True) for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, False) for dtype in (torch.float64, torch.float32, torch.float16)),
    ],
    ids=str,
)
def test_floats_are_compared_by_bits(dtype: torch.dtype, as_tensor: bool) -> None:
    cache: TreeCache[str] = TreeCache()

    def get(value: float, name: str) -> str:
        x = torch.tensor([[1.0, value]], dtype=dtype)
        return cache.get([x if as_tensor else x.numpy()], lambda: name)

    assert get(0.0, "zero") == "zero"
    assert get(-0.0, "minus zero") == "minus zero"
    assert get(float("nan"), "no number") == "no number"
    assert [get(x, "again") for x in (0.0, -0.0, float("nan"))] == ["zero", "minus zero", "no number"]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_writing_into_the_arrays_does_not_reach_the_cache(as_tensor: bool) -> None:
    cache: TreeCache[int] = TreeCache()
    ids = torch.from_numpy(IDS.copy()) if as_tensor else IDS.copy()
    cache.get([ids], lambda: 0)
    ids[0, 0] = 9
    assert cache.get([ids], lambda: 1) == 1
    ids[0, 0] = 1
    assert cache.get([ids], lambda: 2) == 0


def test_the_least_recently_used_entry_leaves() -> None:
    cache: TreeCache[int] = TreeCache(capacity=2)
    for value in (0, 1, 0, 2):
        cache.get([IDS + value], lambda value=value: value)  # type: ignore[misc]
    assert len(cache) == 2
    assert cache.get([IDS], lambda: -1) == 0
    assert cache.get([IDS + 1], lambda: -1) == -1


def test_copies_are_bounded_in_bytes() -> None:
    cache: TreeCache[int] = TreeCache(capacity=100, max_bytes=2 * IDS.nbytes)
    for value in range(5):
        cache.get([IDS + value], lambda: 0)
    assert len(cache) == 2
    cache.get([np.zeros((100, 100), np.int64)], lambda: 0)
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0


def test_threads_build_once() -> None:
    cache: TreeCache[object] = TreeCache()
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(cache.get([IDS], object))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert cache.misses == 1


def test_a_build_that_fails_leaves_nothing_behind() -> None:
    cache: TreeCache[int] = TreeCache()
    with pytest.raises(ZeroDivisionError):
        cache.get([IDS], lambda: 1 // 0)
    assert cache.get([IDS], lambda: 7) == 7


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_empty_arrays(shape: tuple[int, int]) -> None:
    cache: TreeCache[int] = TreeCache()
    assert cache.get([np.zeros(shape, np.int64)], lambda: 0) == 0
    assert cache.get([np.zeros(shape, np.int64)], lambda: 1) == 0


@pytest.mark.gpu
def test_arrays_are_compared_on_their_device(device: torch.device) -> None:
    cache: TreeCache[int] = TreeCache()
    ids = torch.from_numpy(IDS).to(device)
    assert cache.get([ids], lambda: 0, device=device) == 0
    assert cache.get([ids.clone()], lambda: 1, device=device) == 0
    assert cache.get([ids + 1], lambda: 2, device=device) == 2
