"""A folded program says every distinct line once."""

from __future__ import annotations

from autopar.plans.plan_folding import folded

BEGIN = ["# rank 0 of 2", "", "# forward", "x = given('x')  # tokens"]


def layer(number: int, seconds: str = "190 us") -> list[str]:
    """Twelve lines."""
    return [
        f"mm_{12 * number + line} = aten.mm(view_{number}, t_{line})  # model.layers.{number}.up/mm#{line}  {seconds}"
        for line in range(12)
    ]


def test_equal_layers_are_one() -> None:
    lines = [*BEGIN, *layer(0), *layer(1), *layer(2), "", "# backward", *layer(2)]
    said = "# ... these 12 lines 2 times more, up to model.layers.2.up/mm#11"
    assert folded("\n".join(lines)).splitlines() == [*BEGIN, *layer(0), said, "", "# backward", *layer(2)]


def test_a_layer_that_takes_longer_is_shown() -> None:
    lines = [*BEGIN, *layer(0), *layer(1, "191 us"), *layer(2)]
    assert folded("\n".join(lines)).splitlines() == lines


def test_two_equal_layers_are_one() -> None:
    said = "# ... these 12 lines 1 times more, up to model.layers.1.up/mm#11"
    assert folded("\n".join([*BEGIN, *layer(0), *layer(1)])).splitlines() == [*BEGIN, *layer(0), said]
