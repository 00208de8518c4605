"""Charts have marks that people can read."""

from __future__ import annotations

import re

import pytest

from holdfast.reports import size
from holdfast.telemetry.charts import Curve, line_chart
from holdfast.wording import duration


def marks(most: float, *, base: float = 10) -> list[str]:
    """The marks on the upward axis of a chart whose highest point is `most`."""
    curve = Curve("it", [(0.0, 0.0), (1.0, most)])
    y_text = duration if base == 10 else lambda nbytes: size(round(nbytes))
    chart = line_chart("chart", [curve], x_text=str, y_text=y_text, y_base=base)
    return re.findall(r'<text class="tick y"[^>]*>(.*?)</text>', chart)


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (0.0, ["0 s", "1 s"]),
        (0.0037, ["0 s", "1 ms", "2 ms", "3 ms", "4 ms"]),
        (61.26, ["0 s", "20 s", "40 s", "60 s", "80 s"]),
        (1.26, ["0 s", "500 ms", "1 s", "1.5 s"]),
    ],
)
def test_marks_of_times_are_round(most: float, expected: list[str]) -> None:
    assert marks(most) == expected


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (24.1 * 2**20, ["0 B", "10.0 MiB", "20.0 MiB", "30.0 MiB"]),
        (5.1 * 2**30, ["0 B", "2.0 GiB", "4.0 GiB", "6.0 GiB"]),
    ],
)
def test_marks_of_sizes_are_round_too(most: float, expected: list[str]) -> None:
    assert marks(most, base=1024) == expected


@pytest.mark.parametrize("most", [1e-9, 0.3, 7.0, 99.9, 12345.0])
def test_all_points_lie_within_the_marks(most: float) -> None:
    heights = [
        float(y)
        for y in re.findall(r'cy="([-0-9.]+)"', line_chart("c", [Curve("it", [(0.0, most)])], x_text=str, y_text=str))
    ]
    assert all(0 <= height <= 190 for height in heights)
    assert len(heights) == 1
