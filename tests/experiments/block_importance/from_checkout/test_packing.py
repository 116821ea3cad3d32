"""The positions and the mask of packed questions, by hand."""

from experiments.block_importance.from_checkout.packing import slot_mask, slot_positions


def test_positions_count_on_from_the_prefix_in_each_slot() -> None:
    assert slot_positions(3, [2, 3], 10).tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 0, 0]


def test_mask_keeps_slots_apart() -> None:
    """Prefix 0-1, slots 2-3 and 4-5, padding 6."""
    seen = [[column for column in range(7) if row[column]] for row in slot_mask(2, [2, 2], 7)[0, 0].tolist()]
    assert seen == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 4], [0, 1, 4, 5], [6]]


def test_the_mask_is_on_the_device_that_is_asked_for() -> None:
    assert slot_mask(2, [1, 1], 4, "meta").device.type == "meta"
