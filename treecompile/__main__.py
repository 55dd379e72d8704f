"""The command line.

    python -m treecompile check [--op NAME] [--rules]     audit the op rules by brute force
    python -m treecompile check --missing [FILE]          ops without a rule: of known models, or listed in a file
    python -m treecompile explain MODULE:CALLABLE         report of a model and a batch

`explain` imports the callable, which returns ``(model, args, kwargs)`` or ``(model, args)``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: its arguments; those of the process if None.

    Returns:
        the exit status: 1 if a rule is incorrect, an op of a list has no rule, or a model is not supported.
    """
    parser = argparse.ArgumentParser(prog="python -m treecompile", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="audit the op rules by brute force")
    check.add_argument("--op", default="", help="only ops whose name contains this")
    check.add_argument(
        "--rules", action="store_true", help="leave out pointwise ops that are known by their tag"
    )
    check.add_argument("--verbose", action="store_true", help="print every sample")
    check.add_argument(
        "--missing", nargs="?", const="", default=None, metavar="FILE",
        help="list ops without a rule, of known models or named in a file, one a line; audits nothing",
    )  # fmt: skip
    explain = commands.add_parser("explain", help="report of a model and a batch")
    explain.add_argument("what", metavar="MODULE:CALLABLE")
    explain.add_argument("--save", metavar="FOLDER", help="write stages and pictures there")
    given = parser.parse_args(argv)
    if given.command == "explain":
        return _explain(given.what, given.save)
    return (
        _missing(given.missing) if given.missing is not None else _check(given.op, given.rules, given.verbose)
    )


def _check(name: str, rules: bool, verbose: bool) -> int:
    from treecompile import check

    tagged = set(check.tagged_ops()) if rules else set()
    ops = [(target, calls) for target, calls in check.audited_ops(name) if target not in tagged]
    verdicts = []
    for verdict in check.audit(ops):
        verdicts.append(verdict)
        if verbose:
            print(
                f"{verdict.outcome:9} {verdict.op}({verdict.call}) {verdict.where}  {verdict.detail}",
                flush=True,
            )
    print(check.summary(verdicts))
    bare = [str(target) for target, calls in ops if not calls]
    if bare:
        print(f"without samples: {', '.join(bare)}")
    return int(any(verdict.bad for verdict in verdicts) or not ops)


def _missing(path: str) -> int:
    from treecompile import check

    names = Path(path).read_text().split() if path else check.MODEL_OPS
    found = check.missing(names)
    print(f"{len(found)} of {len(names)} ops have no rule" + "".join(f"\n  {name}" for name in found))
    return int(bool(found))


def _explain(what: str, folder: str | None) -> int:
    import treecompile

    module, _, name = what.partition(":")
    sys.path.insert(0, "")
    model, args, *rest = getattr(importlib.import_module(module), name)()
    report = treecompile.explain(model, *args, **(rest[0] if rest else {}))
    print(report)
    if folder:
        print(f"\nwritten: {report.save(folder)}")
    return int(not report.supported)


if __name__ == "__main__":
    sys.exit(main())
