"""Trees, plans, ops, kernels and execution: torch, triton and networkx, never torch.fx."""

if __name__ != "treecompile.runtime":
    raise ImportError("import treecompile.runtime, not runtime: the folder name is not an import name")
