"""`eval merge`: rows of several runs in one file, each with the run that measured it."""

import json
from pathlib import Path

import pytest
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


def test_step_times_merge_with_their_profiles_and_plain_rows_of_each_backend():
    def step(algorithm, budget, ms, backend="fa3", context=128):
        return {
            "model": "m", "algorithm": algorithm, "budget": budget, "batch": 1, "context": context, "step_ms": ms,
            "backend_plain": backend,
        }  # fmt: skip

    profile = {"server": ["jetflow", 64, False], "batch": 1, "context": 128, "step_us": 7.0}
    one = {
        "meta": {"date": "1"},
        "rows": [step("plain", None, 5.0), step("plain", None, 6.0, "triton"), step("jetflow", 64, 7.0)],
        "profiles": [profile],
    }
    two = {
        "meta": {"date": "2"},
        "rows": [step("plain", None, 5.1), step("jetflow", 64, 6.5, "triton"), step("jetflow", 64, 9.0, context=4096)],
        "profiles": [profile | {"step_us": 6.5}],
    }
    merged = merge([one, two])
    assert [(r["algorithm"], r["backend_plain"], r["context"], r["step_ms"], r["run"]) for r in merged["rows"]] == [
        ("plain", "fa3", 128, 5.1, 0), ("plain", "triton", 128, 6.0, 1), ("jetflow", "triton", 128, 6.5, 0),
        ("jetflow", "fa3", 4096, 9.0, 0),
    ]  # fmt: skip
    assert merged["profiles"] == [profile | {"step_us": 6.5, "run": 0}]


WHAT_WAS_MEASURED = """
drafter method head causal loss data weaver weaver_width weaver_rounds fp8_draft dataset budget engine batch
model algorithm context server tensor_parallel requests nodes heads key_heads value_heads kv_heads head_dim state_dtype
implementation width rounds plain_batch layer features depth page_size
"""


@pytest.mark.parametrize("name", WHAT_WAS_MEASURED.split())
def test_rows_that_differ_in_what_was_measured_stay_beside_each_other(name):
    one, two = {"meta": {"date": "1"}, "rows": [{name: 1}]}, {"meta": {"date": "2"}, "rows": [{name: 2}]}
    assert merge([one, two])["rows"] == [{name: 1, "run": 0}, {name: 2, "run": 1}]
    assert merge([one, one | {"meta": {"date": "2"}}])["rows"] == [{name: 1, "run": 0}]


def test_every_shipped_result_survives_being_merged():
    """Rows of one file that no name tells apart, and what stands beside the rows, are kept."""
    files = sorted((Path(__file__).parent.parent / "eval" / "results").glob("*.json"))
    assert files
    for file in files:
        result = json.loads(file.read_text())
        merged = merge([{"meta": {"date": "before"}, "rows": [{"layer": "other"}], "drift": 1}, result])
        assert result.keys() - {"meta", "runs"} <= merged.keys()
        for name, part in result.items():
            if name == "rows":
                assert len(merged["rows"]) == len(part) + 1, file.name
            elif name == "profiles":
                assert len(merged[name]) == len(part), file.name
            elif name not in ("meta", "runs"):
                assert merged[name] == part, file.name


def test_the_command_extends_its_file_and_a_list_that_nobody_has_is_left_out(tmp_path):
    for name, length in (("out", 1.0), ("more", 2.0)):
        (tmp_path / name).write_text(json.dumps({"meta": {"date": name}, "rows": [row(name, 1, length)]}))
    assert main([str(tmp_path / "out"), str(tmp_path / "more")]) == 0
    result = json.loads((tmp_path / "out").read_text())
    assert [r["drafter"] for r in result["rows"]] == ["out", "more"] and "profiles" not in result


BAD = [
    "{",
    "[]",
    "{}",
    '{"rows": []}',
    '{"meta": {}, "rows": [1]}',
    '{"meta": {}, "rows": [{"run": 1}]}',
    '{"runs": []}',
    '{"meta": {}, "rows": 3}',
]


@pytest.mark.parametrize("text", [None, *BAD])
def test_a_file_that_holds_no_results_is_refused_by_name_and_nothing_is_written(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "bad.json").write_text(text)
    assert main([str(tmp_path / "out.json"), str(tmp_path / "bad.json")]) == 1
    assert "bad.json" in capsys.readouterr().err and not (tmp_path / "out.json").exists()


def test_files_of_unlike_evals_are_refused_and_nothing_is_written(tmp_path, capsys):
    def file(name: str, command: str) -> Path:
        meta = {"date": name, "command": command}
        (tmp_path / name).write_text(json.dumps({"meta": meta, "rows": [row(name, 1, 1.0)]}))
        return tmp_path / name

    out = file("out", "python -m sgl_specflow.eval inflation --model qwen3-8b --out inflation.json")
    other = file("other", "/usr/bin/python3 -m sgl_specflow.eval.tree_attention --out attention.json")
    before = out.read_text()
    assert main([str(out), str(other)]) == 1
    assert f"{other} is of eval tree_attention, {out} of inflation" in capsys.readouterr().err
    assert out.read_text() == before
    assert main([str(out), str(file("more", "python3 -m sgl_specflow.eval inflation --budgets 64"))]) == 0
    assert main([str(out), str(file("script", "python measure.py"))]) == 0  # which says nothing of it
