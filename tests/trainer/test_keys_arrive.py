"""What a key says arrives where it counts: a run hands every setting of its parts to the part that reads it.

The parts' own tests show what they do with a setting, and the reference trainer what a step does with one. Here a run
is put together (and evaluated, and saved) with values that are nobody's default, and each is found in a call.
"""

import inspect
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import toy
from cases import ELSEWHERE, NOT_IN_A_STEP

from dapo.config.schema import Config
from dapo.models.critic import Critic
from dapo.models.policy import Policy
from dapo.rewards.judging import JUDGE_FOLDER
from dapo.rollout.draft import Drafting
from dapo.rollout.engine import SamplingParams
from dapo.trainer.interrupt import watched
from dapo.trainer.loop import train
from dapo.trainer.start import start_run


class Arrival(NamedTuple):
    key: str
    value: str  # as it is typed
    call: str  # module:name of what is called there
    argument: str
    expected: object = None  # None: the value as the config has it
    of: Callable[[Any], object] = lambda argument: argument


class Scene(NamedTuple):
    """A run with these keys, put together as far as the call that it `ends_with`, or trained for a step."""

    arrivals: tuple[Arrival, ...]
    keys: tuple[str, ...] = ()
    ends_with: str = ""
    is_trained: bool = False


def in_a_run(folder: Path | None) -> str | None:
    """Where a judge keeps its verdicts, from the folder of runs on."""
    return folder and f"{folder.parent.name}/{folder.name}"


def quantization(config: Config) -> str:
    return config.rollout.quantization


