"""`eval plots`: what the charts show, and where."""

import json
import re
from xml.etree import ElementTree

import pytest
from sgl_specflow.eval import plots
from sgl_specflow.eval.line_chart import BOTTOM, COLOURS, DASHES, LEFT, RIGHT, TOP, LineChart

SVG = "{http://www.w3.org/2000/svg}"


def chart(**series):
    return LineChart("A <title> & more", "units", series or {"one": [(16, 1.0), (256, 4.0)]})


def drawn(chart):
    """(legend name, polyline's points, circles' centres) of each series of the file."""
    root = ElementTree.fromstring(chart.svg())
    result = []
    for group in root.iter(f"{SVG}g"):
        points = [tuple(map(float, pair.split(","))) for pair in group.find(f"{SVG}polyline").get("points").split()]
        centres = [(float(c.get("cx")), float(c.get("cy"))) for c in group.iter(f"{SVG}circle")]
        result.append((group.find(f"{SVG}text").text, points, centres))
    return result


def texts(chart):
    return [element.text for element in ElementTree.fromstring(chart.svg()).iter(f"{SVG}text")]


def test_values_stand_at_their_pixels():
    a_chart = chart(one=[(256, 4.0), (16, 1.0), (64, 2.5)])
    assert a_chart.y_step == 1.0 and a_chart.y_top == 4.0
    height = BOTTOM - TOP
    expected = [(LEFT, BOTTOM - height / 4), ((LEFT + RIGHT) / 2, BOTTOM - height * 2.5 / 4), (RIGHT, TOP)]
    ((name, points, centres),) = drawn(a_chart)
    assert name == "one" and points == centres == expected


def test_a_tick_stands_where_its_value_would():
    a_chart = chart(one=[(16, 1.0), (64, 2.0), (256, 4.0)])
    elements = {element.text: element for element in ElementTree.fromstring(a_chart.svg()).iter(f"{SVG}text")}
    assert float(elements["3"].get("y")) - 4 == a_chart.y(3.0)
    assert float(elements["64"].get("x")) == a_chart.x(64)


@pytest.mark.parametrize(
    "highest, step, top", [(1.0, 0.2, 1.0), (6.3, 1.0, 7.0), (7.01, 2.0, 8.0), (31.0, 5.0, 35.0), (0.033, 0.005, 0.035)]
)
def test_the_y_axis_begins_at_zero_and_holds_every_value(highest, step, top):
    a_chart = chart(one=[(16, highest)], two=[(16, highest / 2)])
    assert (a_chart.y_step, a_chart.y_top) == pytest.approx((step, top))
    assert a_chart.y(0) == BOTTOM and a_chart.y(a_chart.y_top) == TOP
    labels = texts(a_chart)
    assert "0" in labels and f"{top:g}" in labels


def test_a_single_budget_stands_in_the_middle():
    ((_, points, _),) = drawn(chart(one=[(64, 1.0)]))
    assert points == [((LEFT + RIGHT) / 2, TOP)]


def test_every_series_is_drawn_named_and_unlike_the_others():
    names = [f"s & <{i}>" for i in range(len(COLOURS) * len(DASHES))]
    a_chart = LineChart("t", "y", {name: [(16, 1.0 + i), (32, 2.0)] for i, name in enumerate(names)})
    assert [name for name, *_ in drawn(a_chart)] == names
    root = ElementTree.fromstring(a_chart.svg())
    looks = [(p.get("stroke"), p.get("stroke-dasharray")) for p in root.iter(f"{SVG}polyline")]
    assert len(set(looks)) == len(names)
    width, height = float(root.get("width")), float(root.get("height"))
    assert width >= RIGHT + 52 + 7 * max(map(len, names))
    legend = [float(group.find(f"{SVG}text").get("y")) for group in root.iter(f"{SVG}g")]
    assert legend == sorted(set(legend)) and legend[-1] < height


def test_the_file_needs_no_page_around_it():
    text = chart().svg()
    root = ElementTree.fromstring(text)
    background = root.find(f"{SVG}rect")
    assert background.get("fill") == "#ffffff" and background.get("width") == root.get("width")
    assert background.get("height") == root.get("height")
    assert not re.search(r"href|@import|url\(|<script|<style", text)
    assert "A <title> & more" in texts(chart()) and "units" in texts(chart())


def accepted(drafter, dataset, budget, length, head="h", **more):
    named = {"drafter": drafter, "head": head, "dataset": dataset, "budget": budget}
    return named | {"accept_length": length, "engine": "sglang", **more}


