"""Whether the graphs of a model run with the readings of its modules, or lean: without.

       NONE --- a graph hands over readings ---> NEW --- an optimizer steps ---> KNOWN
        |                                         |                                |
        +------------ one does in a backward -----+--------------------------------+---> RUN_AGAIN

In KNOWN, a forward may run graphs that are lean: each piece of code has then two. Where a checkpoint that is not compiled runs
graphs again in the backward, they must be those of the forward, or torch raises an error. Whether there is one is known once the
backward of a forward with all readings is over.
"""

from __future__ import annotations

from enum import Enum, auto

from ...touch.torch_private import compile_once_more, graph_task


class Graphs(Enum):
    """See the module."""

    NONE = auto()
    NEW = auto()
    KNOWN = auto()
    RUN_AGAIN = auto()


MOVES: dict[Graphs, tuple[Graphs, ...]] = {
    Graphs.NONE: (Graphs.NEW, Graphs.RUN_AGAIN),
    Graphs.NEW: (Graphs.KNOWN, Graphs.RUN_AGAIN),
    Graphs.KNOWN: (Graphs.RUN_AGAIN,),
    Graphs.RUN_AGAIN: (),
}


class Lean:
    """``is_on``: graphs run lean, until a step or the next forward. Dynamo reads this as it traces a hook, and makes a graph for
    either answer."""

    def __init__(self) -> None:
        self.is_on = False
        self._graphs = Graphs.NONE

    @property
    def has_graphs(self) -> bool:
        """Whether graphs hand over readings, since the hooks last changed."""
        return self._graphs is not Graphs.NONE

    def begin(self, *, wanted: bool) -> None:
        """A forward begins, of which no module has to be measured if this is ``wanted``."""
        self.is_on = wanted and self._graphs is Graphs.KNOWN and compile_once_more()

    def handed(self) -> None:
        """A graph hands over readings."""
        self._move(Graphs.NEW if graph_task() == -1 else Graphs.RUN_AGAIN)

    def stepped(self) -> None:
        """An optimizer of the model has stepped: the backward is over."""
        self.is_on = False
        self._move(Graphs.KNOWN)

    def _move(self, graphs: Graphs) -> None:
        """Moves on, if there is such a move."""
        if graphs in MOVES[self._graphs]:
            self._graphs = graphs

    def forget(self) -> None:
        """The hooks have changed."""
        self.is_on, self._graphs = False, Graphs.NONE
