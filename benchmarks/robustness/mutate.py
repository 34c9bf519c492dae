"""Damage to bytes and to JSON: what broken disks do, and what somebody would do on purpose."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any, Final

__all__ = ["DAMAGE", "damaged_json", "damaged_safetensors", "hostile_json"]

_DEEP: Final = 100_000


# -- bytes ----------------------------------------------------------------------------------------


def flip(content: bytes, dice: random.Random) -> bytes:
    """One bit."""
    if not content:
        return b"\x01"
    at, changed = dice.randrange(len(content)), bytearray(content)
    changed[at] ^= 1 << dice.randrange(8)
    return bytes(changed)


def truncate(content: bytes, dice: random.Random) -> bytes:
    """The end is missing."""
    return content[: dice.randrange(len(content) + 1)]


def grow(content: bytes, dice: random.Random) -> bytes:
    """Something follows, or was put in between."""
    at = dice.choice((len(content), dice.randrange(len(content) + 1)))
    return content[:at] + dice.randbytes(dice.randint(1, 200)) + content[at:]


def blank(content: bytes, dice: random.Random) -> bytes:
    """A block of zeros, as of a file that was not flushed."""
    at, size = dice.randrange(len(content) + 1), dice.choice((1, 16, 512, 4096))
    return content[:at] + bytes(len(content[at : at + size])) + content[at + size :]


def scramble(content: bytes, dice: random.Random) -> bytes:
    """A block of noise."""
    at, size = dice.randrange(len(content) + 1), dice.choice((1, 4, 64, 1024))
    return content[:at] + dice.randbytes(len(content[at : at + size])) + content[at + size :]


DAMAGE: Final[tuple[Callable[[bytes, random.Random], bytes], ...]] = (
    *(flip, flip, truncate, grow, blank, scramble),
)


# -- JSON -----------------------------------------------------------------------------------------


def hostile_json(dice: random.Random) -> Any:
    """A value that nobody would write."""
    whole = dice.choice((1, 7, 2**31, 2**60, 2**63, 2**64, 10**400, 0))
    name = dice.choice(
        ("../../../etc/passwd", "/dev/zero", "os.system", "a\x00b", "\ud800", "x" * 9999)
    )
    tensor = [
        dice.choice(("float32", "nn", "load", "_dynamo", "float8_e4m3fn", "", 3)),
        [whole],
        [1],
        False,
    ]
    return dice.choice(
        (
            *(whole, -whole, 1.5, 1e308, float("nan"), float("inf"), True, None, "", name),
            *([], {}, [[]], [whole] * 65, {"dict": [[1]]}, {"dict": [[[], 1]]}, {"set": [[1]]}),
            *({"tensor": ["model.w", "cpu", [whole]]}, {"tensor": tensor}, {"tensor": whole}),
            *({"dtype": "nn"}, {"dtype": "_dynamo"}, {"device": "cuda:99"}, {"device": name}),
            *({"float": name}, {"slice": [whole]}, {"size": [-whole]}, {"complex": [name, 1]}),
            *(
                {name: name},
                {"pickle": "gASVIQ=="},
                {"dict": [[i * (2**61 - 1), 0] for i in range(50)]},
            ),
        )
    )


def damaged_json(content: bytes, dice: random.Random) -> bytes:
    """JSON with one place, or the text itself, changed; still JSON, or nearly."""
    tree = json.loads(content)
    how = dice.randrange(12)
    if how == 0:
        opening, closing = dice.choice(
            ((b"[", b"]"), (b'{"dict":[[1,', b"]]}"), (b'{"tuple":[', b"]}"))
        )
        depth = dice.choice((100, 300, 900, _DEEP))
        return opening * depth + b"1" + closing * depth
    if how == 1 and content.lstrip()[:1] == b"{":
        return b'{"format": 1, "world": 1, "state": 1,' + content.lstrip()[1:]  # keys twice
    for _ in range(dice.choice((1, 1, 1, 3))):
        _change_somewhere(tree, dice)
    return json.dumps(tree).encode(errors="replace")


def _change_somewhere(tree: Any, dice: random.Random) -> None:
    node = tree
    while True:
        keys = list(node if isinstance(node, dict) else range(len(node)))
        if not keys:
            return
        key = dice.choice(keys)
        if not isinstance(node[key], dict | list) or dice.random() < 0.15:
            break
        node = node[key]
    how = dice.randrange(4)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, dict):
        node[dice.choice((f"{key} ", "../x", "tensor", "dict", "format"))] = node.pop(key)
    elif how == 1:
        node.insert(key, hostile_json(dice))
    elif how == 2 and type(node[key]) is int:
        node[key] = dice.choice((node[key] + 1, -node[key] - 1, node[key] * 2**40, 2**62, 10**9))
    else:
        node[key] = hostile_json(dice)


def damaged_safetensors(content: bytes, dice: random.Random) -> bytes:
    """A safetensors file with another header: the JSON, or its length."""
    (length,) = struct.unpack("<Q", content[:8])
    header, rest = content[8 : 8 + length], content[8 + length :]
    if dice.random() < 0.15:
        false = dice.choice((0, 1, length - 1, length + 1, 2**31, 2**60, 2**63, len(content)))
        return struct.pack("<Q", false) + header + rest
    changed = damaged_json(header, dice)
    return struct.pack("<Q", len(changed)) + changed + rest