ACCEPTANCE = [
    accepted("plain", "gsm8k", None, 1.0, None),
    accepted("jetflow", "gsm8k", 64, 3.0),
    accepted("jetflow", "gsm8k", 16, 2.0),
    accepted("jetflow", "gsm8k", 16, 2.1, engine="offline", method="one_pass"),
    accepted("jetflow", "gsm8k", 16, 2.2, engine="offline", method="path_refresh"),
    accepted("jetflow", "gsm8k", 16, 1.7, engine="offline", method="chain"),
    accepted("jetflow", "gsm8k", 16, 2.05, engine="offline", method="one_pass", fp8_draft=True),
    accepted("ddtree", "mbpp", 16, 1.5, "a"),
    accepted("ddtree", "mbpp", 16, 1.6, "b"),
]


def test_accept_lengths_are_charted_by_data_set_and_drafter():
    charts = plots.acceptance_charts(ACCEPTANCE)
    assert {name: chart.series for name, chart in charts.items()} == {
        "accept_length_gsm8k": {
            "jetflow": [(64, 3.0), (16, 2.0)],
            "jetflow (offline)": [(16, 2.1)],
            "jetflow, path refresh (offline)": [(16, 2.2)],
            "jetflow, chain (offline)": [(16, 1.7)],
            "jetflow, FP8 draft (offline)": [(16, 2.05)],
        },
        "accept_length_mbpp": {"ddtree a": [(16, 1.5)], "ddtree b": [(16, 1.6)]},
    }
    assert charts["accept_length_mbpp"].title.endswith("mbpp")


def test_two_rows_of_one_point_are_refused():
    with pytest.raises(ValueError, match="'jetflow' have budget 64"):
        plots.acceptance_charts([*ACCEPTANCE, accepted("jetflow", "gsm8k", 64, 3.1)])


def test_throughput_gives_speed_up_and_inflation():
    row = {"drafter": "jetflow", "budget": 16, "batch": 8, "dataset": "gsm8k", "speed_up": 1.4, "inflation": 1.2}
    charts = plots.throughput_charts([row | {"drafter": "plain", "budget": None}, row])
    assert {name: chart.series for name, chart in charts.items()} == {
        "speed_up_gsm8k": {"jetflow, batch 8": [(16, 1.4)]},
        "inflation_gsm8k": {"jetflow, batch 8": [(16, 1.2)]},
    }


def test_step_inflation_is_charted_by_model_and_point():
    row = {"model": "qwen3-8b", "budget": 16, "batch": 1, "context": 4096, "inflation": 1.1}
    # Plain decoding has no budget; where it failed, a tree's row has no inflation.
    rows = [row, row | {"budget": None}, row | {"budget": 64, "inflation": None}, row | {"context": 128}]
    del rows[1]["inflation"]
    rows += [
        {"model": "one-budget", "budget": budget, "batch": 1, "context": 128, "inflation": 4.0} for budget in (64, None)
    ]
    on_two = row | {"tensor_parallel": 2}
    (chart,) = plots.step_inflation_charts([*rows, on_two]).values()
    series = {"batch 1, context 4096": [(16, 1.1)], "batch 1, context 128": [(16, 1.1)]}
    assert chart.series == series, "one budget on two GPUs is no line"
    (chart,) = plots.step_inflation_charts([*rows, on_two, on_two | {"budget": 64, "inflation": 1.2}]).values()
    assert chart.series == series | {"batch 1, context 4096, 2 GPUs": [(16, 1.1), (64, 1.2)]}


def test_missing_files_are_named_and_the_others_drawn(tmp_path, capsys):
    (tmp_path / "acceptance_smollm2.json").write_text(json.dumps({"rows": ACCEPTANCE}))
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")]) == 0
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "accept_length_gsm8k.svg", "accept_length_mbpp.svg",
    ]  # fmt: skip
    ElementTree.parse(tmp_path / "plots" / "accept_length_gsm8k.svg")
    missing = [line for line in capsys.readouterr().out.splitlines() if "is missing" in line]
    assert [name in line for name, line in zip(("throughput_smollm2", "step_inflation"), missing)] == [True, True]


@pytest.mark.parametrize("content", ["{}", "[1]", '{"rows": [{}]}', "{"])
def test_a_file_without_rows_to_draw_is_named(tmp_path, capsys, content):
    (tmp_path / "throughput_smollm2_h200.json").write_text(content)
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")]) == 1
    assert "throughput_smollm2_h200.json holds no rows" in capsys.readouterr().err


def test_a_folder_with_nothing_to_draw_is_an_error(tmp_path, capsys):
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "plots")]) == 1
    assert "holds nothing to draw" in capsys.readouterr().err
