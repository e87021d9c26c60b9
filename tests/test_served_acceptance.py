"""`eval acceptance` from its command line to its file: servers of a tiny target on the CPU, plain and with a tree."""

import json

from served import make_small_head, make_small_target
from sgl_specflow.eval import acceptance

PROMPTS = ["w5 w6 w7", "w8 w9", "w10"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def test_it_measures_each_server_and_keeps_the_rows_of_others(tmp_path):
    target, head = make_small_target(tmp_path / "target"), make_small_head(tmp_path / "head", causal=True)
    (target / "chat_template.jinja").write_text(TEMPLATE)
    (head / "training.json").write_text(json.dumps({"loss": "forward_kl", "data": "none"}))
    rows = [json.dumps({"question": text, "answer": ""}) for text in PROMPTS]
    (tmp_path / "gsm8k_test.jsonl").write_text("\n".join(rows) + "\n")
    out = tmp_path / "results" / "acceptance.json"
    out.parent.mkdir()
    known = {"drafter": "jetflow", "dataset": "gsm8k", "budget": 8, "engine": "offline", "accept_length": 3.0}
    out.write_text(json.dumps({"meta": {"date": "before"}, "rows": [known]}))
    status = acceptance.main(
        [
            *("--model-path", str(target), "--data", str(tmp_path), "--out", str(out), "--datasets", "gsm8k"),
            *(
                "--drafters",
                f"jetflow=jetflow:{head}",
                "--budgets",
                "8",
                "--rows",
                "2",
                "--tokens",
                "12",
                "--batch",
                "2",
            ),
            *("--dtype", "float32", "--logs", str(tmp_path / "logs"), "--commit", "here"),
        ]
    )
    assert status == 0
    result = json.loads(out.read_text())
    assert [run.get("commit", run["date"]) for run in result["runs"]] == ["before", "here"]
    before, plain, tree = result["rows"]
    assert before == known | {"run": 0}
    assert (plain["drafter"], plain["budget"], plain["head"], plain["accept_length"]) == ("plain", None, None, 1.0)
    assert (tree["drafter"], tree["budget"], tree["head"], tree["loss"]) == ("jetflow", 8, "head", "forward_kl")
    # Greedy: the same tokens, up to each answer's own end, in fewer steps or as many.
    assert 2 <= plain["tokens"] == tree["tokens"] <= 2 * 12 and tree["accept_length"] >= 1.0
    for row in (plain, tree):
        assert (row["prompts"], row["batch"], row["engine"], row["run"]) == (2, 2, "sglang", 1)
        assert row["tokens_per_second"] > 0