ASSEMBLE, EVALUATE, MAKE = "dapo.trainer.assemble", "dapo.trainer.evaluate", "dapo.rollout.make"
POOL, ENGINE, COLLECTOR = f"{ASSEMBLE}:VerifierPool", f"{MAKE}:LocalEngine", f"{ASSEMBLE}:Collector"
POLICY, LORA, CRITIC = f"{ASSEMBLE}:load_policy", f"{ASSEMBLE}:add_lora", "dapo.learner.learner:load_critic"
REFERENCE, TRACKERS = "dapo.learner.learner:load_policy", "dapo.trainer.track:make_trackers"
PLAIN, VLLM, MEMORY = f"{MAKE}:PlainEngine", f"{MAKE}:VllmEngine", f"{ASSEMBLE}:limit_memory"
PART, RECOMPUTED = "dapo.rewards.parts:VerifierPool", "dapo.learner.learner:checkpoint_layers"
PROBLEMS, PROMPT = "dapo.data.encoded:load_problems", "dapo.data.encoded:PromptFormat"
EVALUATION, ENVIRONMENTS = f"{EVALUATE}:evaluate", "dapo.trainer.episodes:EnvironmentPool"
SCENES = {
    "a run": Scene(
        (
            Arrival("rewards.verifier", "dapo-published", POOL, "verifier"),
            Arrival("rewards.cpu_seconds", "3.5", POOL, "seconds"),
            Arrival("rewards.memory_mb", "777", POOL, "memory_mb"),
            Arrival("rewards.workers", "3", POOL, "workers"),
            Arrival("rewards.truncated_may_be_correct", "true", POOL, "truncated_may_be_correct"),
            Arrival("rewards.verifier", "", POOL, "folder", f"run/{JUDGE_FOLDER}", of=in_a_run),
            Arrival("sampling.responses_per_prompt", "3", COLLECTOR, "responses_per_prompt"),
            Arrival("limits.max_response_tokens", "11", COLLECTOR, "max_new_tokens"),
            Arrival("train.seed", "23", COLLECTOR, "seed"),
            Arrival("limits.max_prompt_tokens", "17", ENGINE, "max_tokens", 17 + 11),
            Arrival("rollout.max_concurrent_sequences", "19", ENGINE, "max_concurrent"),
            Arrival("rollout.kv_cache_gib", "0.25", ENGINE, "kv_gib"),
            Arrival("rollout.draft_tokens", "3", ENGINE, "drafting", of=lambda drafting: drafting.tokens),
            Arrival("rollout.draft_below_rows", "5", ENGINE, "drafting", of=lambda drafting: drafting.below_rows),
            Arrival("rollout.quantization", "fp8", ENGINE, "is_float8", True),
            Arrival("rollout.quantization", "fp8", f"{ASSEMBLE}:refuse_float8", "config", of=quantization),
            Arrival("sampling.temperature", "0.9", ENGINE, "sampling", SamplingParams(temperature=0.9)),
            Arrival("sampling.retire_above", "0.83", f"{ASSEMBLE}:RetiringSource", "above"),
            Arrival("model.revision", "abc", POLICY, "revision"),
            Arrival("model.kernels", "plain", POLICY, "is_fused", False),
            Arrival("model.device", "cpu", POLICY, "device"),
            Arrival("eval.k", "2", EVALUATION, "k"),
            Arrival("eval.temperature", "0.6", EVALUATION, "engine", of=lambda engine: engine.sampling.temperature),
            Arrival("eval.top_p", "0.8", EVALUATION, "engine", of=lambda engine: engine.sampling.top_p),
            Arrival("eval.top_k", "9", EVALUATION, "engine", of=lambda engine: engine.sampling.top_k),
            Arrival("limits.max_response_tokens", "11", EVALUATION, "max_new_tokens"),
            Arrival("train.seed", "23", EVALUATION, "seed"),
            Arrival("checkpoint.keep", "4", "dapo.trainer.checkpoint:save_checkpoint", "keep"),
            Arrival("checkpoint.keep_best", "true", "dapo.trainer.checkpoint:save_checkpoint", "best", "step-000000"),
            Arrival("train.max_wait_s", "321.0", "dapo.trainer.interrupt:Watchdog", "limit_s"),
        ),
        ("preset=grpo-naive", "data.eval=['toy:problems']", "eval.every_steps=1"),
        is_trained=True,
    ),
    "the same bits": Scene(
        (
            Arrival("rollout.exact", "true", ENGINE, "is_exact", True),
            Arrival("limits.max_prompt_tokens", "17", f"{MAKE}:ExactPass", "max_tokens", 17 + 11),
            Arrival("limits.max_response_tokens", "11", f"{MAKE}:ExactPass", "max_tokens", 17 + 11),
        ),
        ("preset=grpo-naive",),
    ),
    "a part of the reward": Scene(
        (
            Arrival("rewards.parts.NAME.function", "", PART, "verifier", "toy:short"),
            Arrival("rewards.parts.NAME.function", "", PART, "folder", f"run/{JUDGE_FOLDER}", of=in_a_run),
            Arrival("rewards.cpu_seconds", "3.5", PART, "seconds"),
            Arrival("rewards.memory_mb", "777", PART, "memory_mb"),
            Arrival("rewards.workers", "3", PART, "workers"),
        ),
        ("rewards.parts={short={function='toy:short', weight=0.5}}",),
    ),
    "selection": Scene(
        (
            Arrival("sampling.predictive", "true", f"{ASSEMBLE}:PredictiveSource", "G", 3),
            Arrival("train.seed", "23", f"{ASSEMBLE}:PredictiveSource", "seed"),
            Arrival("train.seed", "23", f"{ASSEMBLE}:ProblemOrder", "seed"),
        ),
        ("preset=dapo-fast", "sampling.responses_per_prompt=3"),
    ),
    "a mixture": Scene(
        (
            Arrival("data.train.NAME.weight", "", f"{ASSEMBLE}:MixtureSource", "weights", [5.0, 2.0]),
            Arrival("data.train.NAME.verifier", "", POOL, "verifier", "exact"),
        ),
        ("data.train={a={path='toy:problems', weight=5}, b={path='toy:problems', weight=2, verifier='exact'}}",),
    ),
    "an adapter": Scene(
        (
            Arrival("model.lora.rank", "3", LORA, "rank"),
            Arrival("model.lora.alpha", "7.0", LORA, "alpha"),
            Arrival("model.lora.target_modules", "['q_proj']", LORA, "target_modules", ("q_proj",)),
            Arrival("model.lora.rank_stabilized", "true", LORA, "rank_stabilized"),
            Arrival("model.lora.dropout", "0.25", LORA, "dropout"),
            Arrival("model.lora.quantization", "int8", POLICY, "quantization"),
        )
    ),
    "a critic": Scene(
        (
            Arrival("algorithm.critic.path", "FOLDER/other", CRITIC, "path"),
            Arrival("model.kernels", "plain", CRITIC, "is_fused", False),
        ),
        ("preset=ppo",),
    ),
    "recomputed activations": Scene(
        (
            Arrival("train.gradient_checkpointing", "true", RECOMPUTED, "module", Policy, of=type),
            Arrival("train.gradient_checkpointing", "true", RECOMPUTED, "module", Critic, of=type),
        ),
        ("preset=ppo",),
    ),
    "a critic of the same model": Scene(
        (Arrival("model.revision", "abc", CRITIC, "revision"),), ("preset=ppo",), ends_with=CRITIC
    ),
    "a teacher": Scene(
        (
            Arrival("algorithm.kl.path", "FOLDER/other", REFERENCE, "path"),
            Arrival("model.kernels", "plain", REFERENCE, "is_fused", False),
        ),
        ("preset=grpo",),
    ),
    "a teacher of an adapter": Scene(
        (Arrival("algorithm.kl.path", "FOLDER/other", REFERENCE, "path"),),
        ("preset=grpo", "model.lora.rank=2"),  # without a teacher its base is the reference, and nothing is loaded
        ends_with=REFERENCE,
    ),
    "a reference": Scene((Arrival("model.revision", "abc", REFERENCE, "revision"),), ("preset=grpo",), REFERENCE),
    "a GPU": Scene((Arrival("model.gpu_memory_gib", "7.5", MEMORY, "gib"),), ("model.device=cuda",), MEMORY),
    "prompts": Scene(
        (
            Arrival("data.fields", "{question='q'}", PROBLEMS, "fields", {"question": "q"}),
            Arrival("data.template", "raw", PROMPT, "template"),
            Arrival("data.chat_template", "false", PROMPT, "chat"),
            Arrival("limits.max_prompt_tokens", "17", "dapo.data.encoded:encode_problems", "max_prompt_tokens"),
        ),
        ("data.train=problems.jsonl",),
    ),
    "evaluation sets": Scene(
        (
            Arrival("data.eval.NAME.path", "", PROBLEMS, "source", "problems.jsonl"),
            Arrival("data.eval.NAME.path", "", PROBLEMS, "use", "eval"),  # which split of a known name
            Arrival("data.eval.NAME.template", "", PROMPT, "template", "raw"),
            Arrival("data.eval.NAME.verifier", "", POOL, "verifier", "exact"),
        ),
        ("data.eval={held={path='problems.jsonl', template='raw', verifier='exact'}}", "eval.every_steps=1"),
    ),
    "episodes": Scene(
        (
            Arrival("data.environment", "talking:Talker", ENVIRONMENTS, "names", of=lambda names: next(iter(names))),
            Arrival("rewards.workers", "3", ENVIRONMENTS, "workers"),
            Arrival("rewards.cpu_seconds", "3.5", ENVIRONMENTS, "seconds"),
            Arrival("rewards.memory_mb", "777", ENVIRONMENTS, "memory_mb"),
            Arrival("limits.max_turns", "3", "dapo.trainer.episodes:EpisodeEngine", "max_turns"),
        ),
        ("limits.max_response_tokens=32",),
    ),
    "trackers": Scene(
        (
            Arrival("tracking.to", "['wandb']", TRACKERS, "names", ("wandb",)),
            Arrival("tracking.project", "mine", TRACKERS, "project"),
        ),
        ends_with=TRACKERS,
    ),
    "the plain engine": Scene(
        (
            Arrival("sampling.temperature", "0.9", PLAIN, "sampling", SamplingParams(temperature=0.9)),
            Arrival("rollout.max_concurrent_sequences", "19", PLAIN, "max_concurrent"),
            Arrival("rollout.draft_tokens", "3", PLAIN, "drafting", Drafting(3, 5)),
            Arrival("rollout.draft_below_rows", "5", PLAIN, "drafting", Drafting(3, 5)),
        ),
        ("rollout.engine=plain",),
        ends_with=PLAIN,
    ),
    "vLLM": Scene(
        (
            Arrival("rollout.vllm.gpu_memory_utilization", "0.35", VLLM, "memory_fraction"),
            Arrival("rollout.max_concurrent_sequences", "19", VLLM, "max_concurrent"),
            Arrival("sampling.temperature", "0.9", VLLM, "sampling", SamplingParams(temperature=0.9)),
        ),
        ("rollout.engine=vllm",),
        ends_with=VLLM,
    ),
}
# Keys that are handed to nobody: what they do is seen in tests of whole runs, of sampling, or on several ranks.
OF_RUNS = ("tests/trainer/", "tests/reference/", "tests/distributed/", "tests/config/")
NOT_HANDED_OVER = {
    "data.train": "the path of a set; every run here has one",
    "data.eval": "the same",
    "data.train.NAME.path": "the same",
    "data.train.NAME.system_prompt": "needs a chat template: tests/data/test_prompt_format.py",
    "data.eval.NAME.system_prompt": "the same",
    "data.eval.NAME.environment": "tests/trainer/test_episode_runs.py",
    "rollout.engine": "tests/reference runs on the plain engine, the others on the local one",
    "rollout.tensor_parallel": "more than one needs as many ranks: tests/vllm_engine",
    "eval.every_steps": "tests/trainer/test_run.py",
    "checkpoint.every_steps": "tests/trainer/test_run.py",
    "checkpoint.resumable": "tests/trainer/test_run.py",
    "checkpoint.format": "of sharded runs: tests/distributed",
    "records.every_steps": "tests/trainer/test_rollout_records.py",
    "cluster.timeout_s": "tests/distributed",
    "cluster.gpus": "tests/distributed",
    "cluster.ranks_per_gpu": "tests/distributed",
}


