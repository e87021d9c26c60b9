"""`eval merge`: rows of several runs in one file, each with the run that measured it."""

import json

from sgl_specflow.eval.merge import main, merge


def row(drafter, budget, length, **more):
    return {
        "drafter": drafter,
        "budget": budget,
        "dataset": "gsm8k",
        "engine": "offline",
        "accept_length": length,
    } | more


def test_rows_keep_their_run_and_later_ones_replace_the_same():
    first = {"meta": {"date": "1"}, "rows": [row("jetflow", 16, 4.0), row("jetflow", 64, 5.0)]}
    second = {"meta": {"date": "2"}, "rows": [row("jetflow", 64, 5.5), row("jetflow", 64, 5.6, engine="sglang")]}
    merged = merge([first, second])
    assert merged["runs"] == [{"date": "1"}, {"date": "2"}] and merged["meta"] == {"date": "2"}
    assert [(r["budget"], r["engine"], r["accept_length"], r["run"]) for r in merged["rows"]] == [
        (16, "offline", 4.0, 0), (64, "offline", 5.5, 1), (64, "sglang", 5.6, 1),
    ]  # fmt: skip


def test_merging_a_merged_file_again_keeps_each_rows_run_and_drops_runs_without_rows():
    merged = merge(
        [{"meta": {"date": "1"}, "rows": [row("a", 1, 1.0)]}, {"meta": {"date": "2"}, "rows": [row("b", 1, 2.0)]}]
    )
    again = merge([merged, {"meta": {"date": "3"}, "rows": [row("a", 1, 3.0)]}])
    assert again["runs"] == [{"date": "3"}, {"date": "2"}]
    assert {(r["drafter"], r["accept_length"], again["runs"][r["run"]]["date"]) for r in again["rows"]} == {
        ("a", 3.0, "3"), ("b", 2.0, "2"),
    }  # fmt: skip


def test_widths_of_a_weaver_are_rows_of_their_own(tmp_path):
    one = {"meta": {"date": "1"}, "rows": [row("dflash_tfm", 64, 6.0, weaver_width=8)]}
    two = {"meta": {"date": "1"}, "rows": [row("dflash_tfm", 64, 6.5, weaver_width=1)]}
    for name, result in (("one", one), ("two", two)):
        (tmp_path / name).write_text(json.dumps(result))
    assert main([str(tmp_path / "out"), str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    result = json.loads((tmp_path / "out").read_text())
    assert [r["accept_length"] for r in result["rows"]] == [6.0, 6.5] and result["runs"] == [{"date": "1"}]
