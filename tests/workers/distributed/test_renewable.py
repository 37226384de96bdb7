"""A group whose connections are replaced, and its shapes before there are any."""

import pytest
import torch

from tests.support.distributed.ranks import on_ranks
from workers.distributed.groups import Group, GroupError
from workers.distributed.renewable import RenewableGroup


@pytest.mark.parametrize("rank", [0, 1])
def test_shapes_before_it_is_connected_are_those_of_a_group(rank: int) -> None:
    renewable, ones = RenewableGroup(rank, 2), torch.ones(2, 3)

    def shapes(group: Group) -> list[torch.Size | None]:
        gathered = group.gather(ones.clone(), 0, 0)
        joined = [group.all_gather(ones.clone(), dim).shape for dim in (0, -1)]
        return [group.all_reduce(ones.clone()).shape, *joined, None if gathered is None else gathered.shape]

    assert shapes(renewable) == on_ranks(2, shapes)[rank]


def test_the_next_group_replaces_one_that_failed() -> None:
    groups = [RenewableGroup(rank, 2) for rank in range(2)]

    def use(group: Group) -> float:
        renewable = groups[group.rank]
        renewable.use(group)
        total = float(renewable.all_reduce(torch.tensor([renewable.rank + 1.0])))
        renewable.close()
        with pytest.raises(GroupError, match="after it was closed"):
            renewable.all_reduce(torch.ones(1))
        return total

    assert on_ranks(2, use) == on_ranks(2, use) == [3.0, 3.0]
