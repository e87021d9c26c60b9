"""A line chart over tree budgets as one self-contained SVG, in plain Python."""

import math
from dataclasses import dataclass
from xml.sax.saxutils import escape

COLOURS = ("#1f6fb4", "#d1521f", "#2b8a3e", "#8a3ea8", "#b8860b", "#0f8b8d", "#c2255c", "#555555")
DASHES = ("", "7 4", "2 3")  # after the last colour the first returns with the next dash
HEIGHT = 400
LEFT, RIGHT, TOP, BOTTOM = 64, 500, 48, 344  # the plot's frame; the legend stands to its right
LEGEND_LINE = 20
LETTER = 7.5  # the mean width of a letter, ample
FONT = "font-family='system-ui, sans-serif'"


@dataclass(frozen=True)
class LineChart:
    title: str
    y_label: str
    series: dict[str, list[tuple[int, float]]]
    """Points (budget in nodes, value), by the name in the legend."""

    @property
    def budgets(self) -> list[int]:
        return sorted({budget for points in self.series.values() for budget, _ in points})

    @property
    def y_step(self) -> float:
        """Distance of the y axis' ticks: 1, 2 or 5 times a power of ten, at most seven of them."""
        highest = max(value for points in self.series.values() for _, value in points)
        power = 10.0 ** math.floor(math.log10(highest / 7))
        return next(power * step for step in (1, 2, 5, 10) if highest / (power * step) <= 7)

    @property
    def y_top(self) -> float:
        """The axis ends at the first tick that no value exceeds; it begins at 0."""
        highest = max(value for points in self.series.values() for _, value in points)
        return self.y_step * math.ceil(highest / self.y_step - 1e-9)

    def x(self, budget: int) -> float:
        """Pixels from the left: logarithmic, the least and greatest budget at the frame's ends."""
        low, high = math.log2(self.budgets[0]), math.log2(self.budgets[-1])
        return (LEFT + RIGHT) / 2 if low == high else LEFT + (math.log2(budget) - low) / (high - low) * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return BOTTOM - value / self.y_top * (BOTTOM - TOP)

    def svg(self) -> str:
        """The whole file. Its background is white, so that it reads on a dark page too."""
        width = round(RIGHT + 64 + LETTER * max(map(len, self.series)))
        height = max(HEIGHT, TOP + LEGEND_LINE * len(self.series) + 24)
        parts = [
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}' "
            f"role='img' {FONT} font-size='13' fill='#222222'>",
            f"<title>{escape(self.title)}</title>",
            f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
            f"<text x='{LEFT}' y='26' font-size='16' font-weight='600'>{escape(self.title)}</text>",
            *self._axes(),
        ]
        for i, (name, points) in enumerate(self.series.items()):
            parts += self._line(i, name, sorted(points))
        return "\n".join([*parts, "</svg>", ""])

    def _axes(self) -> list[str]:
        parts = []
        for tick in range(round(self.y_top / self.y_step) + 1):
            value = tick * self.y_step
            at = self.y(value)
            parts.append(f"<line x1='{LEFT}' y1='{at:.1f}' x2='{RIGHT}' y2='{at:.1f}' stroke='#dddddd'/>")
            parts.append(f"<text x='{LEFT - 8}' y='{at + 4:.1f}' text-anchor='end'>{value:g}</text>")
        for budget in self.budgets:
            at = self.x(budget)
            parts.append(f"<line x1='{at:.1f}' y1='{BOTTOM}' x2='{at:.1f}' y2='{BOTTOM + 5}' stroke='#666666'/>")
            parts.append(f"<text x='{at:.1f}' y='{BOTTOM + 20}' text-anchor='middle'>{budget}</text>")
        middle, centre = (TOP + BOTTOM) / 2, (LEFT + RIGHT) / 2
        return [
            *parts,
            f"<line x1='{LEFT}' y1='{BOTTOM}' x2='{RIGHT}' y2='{BOTTOM}' stroke='#666666'/>",
            f"<text x='{centre}' y='{BOTTOM + 42}' text-anchor='middle'>budget (nodes a verify pass, log scale)</text>",
            f"<text x='18' y='{middle}' text-anchor='middle' transform='rotate(-90 18 {middle})'>"
            f"{escape(self.y_label)}</text>",
        ]

    def _line(self, index: int, name: str, points: list[tuple[int, float]]) -> list[str]:
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[index // len(COLOURS) % len(DASHES)]
        stroke = f"stroke='{colour}' stroke-width='2'" + (f" stroke-dasharray='{dash}'" if dash else "")
        path = " ".join(f"{self.x(budget):.1f},{self.y(value):.1f}" for budget, value in points)
        row = TOP + 8 + LEGEND_LINE * index
        return [
            f"<g><polyline points='{path}' fill='none' {stroke}/>",
            *(
                f"<circle cx='{self.x(budget):.1f}' cy='{self.y(value):.1f}' r='3.5' fill='{colour}'>"
                f"<title>{escape(name)}, budget {budget}: {value:.4g}</title></circle>"
                for budget, value in points
            ),
            f"<line x1='{RIGHT + 20}' y1='{row}' x2='{RIGHT + 46}' y2='{row}' {stroke}/>",
            f"<text x='{RIGHT + 52}' y='{row + 4}'>{escape(name)}</text></g>",
        ]
