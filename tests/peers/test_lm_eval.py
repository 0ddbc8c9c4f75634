"""An exported model in lm-evaluation-harness, unchanged: the real `lm_eval` on a task of the test's, no network."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dapo
from dapo.quickstart.task import eval_problems
from dapo.release.export import export_run

pytestmark = pytest.mark.peers

TASK = """
task: dapo_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["<nothing>"], max_gen_toks: 48, do_sample: false}}
filter_list:
  - name: last-number
    filter:
      - {{function: regex, regex_pattern: "(-?[0-9]+)", group_select: -1}}
      - {{function: take_first}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
SMALL = [
    "train.steps=1",
    "sampling.prompts_per_step=4",
    "sampling.responses_per_prompt=4",
    "eval.every_steps=0",
    "data.eval=[]",
]


def test_lm_eval_runs_on_an_exported_model_and_scores_its_answers(tmp_path: Path):
    dapo.train("quickstart", out=tmp_path / "run", overrides=SMALL)
    model = export_run(tmp_path / "run", tmp_path / "model").folder
    problems = list(itertools.islice(eval_problems(), 12))
    data = tmp_path / "sums.jsonl"
    data.write_text("".join(json.dumps({"question": p.question, "answer": p.answer}) + "\n" for p in problems))
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "sums.yaml").write_text(TASK.format(data=data))
    words = [
        "--model",
        "hf",
        "--model_args",
        f"pretrained={model},dtype=float32",
        "--device",
        "cpu",
        "--batch_size",
        "4",
    ]
    words += ["--tasks", "dapo_sums", "--include_path", str(tmp_path / "tasks"), "--output_path", str(tmp_path / "out")]
    own = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", *words],
        env=os.environ | own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "out").rglob("results_*.json")
    score = json.loads(results.read_text())["results"]["dapo_sums"]["exact_match,last-number"]
    assert score == sum(greedy_answer(model, p.question) == p.answer for p in problems) / len(problems)


def greedy_answer(model: Path, question: str) -> str:
    """The last number of what the model says, by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, loaded = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model)
    prompt = tokenizer(question, return_tensors="pt")
    said = loaded.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    numbers = re.findall(r"-?[0-9]+", tokenizer.decode(said, skip_special_tokens=True))
    return numbers[-1] if numbers else ""
