"""Programs that use treecompile as a trainer would."""
