"""FX graph in, FX graph out: pure functions over captured graphs, no execution."""

if __name__ != "treecompile.passes":
    raise ImportError("import treecompile.passes, not passes: the folder name is not an import name")
