"""Tasks of reasoning-gym, the real package: problems that come again, right and hostile answers, two steps of training.

Five tasks by themselves; all twenty, and every other task's answers, are marked slow: `make test-gym-all`.
"""

import os
import re
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

import command_line
from dapo.config import load_recipe
from dapo.data import load_problems
from dapo.data.gym import generate, source
from dapo.errors import DataError
from dapo.models.load import save_policy
from dapo.models.packed_attention import PACKED_ATTENTION
from dapo.models.policy import Policy
from dapo.rewards import Task, VerifierPool
from dapo.rewards.gym import score, tasks
from dapo.rewards.gym.names import parse
from dapo.types import Problem

pytestmark = pytest.mark.gym
if not os.environ.get("DAPO_NEEDS_GYM"):
    pytest.importorskip("reasoning_gym")

DAILY = ["chain_sum", "countdown", "spiral_matrix", "graph_color", "simple_integration"]
TWENTY = [
    *DAILY,
    "basic_arithmetic", "products", "gcd", "fraction_simplification", "base_conversion", "number_sorting",
    "spell_backward", "letter_counting", "binary_matrix", "mini_sudoku", "n_queens", "puzzle24", "knights_knaves",
    "tower_of_hanoi", "polynomial_multiplication",
]  # fmt: skip
OTHERS_TASKS = [name for name in sorted(tasks.registered()) if name not in TWENTY]
NO_EXAMPLE = ("boxnet", "rush_hour")  # reasoning-gym holds no solution of theirs
BY_DAY = [pytest.param(name, marks=() if name in DAILY else pytest.mark.slow) for name in TWENTY]
EVERY = [*BY_DAY, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS_TASKS)]


def dapo(*arguments: str) -> tuple[int, str]:
    answer = command_line.dapo(*arguments)
    return answer.returncode, answer.stdout + answer.stderr


def problems_of(task: str, *, size: int = 3) -> tuple[Problem, ...]:
    return load_problems(f"gym:{task}?size={size}", verifier="gym").problems


def right_answer(problem: Problem) -> str:
    """The reference; where any solution counts, the one that reasoning-gym itself found."""
    if problem.answer:
        return problem.answer
    where = problem.meta["gym"]
    entry = tasks.dataset(parse(where["name"]))[where["index"]]
    if tasks.digest(entry) != where["digest"]:
        pytest.fail("the entry is another one in this process")
    return generate.example_of(entry)


@pytest.fixture(scope="module")
def pool():
    with VerifierPool("gym", workers=1) as made:
        yield made


@pytest.mark.parametrize("task", EVERY)
def test_a_right_answer_is_correct_and_a_hostile_one_hangs_and_runs_nothing(
    task: str, pool: VerifierPool, tmp_path: Path
):
    mark = tmp_path / "ran"
    hostile = [
        f"__import__('pathlib').Path({str(mark)!r}).touch()",
        f"[__import__('pathlib').Path({str(mark)!r}).touch()]",
        f"x.__class__(__import__('os').system('touch {mark}'))",
        "9**9**9",
        "[" * 3_000 + "]" * 3_000,
        "(" * 3_000 + "x" + ")" * 3_000,
        "\\" * 1_000 + "{'a': 1, \"b\": [1, 2",
        "1e999999999",
        "-" * 10_000,
        "0" * 19_000,
        "\x00\ud7ff nan inf None",
    ]
    problem = problems_of(task)[0]
    told = Task("<answer>{}</answer>", problem.answer, None, problem.for_verifier())

    def judged(answer: str) -> str:
        return pool.judge_all([Task(f"<answer>{answer}</answer>", told.answer, None, told.meta)])[0].verdict.value

    if task not in NO_EXAMPLE:
        assert judged(right_answer(problem)) == "CORRECT"
    verdicts = [judged(answer) for answer in hostile]
    assert "CORRECT" not in verdicts
    others = [other.answer for other in problems_of(task)[1:] if other.answer not in ("", problem.answer)]
    assert not [answer for answer in others if judged(answer) == "CORRECT"], "an answer to another problem"
    assert not mark.exists()


