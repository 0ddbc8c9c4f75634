"""Prompts and responses that the model has no positions for are refused before anything is sampled."""

from pathlib import Path

import pytest
from toy import recipe

from dapo.errors import ConfigError
from dapo.evaluation.offline import OfflineEval, run_offline_eval
from dapo.models.load import save_policy
from dapo.trainer.start import start_run
from tiny_models import tiny_policy


def test_limits_beyond_the_models_positions_are_refused(tmp_path: Path):
    positions = tiny_policy("llama").config.max_position_embeddings
    with pytest.raises(ConfigError, match=rf"limits\.max_response_tokens = .* the model has {positions:,} positions"):
        start_run(recipe(tmp_path, f"limits.max_response_tokens={positions - 15}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    start_run(recipe(tmp_path, f"limits.max_response_tokens={positions - 16}"), tmp_path / "run").close()


def test_an_examination_beyond_the_models_positions_is_refused(tmp_path: Path):
    policy = tiny_policy("llama")
    positions = policy.config.max_position_embeddings
    save_policy(policy, tmp_path / "model")
    (tmp_path / "set.jsonl").write_text('{"question": "a b", "answer": "1"}\n')

    def offline(max_response_tokens: int) -> OfflineEval:
        return OfflineEval(
            model=str(tmp_path / "model"), data=str(tmp_path / "set.jsonl"), use="eval", k=1, temperature=1.0,
            top_p=1.0, max_response_tokens=max_response_tokens, max_prompt_tokens=16, template="raw", chat=False,
            verifier="math", seed=0, concurrent=1, device="cpu",
        )  # fmt: skip

    typed = (
        rf"--max-response-tokens {positions - 15} after .* --max-prompt-tokens 16: the model has {positions} positions"
    )
    with pytest.raises(ConfigError, match=typed):
        run_offline_eval(offline(positions - 15), journal=tmp_path / "answers.jsonl")
    assert not (tmp_path / "answers.jsonl").exists()
    assert len(run_offline_eval(offline(positions - 16)).answers) == 1
