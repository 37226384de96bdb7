"""Limits on the number of values in a JSON body and on their nesting, checked while its bytes arrive.

A few bytes of JSON become objects that take a hundred times their memory, and seconds of the event loop.
"""

import numpy as np

from runtime.http.errors import ApiError

MAX_VALUES = 1_200_000
"""Most values of a body: somewhat more than the default of `--max-waiting-tokens`."""
MAX_FIELDS = 65_536
"""Most lists, objects and fields of objects together. They cost several times what a number costs."""
MAX_NESTING = 512
PART_BYTES = 1 << 16

_MARKS = b",:[]{}"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
"""As int8: 1 for an opening bracket, -1 for a closing one."""


class JsonSize:
    """Counts what a JSON text contains without parsing it; what stands in strings does not count.

    Text that is not JSON is counted somehow: the parser refuses it afterwards.
    """

    def __init__(self) -> None:
        self.num_values = 1
        self.num_fields = 0
        self.nesting = 0
        self._depth = 0
        self._is_in_string = False
        self._ends_in_escape = False

    def add(self, part: bytes) -> None:
        """Count *part*, which follows the earlier ones.

        Raises:
            ApiError: 413 for too many values, lists, objects or fields; 400 for too deep a nesting.
        """
        marks = self._outside_strings(part).translate(None, _OTHERS)
        opened = marks.count(b"[") + marks.count(b"{")
        self.num_values += marks.count(b",") + opened
        self.num_fields += marks.count(b":") + opened
        if opened or self._depth > 0:
            self._add_nesting(marks)
        self._check()

    def _outside_strings(self, part: bytes) -> bytes:
        if self._ends_in_escape:
            part = b"\\" + part
        self._ends_in_escape = (len(part) - len(part.rstrip(b"\\"))) % 2 == 1
        if self._ends_in_escape:
            part = part[:-1]
        pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        first = int(self._is_in_string)
        self._is_in_string ^= len(pieces) % 2 == 0
        return b"".join(pieces[first::2])

    def _add_nesting(self, marks: bytes) -> None:
        steps = np.frombuffer(marks.translate(_STEPS, b",:"), np.int8)
        if len(steps):
            depths = self._depth + np.cumsum(steps, dtype=np.int64)
            self.nesting = max(self.nesting, int(depths.max()))
            self._depth = int(depths[-1])

    def _check(self) -> None:
        if self.num_values > MAX_VALUES:
            raise ApiError(413, f"the body must have at most {MAX_VALUES} values, got {self.num_values} and more")
        if self.num_fields > MAX_FIELDS:
            raise ApiError(
                413,
                f"the body must have at most {MAX_FIELDS} lists, objects and fields, got {self.num_fields} and more",
            )
        if self.nesting > MAX_NESTING:
            raise ApiError(400, f"the body must be nested at most {MAX_NESTING} levels deep, got {self.nesting}")
