"""Blocks: owners, cached content of free blocks, and versions."""

import random

import pytest

from runtime.core.block_manager import BlockManager


def publish_all(blocks: BlockManager, block_ids: list[int], tokens: list[int], salt: str = "") -> None:
    chain, size = salt, blocks.block_size
    for index, block in enumerate(block_ids):
        chain = blocks.publish(block, chain, tuple(tokens[index * size : (index + 1) * size]))


def filled(num_blocks: int, tokens: list[int], size: int = 2, salt: str = "") -> tuple[BlockManager, list[int]]:
    blocks = BlockManager(num_blocks, size)
    mine = blocks.allocate(len(tokens) // size)
    publish_all(blocks, mine, tokens, salt)
    return blocks, mine


def test_a_hit_is_the_longest_prefix_that_leaves_a_token_to_feed() -> None:
    blocks, mine = filled(8, [1, 2, 3, 4])
    assert blocks.match([1, 2, 3, 4, 5], "")[0] == mine
    assert blocks.match([1, 2, 3, 4], "")[0] == mine[:1]
    assert blocks.match([1, 2, 9, 4, 5], "")[0] == mine[:1]
    assert blocks.match([1, 2], "")[0] == []
    assert blocks.match([9, 2, 3, 4, 5], "")[0] == []


def test_the_same_tokens_elsewhere_or_under_another_salt_are_other_content() -> None:
    blocks, _ = filled(8, [1, 2, 3, 4], salt="mine")
    assert blocks.match([3, 4, 5], "mine") == ([], "mine")
    assert blocks.match([1, 2, 3, 4, 5], "yours") == ([], "yours")
    assert blocks.match([1, 2, 3, 4, 5], "") == ([], "")


def test_contents_of_equal_hash_are_told_apart() -> None:
    assert hash((-1, 5)) == hash((-2, 5))
    blocks, mine = filled(4, [-1, 5])
    assert blocks.match([-1, 5, 0], "")[0] == mine
    assert blocks.match([-2, 5, 0], "")[0] == []


def test_equal_content_published_twice_continues_one_chain() -> None:
    blocks, first = filled(8, [1, 2, 3, 4])
    second = blocks.allocate(3)
    publish_all(blocks, second, [1, 2, 3, 4, 5, 6])
    assert blocks.match([1, 2, 3, 4, 5, 6, 7], "")[0] == [*first, second[2]]
    blocks.check_integrity([first, second])


def test_shared_blocks_are_free_when_the_last_owner_leaves() -> None:
    blocks, mine = filled(4, [1, 2, 3, 4])
    blocks.share(mine)
    blocks.check_integrity([mine, mine])
    blocks.free(mine)
    assert blocks.num_free == 2
    blocks.free(mine)
    assert blocks.num_free == 4
    blocks.check_integrity([])


def test_free_content_can_be_taken_up_again_with_its_version() -> None:
    blocks, mine = filled(4, [1, 2, 3, 4])
    versions = blocks.versions_of(mine)
    blocks.free(mine)
    hit, _ = blocks.match([1, 2, 3, 4, 5], "")
    assert blocks.num_free_among(hit) == 2
    blocks.share(hit)
    assert (hit, blocks.versions_of(hit), blocks.num_free) == (mine, versions, 2)
    blocks.check_integrity([hit])


def test_empty_blocks_go_first_then_content_unused_for_longest_tails_before_heads() -> None:
    blocks, old = filled(6, [1, 2, 3, 4])
    new = blocks.allocate(1)
    publish_all(blocks, new, [7, 8])
    blocks.free(old)
    blocks.free(new)
    assert not set(blocks.allocate(3)) & {*old, *new}
    assert blocks.allocate(3) == [old[1], old[0], new[0]]
    assert blocks.match([1, 2, 3], "")[0] == blocks.match([7, 8, 9], "")[0] == []


def test_versions_change_whenever_a_block_is_handed_out() -> None:
    blocks, mine = filled(2, [1, 2])
    before = blocks.versions_of(mine)
    blocks.free(mine)
    blocks.allocate(2)
    assert blocks.versions_of(mine) == [before[0] + 1]


def test_a_child_is_not_found_under_a_parent_computed_anew() -> None:
    blocks, mine = filled(4, [1, 2, 3, 4])
    blocks.forget(mine[:1])
    again = blocks.allocate(1)
    publish_all(blocks, again, [1, 2])
    assert blocks.match([1, 2, 3, 4, 5], "")[0] == again
    blocks.check_integrity([mine, again])


def test_forgotten_content_is_not_hit_whether_owned_or_free() -> None:
    blocks, mine = filled(4, [1, 2, 3, 4])
    blocks.free(mine[1:])
    blocks.forget(mine)
    assert blocks.match([1, 2, 3, 4, 5], "")[0] == []
    blocks.check_integrity([mine[:1]])
    assert blocks.num_free == 3


def test_too_much_is_refused_and_changes_nothing() -> None:
    blocks = BlockManager(2, 4)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 of 2 free"):
        blocks.allocate(3)
    mine = blocks.allocate(2)
    blocks.free(mine)
    with pytest.raises(RuntimeError, match="freed more often"):
        blocks.free(mine)


@pytest.mark.parametrize("tables", [[[0]], [[0, 1], [1]], [[0, 1, 2]], []])
def test_integrity_notices_tables_that_do_not_fit_the_books(tables: list[list[int]]) -> None:
    blocks = BlockManager(4, 2)
    assert sorted(blocks.allocate(2)) == [0, 1]
    with pytest.raises(RuntimeError, match="owners recorded"):
        blocks.check_integrity(tables)


def test_hits_are_the_content_a_plain_dictionary_remembers() -> None:
    """Random operations on sequences, checked against a dictionary from block to whole prefix."""
    dice = random.Random(0)
    blocks, prefix_of, live = BlockManager(10, 2), {}, []
    for _ in range(3000):
        if live and dice.random() < 0.5:
            blocks.free(live.pop(dice.randrange(len(live))))
        tokens = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
        hit, chain = blocks.match(tokens, "")
        for index, block in enumerate(hit):
            assert prefix_of[block] == tokens[: 2 * index + 2]
        missing = len(tokens) // 2 - len(hit)
        if missing + blocks.num_free_among(hit) > blocks.num_free:
            continue
        blocks.share(hit)
        table = hit + blocks.allocate(missing)
        for index in range(len(hit), len(table)):
            prefix_of[table[index]] = tokens[: 2 * index + 2]
            chain = blocks.publish(table[index], chain, tuple(tokens[2 * index : 2 * index + 2]))
        live.append(table)
        blocks.check_integrity(live)


def test_fewer_blocks_for_new_workers_and_all_of_them_again() -> None:
    blocks = BlockManager(4, 2)
    held = blocks.allocate(3)
    with pytest.raises(RuntimeError, match="3 are owned"):
        blocks.resize(2)
    blocks.publish(held[0], "", (1, 2))
    blocks.free(held)
    blocks.resize(2)
    assert blocks.match([1, 2], "") == ([], "")
    assert sorted(blocks.allocate(2)) == [0, 1]
    assert blocks.num_free == 0
    blocks.free([0, 1])
    blocks.check_integrity([])
    blocks.resize(4)
    assert blocks.num_free == 4
    with pytest.raises(RuntimeError, match="5 of 4 blocks wanted"):
        blocks.resize(5)
