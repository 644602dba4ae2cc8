"""Things that a wrapper might disturb, one line of output for each: ``strange.py HOW_TO_END``. Needs no torch."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys


class Mine:
    """A class that is pickled as a class of ``__main__``."""


def tell(what: object) -> None:
    kind = type(what).__module__ if isinstance(what, Mine) else what
    print(multiprocessing.current_process().name, kind, __name__, flush=True)


def fail(depth: int) -> None:
    if depth:
        fail(depth - 1)
    raise LookupError("of its own")


if __name__ == "__main__":
    print(sys.argv, __name__, __file__, sys.flags.optimize, sys.dont_write_bytecode)
    print([place for place in sys.path if place and "site-packages" not in place])
    print(getattr(sys.modules.get("sitecustomize"), "WHO", "no sitecustomize of the user's"))
    print(pickle.loads(pickle.dumps(Mine())).__class__)
    for method, context in (("fork", multiprocessing.get_context("fork")), ("spawn", multiprocessing.get_context("spawn"))):
        process = context.Process(target=tell, args=(Mine(),), name=method)
        process.start()
        process.join()
        print(method, process.exitcode, flush=True)
    *_, how = sys.argv
    if how == "exec":
        os.execv(sys.executable, [sys.executable, __file__, "again", "raise"])
    if how == "raise":
        fail(2)
    if how == "kill":
        os.kill(os.getpid(), 9)
    sys.exit(int(how))