@pytest.mark.parametrize("task", EVERY)
def test_problems_are_the_same_in_another_process_and_no_text_is_taken_off(task: str):
    once = problems_of(task)
    source.asked.cache_clear()
    again = problems_of(task)
    assert once == again
    assert not any("taken off" in note for note in load_problems(f"gym:{task}?size=3", verifier="gym").notes)


@pytest.mark.parametrize("task", ["chain_sum?max_digits=1&max_terms=2", "countdown?min_numbers=3&max_numbers=3"])
def test_training_and_held_out_problems_share_none(task: str):
    train = load_problems(f"gym:{task}&size=60", verifier="gym", use="train")
    other_seed = load_problems(f"gym:{task}&size=60&seed=7", verifier="gym", use="train")
    held_out = load_problems(f"gym:{task}&size=12", verifier="gym", use="eval")
    assert len(held_out) >= 5
    held = {problem.id for problem in held_out}
    assert not held & {problem.id for problem in (*train, *other_seed)}
    assert train.sha256 != other_seed.sha256


def test_a_small_task_gives_all_the_questions_it_has():
    """Sums of two digits: 10 · 10 · 2, an eighth of them held out. Those drawn may miss a few, and none comes twice."""
    train = load_problems("gym:chain_sum?max_digits=1&max_terms=2&size=400", verifier="gym")
    assert 150 <= len(train) <= 200
    assert len({problem.question for problem in train}) == len(train)
    assert f"it has {len(train)} different questions of the 400 wanted" in train.notes[0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gym:cuntdown", ["no task 'cuntdown'", "Did you mean countdown"]),
        ("gym:countdown?min_number=3", ["no parameter 'min_number'", "Did you mean min_numbers"]),
        ("gym:countdown?min_numbers=three", ["min_numbers = 'three'", "not a whole number", "default is 4"]),
        ("gym:countdown?min_numbers=9&max_numbers=3", ["max_numbers must be >= min_numbers", "min_numbers=4"]),
        ("gym:countdown?shuffle=1", ["shuffle = '1'", "true, false"]),
        ("gym:basic_arithmetic?format_style=loud", ["format_style = 'loud'", "simple, natural"]),
        ("gym:rearc?rng_difficulty_ranges=1", ["rng_difficulty_ranges = '1'", "cannot be given in a name"]),
        ("gym:gcd?bare=true", ["bare = true", "chain_sum"]),
        ("gym:composite", ["no task 'composite'"]),
    ],
)
def test_an_unknown_task_parameter_or_value_is_refused(name: str, says: list[str]):
    with pytest.raises(DataError) as refused:
        next(generate.rows({"name": name}))
    told = str(refused.value)
    assert name in refused.value.message
    assert refused.value.remedy
    assert not [text for text in says if text not in told], told


def test_and_the_command_exits_2():
    code, out = dapo("train", "quickstart", "--set", "data.train=gym:countdown?min_number=3")
    assert code == 2
    assert "gym:countdown?min_number=3: countdown has no parameter 'min_number'" in " ".join(out.split())
    assert "Did you mean min_numbers" in " ".join(out.split())


def test_the_check_shows_three_examples_and_the_list_has_every_task():
    code, out = dapo("data", "check", "gym:gcd?size=5")
    assert code == 0
    assert len(re.findall(r"^Example \d", out, re.MULTILINE)) == 3
    assert len(re.findall(r"Greatest Common Divisor", out)) == 3
    code, out = dapo("data", "gym")
    assert code == 0
    assert not [task for task in tasks.registered() if task not in out]


def test_a_prepared_file_is_scored_as_the_source_is(tmp_path: Path):
    path = tmp_path / "gcd.jsonl"
    assert dapo("data", "prepare", "gym:gcd?size=10", "--out", str(path))[0] == 0
    from_file = load_problems(str(path), verifier="gym")
    assert from_file.problems == load_problems("gym:gcd?size=10", verifier="gym").problems


