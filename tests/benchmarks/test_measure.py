"""How sides of a comparison take turns."""

from collections.abc import Iterator
from functools import partial

import pytest

from benchmarks.shared import measure


def test_each_block_and_each_turn_begins_with_another_side() -> None:
    began: list[str] = []

    def side(name: str, block: int) -> Iterator[int]:
        for _ in range(block):
            began.append(name)
            yield 1

    timings = measure.alternate_slices({name: partial(side, name) for name in "abc"}, [2, 1, 1], 1)
    assert "".join(began) == "abcbca" + "bca" + "cab"
    assert timings.tokens_B.tolist() == [2, 1, 1]


def test_sides_that_do_different_work_are_not_compared() -> None:
    sides = {"a": lambda block: iter([block]), "b": lambda block: iter([block, block])}
    with pytest.raises(ValueError, match=r"block 0: .*'a': 3, 'b': 6"):
        measure.alternate_slices(sides, [3], 1)


@pytest.mark.parametrize(
    ("given", "refused"), [("1", False), ("300", False), ("0", True), ("-1", True), ("many", True), ("1.5", True)]
)
def test_options_that_count_things_refuse_none(given: str, refused: bool, capsys: pytest.CaptureFixture[str]) -> None:
    parser = measure.arguments("About.")
    parser.add_argument("--engines", type=measure.COUNT)
    if not refused:
        assert parser.parse_args(["--engines", given, "--limit", given]).engines == int(given)
        return
    for option in ("--engines", "--limit"):
        with pytest.raises(SystemExit):
            parser.parse_args([option, given])
        assert f"argument {option}: must be a whole number of at least 1, got '{given}'" in capsys.readouterr().err
