"""The stages of one process: which of them performs its next action."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from revcompile.runtime.executor.executor import StageExecutor
from revcompile.schedule import Action, Op

_BEFORE_BACKWARD: Final = (Op.RECV_TIED_WEIGHT, Op.RECV_X, Op.FORWARD, Op.SEND_Y)


class LocalScheduler:
    """Performs the lists of several stages in one process, each stage at its own pace."""

    def __init__(self, executors: Sequence[StageExecutor]) -> None:
        self.executors = list(executors)

    def own(self, lists: Sequence[Sequence[Action]]) -> list[deque[Action]]:
        """The lists of this process's stages, from those of all stages."""
        return [deque(lists[executor.index]) for executor in self.executors]

    def forward(self, lists: Sequence[Sequence[Action]]) -> list[deque[Action]]:
        """Perform the forward part of a step, first stage to last.

        Returns:
            The actions that are left to do, by stage.
        """
        rest = self.own(lists)
        for executor, actions in zip(self.executors, rest, strict=True):
            while actions and actions[0].op in _BEFORE_BACKWARD:
                if executor.perform(actions[0]):
                    actions.popleft()
                else:
                    executor.transport.wait(f"stage {executor.index} at {actions[0]}")
        return rest

    def finish(self, rest: Sequence[deque[Action]], may_stop: bool = False) -> None:
        """Perform all other actions, until nothing is left to do.

        Args:
            rest: What `forward` returned.
            may_stop: Return instead of waiting if all remaining actions have to wait.
        """
        waiting = list(zip(self.executors, rest, strict=True))
        # The order from last to first stage frees memory early. Where messages wait in slots, a
        # stage has to read its message before the next stage sends another one.
        is_first_to_last = bool(self.executors[0].transport.slots)
        while waiting:
            progress = False
            for executor, actions in waiting if is_first_to_last else reversed(waiting):
                while actions and executor.perform(actions[0]):
                    actions.popleft()
                    progress = True
            waiting = [(executor, actions) for executor, actions in waiting if actions]
            if waiting and not progress:
                if may_stop:
                    return
                blocked = (f"stage {e.index} at {actions[0]}" for e, actions in waiting)
                waiting[0][0].transport.wait("; ".join(blocked))
