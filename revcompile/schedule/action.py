"""The actions of a stage, and how they are written: F3 is the forward pass of micro-batch 3."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Final

from revcompile.errors import InputError


class Op(enum.Enum):
    """What a stage can do. TRAIN: fit the gradient predictor to a micro-batch's true gradient."""

    RECV_X = "RECV x"
    FORWARD = "FORWARD"
    SEND_Y = "SEND y"
    RECV_DY = "RECV dy"
    BACKWARD = "BACKWARD"
    SEND_DX = "SEND dx"
    UPDATE = "UPDATE"
    TRAIN = "TRAIN"
    SEND_TIED_GRAD = "SEND tied grad"
    RECV_TIED_GRAD = "RECV tied grad"
    SEND_TIED_WEIGHT = "SEND tied weight"
    RECV_TIED_WEIGHT = "RECV tied weight"

    # Members are singletons; the default hashes the name in Python, a third of a dry run's time.
    __hash__ = object.__hash__


SHORT: Final = {
    Op.RECV_X: "RX",
    Op.FORWARD: "F",
    Op.SEND_Y: "SY",
    Op.RECV_DY: "RDY",
    Op.BACKWARD: "B",
    Op.SEND_DX: "SDX",
    Op.UPDATE: "U",
    Op.TRAIN: "T",
    Op.SEND_TIED_GRAD: "STG",
    Op.RECV_TIED_GRAD: "RTG",
    Op.SEND_TIED_WEIGHT: "STW",
    Op.RECV_TIED_WEIGHT: "RTW",
}
_LONG: Final = {short: op for op, short in SHORT.items()}
_ARROWS: Final = {
    Op.SEND_TIED_GRAD: ">",
    Op.SEND_TIED_WEIGHT: ">",
    Op.RECV_TIED_GRAD: "<",
    Op.RECV_TIED_WEIGHT: "<",
}
_SPELLING: Final = re.compile(r"([A-Z]+)(\d+)(?:([<>])(\d+))?")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does.

    `index` is the micro-batch, or the number of the update for UPDATE and the exchange of tied
    parameters; `peer` is the other stage of such an exchange.

    >>> print(Action(Op.FORWARD, 3), Action(Op.SEND_TIED_GRAD, 0, peer=2))
    F3 STG0>2
    >>> Action.parse("RTW1<0")
    Action(op=<Op.RECV_TIED_WEIGHT: 'RECV tied weight'>, index=1, peer=0)
    """

    op: Op
    index: int
    peer: int | None = None

    def __str__(self) -> str:
        tail = "" if self.peer is None else f"{_ARROWS[self.op]}{self.peer}"
        return f"{SHORT[self.op]}{self.index}{tail}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The action that `str` writes as `text`."""
        match = _SPELLING.fullmatch(text)
        op = _LONG.get(match[1]) if match else None
        if match is None or op is None or _ARROWS.get(op) != match[3]:
            raise InputError(f"{text!r} is no action; examples: F3, SDX1, U0, STG0>2, RTW0<0")
        return cls(op, int(match[2]), None if match[4] is None else int(match[4]))


@dataclass(frozen=True)
class Tie:
    """Two stages that use the same parameters: the owner updates them, the holder has a copy.

    The owner is the earlier stage. All parameters that the two share are exchanged in one message.
    """

    owner: int
    holder: int
