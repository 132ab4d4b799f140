import pytest

from octavo.train.config import Config, ConfigError
from octavo.train.mesh import Degrees, check_parallel, find_degrees
from octavo.train.tables import Parallel


def refused(*essentials, parallel, processes=1, **settings):
    config = Config(parallel=parallel, **settings)
    with pytest.raises(ConfigError) as caught:
        check_parallel(config, find_degrees(config.parallel, processes))
    for essential in essentials:
        assert essential in str(caught.value)


def test_minus_one_is_what_is_left():
    assert find_degrees(Parallel(), 1) == Degrees(1, 1, 1)
    assert find_degrees(Parallel(), 8) == Degrees(1, 8, 1)
    assert find_degrees(Parallel(tp=2), 8) == Degrees(1, 4, 2)
    assert find_degrees(Parallel(dp_shard=2, dp_replicate=-1, tp=2), 12) == Degrees(3, 2, 2)
    assert find_degrees(Parallel(dp_shard=2, tp=-1), 2) == Degrees(1, 2, 1)


def test_degrees_that_do_not_multiply_to_the_processes():
    refused("number of processes, 3", "dp_shard 1 x tp 2", "is 2", parallel=Parallel(tp=2), processes=3)
    refused("number of processes, 1", "dp_shard 4", "start 4 processes", parallel=Parallel(dp_shard=4))
    refused("dp_replicate and dp_shard", "set all but one", parallel=Parallel(dp_replicate=-1), processes=2)


def test_sizes_that_cannot_be_divided():
    tp, dp = Parallel(tp=4), Parallel()
    refused("tp must divide kv_heads", "tp 4 and kv_heads 2", parallel=tp, processes=4, heads=8, kv_heads=2)
    refused("heads 6", parallel=tp, processes=4, heads=6, width=384, kv_heads=2)
    refused("mlp_width 70", parallel=Parallel(tp=4), processes=4, heads=8, kv_heads=4, mlp_width=70)
    refused("batch must be a multiple of the 3 shares", "dp_shard 3", "got 4", parallel=dp, processes=3)
    refused("fp16 is for one process", parallel=dp, processes=2, precision="fp16")


def test_the_processes_of_a_tensor_parallel_group_share_their_sequences():
    degrees = Degrees(dp_replicate=2, dp_shard=2, tp=2)
    assert [degrees.share(rank) for rank in range(8)] == [(i, 4) for i in (0, 0, 1, 1, 2, 2, 3, 3)]
