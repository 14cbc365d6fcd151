from draftlab.training.sampler import RowOrder


def order(num_rows=10, seed=1, batch_rows=2, accumulation=1, num_processes=1):
    return RowOrder(num_rows, seed, batch_rows, accumulation, num_processes)


def test_every_epoch_uses_every_row_once_in_an_order_of_its_own():
    rows = order()
    epochs = [
        [row for step in range(first, first + 5) for row in rows.rows(step)] for first in (1, 6)
    ]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(10))
    assert epochs[0] != epochs[1]
    assert [rows.epoch(step) for step in (1, 5, 6, 11)] == [0, 0, 1, 2]


def test_seeds_give_different_orders():
    assert order(seed=1).rows(1) != order(seed=2).rows(1)


def test_the_rows_of_a_step_do_not_depend_on_the_layout():
    wide = order(batch_rows=4)
    for layout in (
        {"batch_rows": 2, "accumulation": 2},
        {"batch_rows": 1, "num_processes": 4},
        {"batch_rows": 1, "accumulation": 2, "num_processes": 2},
    ):
        assert [order(**layout).rows(step) for step in range(1, 8)] == [
            wide.rows(step) for step in range(1, 8)
        ]


def test_two_processes_run_the_batches_of_double_accumulation():
    alone = order(accumulation=2)
    pair = order(num_processes=2)
    for step in range(1, 7):
        assert [*pair.batches(step, 0), *pair.batches(step, 1)] == alone.batches(step, 0)


def test_an_uneven_end_is_filled_with_empty_rows_on_every_process():
    uneven = order(num_rows=5, batch_rows=2, num_processes=2)
    assert uneven.steps_per_epoch == 2
    last = [uneven.batches(2, rank) for rank in range(2)]
    assert [len(batches) for batches in last] == [1, 1]
    assert last[0][0][0] is not None
    assert [last[0][0][1], *last[1][0]] == [None, None, None]
