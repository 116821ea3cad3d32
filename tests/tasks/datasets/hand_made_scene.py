"""A scene whose questions and answers can be worked out by hand."""

from experiment_core_utils.tasks.datasets.reference_scenes import Background, Item, ItemStyle, ScenePlan

PLAIN = ItemStyle(fill=(0, 0, 0), text=(0, 0, 0), plate=None, font="DejaVuSans.ttf", angle_degrees=0.0)


def item(colour: str, kind: str, label: str, x: float, y: float, diameter: int = 40) -> Item:
    """An item whose box is 40 x 60 around its place."""
    box = (int(x) - 20, int(y) - 20, int(x) + 20, int(y) + 40)
    return Item(kind, colour, label, 12, 0.012, box, (x, y), diameter, PLAIN)


def plan(*items: Item) -> ScenePlan:
    """The items on a canvas of 1000 x 1000."""
    return ScenePlan(1000, 1000, items, Background((255, 255, 255), "plain", 5, 0))


# Upper row: red circle 42, blue star K7Q; lower row: red star 908, green circle WEB. The red star is the biggest.
FOUR = plan(
    item("red", "circle", "42", 200, 200),
    item("blue", "star", "K7Q", 700, 210),
    item("red", "star", "908", 300, 800, diameter=60),
    item("green", "circle", "WEB", 850, 790),
)
