"""What the compiler makes of the attention kernels for Hopper: no GPU is needed to look at that.

Matrix products run beside what follows them, unless the assembler has to serialise them, which it says and nobody
reads: a third of the speed is lost, and results are the same. It happened to dK/dV with a third loop.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from treecompile.runtime.ops.attention_triton import (
    Tiles,
    choice_for,
    column_blocks,
    padded_size,
    shared_heads,
)

GROUP = 4
FLOATS = ("lse", "lse2", "delta", "part_dk", "part_dv")
TABLES = (
    "subtree_end", "column", "items", "ranges", "tile_offsets", "tile_list", "order", "run_offsets", "runs",
    "full_tiles", "index_offsets", "index",
)  # fmt: skip


def assembled(kernel: Any, constants: dict[str, Any], tiles: Tiles, loaded: int, folder: Path) -> str:
    """What ptxas says of a kernel: its tensors are bf16, tiles that the copy engine loads have `loaded` rows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    constants = {name: value for name, value in constants.items() if name in names}
    types = {}
    for name in names:
        rest = name in ("q_rest", "q_rest_box", "k_rest")
        if name == "sinks" or (rest and not constants["QK_REST"]):
            constants[name] = None
        block = [constants["HEADS"], constants["TOKENS"]] if name.endswith("_box") else [1, loaded]
        of = "fp32" if name.startswith(("lse2", "delta")) else "bf16"
        if of == "bf16":
            ours = "QK_REST" if rest else "QK_PAD" if name.startswith(("q_", "k_")) else "V_PAD"
            block.append(constants[ours])
        types[name] = (
            "constexpr" if name in constants
            else f"tensordesc<{of}{block}>" if rest or name.endswith(("_descriptor", "_box"))
            else "fp32" if name in ("scale", "cap", "factor")
            else "i32" if name in ("tokens", "span", "window") or name.endswith(("_head", "_token"))
            else "*fp32" if name in FLOATS
            else "*i32" if name in TABLES
            else "*bf16"
        )  # fmt: skip
    aligned = [
        i for i, name in enumerate(names) if types[name][0] == "*" or name.endswith(("_head", "_token"))
    ]
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    text = folder / "kernel.ptx"
    text.write_text(made.asm["ptx"])
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    if not ptxas.exists():
        pytest.skip("this Triton brings no assembler for NVIDIA GPUs")
    said = subprocess.run(
        [ptxas, "-v", "--gpu-name=sm_90a", "-o", os.devnull, text], capture_output=True, text=True, check=True
    )
    return said.stdout + said.stderr


@pytest.mark.parametrize(
    ("size", "v_size", "window"),
    [(64, 64, False), (128, 128, False), (128, 128, True), (192, 128, False), (256, 256, False)],
    ids=["64", "128", "window", "192", "256"],
)
@pytest.mark.parametrize("name", ["forward", "short_forward", "dq", "short_dq", "dkv"])
def test_products_overlap(name: str, size: int, v_size: int, window: bool, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("kernels are interpreted here, not compiled")
    from treecompile.runtime.kernels import tree_attention as kernels

    tiles: Tiles = getattr(choice_for(size, v_size), name)
    pad, rest = column_blocks(size)
    heads = shared_heads(GROUP, tiles.rows)
    constants = {
        "GROUP": GROUP, "HEADS": heads, "TOKENS": tiles.rows // heads, "KEYS": tiles.keys,
        "QK": size, "QK_PAD": pad, "QK_REST": rest, "V": v_size, "V_PAD": padded_size(v_size),
        "SOFTCAP": False, "WINDOW": window, "TMA": True, "SINKS": False, "MASKED_STAGES": tiles.masked_stages,
    }  # fmt: skip
    kernel = getattr(kernels, f"{name.removeprefix('short_')}_kernel")
    loaded = tiles.rows if name == "dkv" else tiles.keys
    said = assembled(kernel, constants, tiles, loaded, tmp_path)
    assert "registers" in said
    assert "serialized" not in said, said
