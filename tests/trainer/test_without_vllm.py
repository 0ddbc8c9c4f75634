"""A run that asks for vLLM where there is none says so at once, names the extra, and leaves nothing behind."""

import sys
from pathlib import Path

import pytest

from dapo.config.load import load_recipe
from dapo.errors import ConfigError, EngineError
from dapo.evaluation.offline import OfflineEval, run_offline_eval
from dapo.trainer.start import start_run


def test_without_vllm_the_message_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)  # as if it were not installed
    recipe = load_recipe("quickstart", ["rollout.engine=vllm"])
    with pytest.raises(EngineError, match=r'rollout\.engine = vllm: .*not installed\.\n.*"dapo\[vllm\]"'):
        start_run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def offline(engine: str) -> OfflineEval:
    return OfflineEval(
        model="bundled", data="dapo.quickstart.task:eval_problems", use="eval", k=1, temperature=1.0, top_p=1.0,
        max_response_tokens=8, max_prompt_tokens=64, template="raw", chat=False, verifier="math", seed=0,
        concurrent=4, device="cpu", engine=engine,
    )  # fmt: skip


def test_evaluation_refuses_what_is_not_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match=r"dapo\[vllm\]"):
        run_offline_eval(offline("vllm"))
    with pytest.raises(ConfigError, match=r"--engine vlm: no such engine\.\nUse local or plain or vllm"):
        run_offline_eval(offline("vlm"))