class End(Exception):
    """The run need not go on."""


@pytest.mark.parametrize("name", SCENES)
def test_a_key_arrives_where_it_counts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scene, calls = SCENES[name], dict[str, list[dict[str, Any]]]()

    def watch(call: str) -> None:
        module, _, attribute = call.partition(":")
        called = getattr(import_module(module), attribute)
        signature, calls[call] = inspect.signature(called), []

        def watched_call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            calls[call].append(bound.arguments)
            if call == scene.ends_with:
                raise End
            return called(*args, **kwargs)

        monkeypatch.setattr(f"{module}.{attribute}", watched_call)

    for call in {arrival.call for arrival in scene.arrivals}:
        watch(call)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"{ASSEMBLE}.require_vllm", lambda: None)
    monkeypatch.setattr(f"{ASSEMBLE}.choose_device", lambda _name: "cpu")
    monkeypatch.setattr("dapo.trainer.track.refuse_missing", lambda _names: None)
    (tmp_path / "problems.jsonl").write_text('{"question": "w10 w11", "q": "w12 w13", "answer": "1"}\n')
    typed = {arrival.key: f"{arrival.key}={arrival.value}" for arrival in scene.arrivals if arrival.value}
    keys = [key.replace("FOLDER", str(tmp_path)) for key in (*scene.keys, *typed.values())]
    toy.recipe_file(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    resolved = toy.recipe(tmp_path, *keys)
    try:
        run = start_run(resolved, tmp_path / "run")
    except End:
        pass
    else:
        try:
            if scene.is_trained:
                with watched(resolved.config, run.folder):
                    train(run)
        finally:
            run.close()
    for arrival in scene.arrivals:
        expected = value_of(resolved.config, arrival.key) if arrival.expected is None else arrival.expected
        found = [arrival.of(bound[arrival.argument]) for bound in calls[arrival.call]]
        assert expected in found, f"{arrival.key} is not {arrival.argument} of {arrival.call}: {found}"


def value_of(config: Any, key: str) -> object:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def test_values_are_nobodys_default():
    """Else a key that is ignored would not be noticed."""
    for scene in SCENES.values():
        for arrival in scene.arrivals:
            module, _, attribute = arrival.call.partition(":")
            default = inspect.signature(getattr(import_module(module), attribute)).parameters[arrival.argument].default
            assert arrival.expected is None or arrival.expected != default, arrival.key


def test_every_key_beside_a_steps_mathematics_is_followed():
    followed = {arrival.key for scene in SCENES.values() for arrival in scene.arrivals} | NOT_HANDED_OVER.keys()
    seen = {key for key, where in ELSEWHERE.items() if where.startswith(OF_RUNS)}
    assert not (ELSEWHERE.keys() | NOT_IN_A_STEP.keys()) - followed - seen