def test_no_other_file_of_the_package_evaluates_text():
    """Who calls eval, exec or sympy's parser, by file; a new one has to be read before its version is let in."""
    import reasoning_gym

    home = Path(reasoning_gym.__file__).parent
    calls = re.compile(r"(?<![\w.])(?:eval|exec|compile)\(|\bparse_expr\(|\bsympify\(|pickle|\byaml\.load\(")
    found = {
        path.relative_to(home).with_suffix("").as_posix().replace("/", ".")
        for path in home.rglob("*.py")
        if calls.search(re.sub(r"re\.compile\(", "", path.read_text()))
    }
    of_entries_only = {
        "algorithmic.number_sorting",  # the reference
        "arithmetic.basic_arithmetic", "arithmetic.bitwise_arithmetic",  # its own problem
        "arithmetic.gsm_symbolic.generators_00_49", "arithmetic.gsm_symbolic.generators_50_99",  # numbers of its own
        "code.codeio",  # programs that come with the package
        "logic.propositional_logic", "code.contrib.bfit.Compiler.Compiler",  # functions of their own by such a name
    }  # fmt: skip
    guarded = {*score.LITERALS, *(f"algebra.{name}" for name in score.SYMBOLIC)}
    ours = {f"games.{name}" for name in tasks.OWN_SCORER}
    assert found == of_entries_only | guarded | ours


def test_countdown_is_scored_as_reasoning_gym_scores_it():
    """Ours against theirs, on answers that it is safe to hand to theirs."""
    data_set = tasks.dataset(parse("gym:countdown?min_numbers=3&max_numbers=4&size=10"))
    for index in range(10):
        entry = data_set[index]
        numbers, target, right = (entry["metadata"][key] for key in ("numbers", "target", "expression"))
        for answer in (right, f"({right})", f"{right} + 1", f"{right} - 0", str(target), "+".join(map(str, numbers))):
            assert score.is_solved(answer, numbers, target) == (data_set.score_answer(answer, entry) >= 1), answer


# ------------------------------------------------------------------ training


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers that reads bytes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(["<pad>", "<eos>", *letters])}
    plain = Tokenizer(models.BPE(vocabulary, []))
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>")
    config = Qwen2Config(
        vocab_size=len(vocabulary), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, eos_token_id=1, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM._from_config(config, attn_implementation=PACKED_ATTENTION)
    folder = tmp_path_factory.mktemp("reader")
    save_policy(Policy(model, tokenizer).eval(), folder)
    return folder


@pytest.mark.parametrize("task", BY_DAY)
def test_two_steps_of_training(task: str, reader: Path, tmp_path: Path):
    run = tmp_path / "run"
    code, out = dapo(
        "train", "quickstart", "--out", str(run), "--set", "preset=grpo-naive", "--set", f"model.path={reader}",
        "--set", f"data.train=gym:{task}?size=8", "--set", f'data.eval=["gym:{task}?size=2"]',
        "--set", "data.template=answer-tags", "--set", "limits.max_prompt_tokens=4096",
        "--set", "limits.max_response_tokens=24", "--set", "sampling.prompts_per_step=2",
        "--set", "sampling.responses_per_prompt=2", "--set", "train.steps=2", "--set", "train.updates_per_step=1",
        "--set", "train.warmup_steps=0", "--set", "eval.every_steps=2", "--set", "eval.k=1",
    )  # fmt: skip
    assert code == 0, out
    config = load_recipe(str(run / "config.toml")).config
    assert config.rewards.verifier == "gym"
    assert len((run / "metrics.jsonl").read_text().splitlines()) >= 2


def test_the_recipe_names_problems_that_the_bundled_model_reads():
    config = load_recipe("arithmetic-gym").config
    problems = load_problems(config.data.train, verifier=config.rewards.verifier)
    assert all(re.fullmatch(r"\d([-+]\d){1,3}=\?", problem.question) for problem in problems)
    assert len(problems) > 1_000
