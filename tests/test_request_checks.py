"""What a request may not do: run its code where the server did not allow it."""

import json
import types
from pathlib import Path

import dill
import pytest

from sgl_specflow.runtime import request_checks


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def check(monkeypatch, request, enabled: bool, sglang_refuses: bool = True) -> None:
    """As in SGLang, whose own check stands between ours, or (not sglang_refuses) as if it had let the request pass."""
    features = types.SimpleNamespace(enable_custom_logit_processor=enabled)
    monkeypatch.setattr(request_checks, "get_exec", lambda: types.SimpleNamespace(features=features))
    monkeypatch.setattr(request_checks, "get_spec", lambda: types.SimpleNamespace(speculative_algorithm="JETFLOW"))

    def original(_manager, obj, _input_ids):
        if obj.custom_logit_processor and not enabled and sglang_refuses:
            raise ValueError("The server is not configured to enable custom logit processor.")

    manager = types.SimpleNamespace(model_config=types.SimpleNamespace(vocab_size=16))
    request_checks.refuse_tokens(original, manager, request, [3, 4])


def processor(path: Path) -> str:
    return json.dumps({"callable": dill.dumps(Payload(path)).hex()})


def test_a_processor_is_not_loaded_where_processors_are_off(monkeypatch, tmp_path):
    request = types.SimpleNamespace(custom_logit_processor=processor(tmp_path / "ran"))
    with pytest.raises(ValueError, match="not configured"):
        check(monkeypatch, request, enabled=False)
    assert not (tmp_path / "ran").exists()


def test_nor_where_sglang_lets_the_request_pass(monkeypatch, tmp_path):
    request = types.SimpleNamespace(custom_logit_processor=processor(tmp_path / "ran"))
    check(monkeypatch, request, enabled=False, sglang_refuses=False)
    assert not (tmp_path / "ran").exists()


def test_the_payload_would_show_itself(monkeypatch, tmp_path):
    """The test above can fail: where processors are allowed, loading one runs it, and what is no processor is refused."""
    request = types.SimpleNamespace(custom_logit_processor=processor(tmp_path / "ran"))
    with pytest.raises(ValueError, match="cannot be loaded"):
        check(monkeypatch, request, enabled=True)
    assert (tmp_path / "ran").exists()
