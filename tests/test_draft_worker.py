"""What the draft's cache holds is tracked exactly: never trusted where it is wrong, never recomputed where right."""

from workers.draft import BlockValidity


def test_a_prefix_is_held_as_far_as_versions_agree_and_blocks_are_full() -> None:
    validity = BlockValidity(num_blocks=8, block_size=4)
    validity.mark([3, 5, 6], [1, 1, 1], 0, 10)
    assert validity.prefix([3, 5, 6], [1, 1, 1]) == 10
    assert validity.prefix([3, 5, 7], [1, 1, 1]) == 8
    assert validity.prefix([3, 5, 6], [1, 2, 1]) == 4
    assert validity.prefix([2], [1]) == 0


def test_marking_goes_on_where_it_stopped_within_a_block() -> None:
    validity = BlockValidity(num_blocks=4, block_size=4)
    validity.mark([0, 1], [1, 1], 0, 3)
    assert validity.prefix([0, 1], [1, 1]) == 3
    validity.mark([0, 1], [1, 1], 3, 6)
    assert validity.prefix([0, 1], [1, 1]) == 6


def test_a_block_given_to_other_content_is_forgotten() -> None:
    validity = BlockValidity(num_blocks=2, block_size=4)
    validity.mark([0], [1], 0, 4)
    validity.mark([0], [2], 0, 1)
    assert validity.prefix([0], [1]) == 0
    assert validity.prefix([0], [2]) == 1
