"""Recipes, presets and overrides resolve to one config; bad input is refused with key, value, reason and remedy."""

import json
import tomllib
from pathlib import Path

import pytest

from dapo.config import load_recipe, to_toml
from dapo.config.keys import known_keys
from dapo.config.load import RECIPES, find_recipe, flatten, preset_names, read_preset, recipe_names, resolve
from dapo.config.schema import PRESET_KEYS
from dapo.errors import ConfigError


def refused(recipe: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    return str(caught.value)


def write(folder: Path, text: str) -> str:
    path = folder / "mine.toml"
    path.write_text(text)
    return str(path)


# ---------------------------------------------------------------- what ships


def test_the_presets_and_recipes_that_the_readme_promises_are_there():
    assert preset_names() == [
        "cispo", "dapo", "dapo-fast", "distillation", "dr-grpo", "grpo", "grpo-naive", "gspo", "ppo", "reinforce++",
        "rft", "rloo", "scalerl", "vanilla-ppo", "vapo",
    ]  # fmt: skip
    assert recipe_names() == [
        "arithmetic-gym",
        "arithmetic-smollm2-135m",
        "countdown-coder-0.5b-h200",
        "countdown-coder-1.5b-h200",
        "dapo-math-7b-8x80gb",
        "dapo-qwen2.5-32b",
        "gsm8k-0.5b-lora-8gb",
        "gsm8k-1.5b-24gb",
        "gsm8k-1.5b-qlora-8gb",
        "gsm8k-coder-0.5b-distill-h200",
        "gsm8k-coder-0.5b-ladder",
        "gsm8k-coder-1.5b-h200",
        "gsm8k-coder-1.5b-python-h200",
        "ladder",
        "math-1.5b-80gb",
        "math-7b-qlora-24gb",
        "quickstart",
    ]


@pytest.mark.parametrize("preset", preset_names())
def test_a_preset_fits_a_screen_and_holds_algorithm_keys_only(preset: str):
    assert all(key.startswith(PRESET_KEYS) for key in flatten(read_preset(preset)))
    text = (find_recipe("quickstart").parents[1] / "presets" / f"{preset}.toml").read_text()
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe_resolves_with_every_preset_and_says_whether_it_was_run(recipe: str):
    for preset in preset_names():
        assert load_recipe(recipe, [f"preset={preset}"]).config.preset == preset
    assert "# Status: " in find_recipe(recipe).read_text()


def test_the_recipes_of_the_bundled_model_differ_in_their_problems_and_steps_alone():
    bundled, gym = (flatten(load_recipe(name).config.model_dump()) for name in ("quickstart", "arithmetic-gym"))
    differing = {key for key in bundled if bundled[key] != gym[key]}
    assert differing == {"data.train", "data.eval", "rewards.verifier", "train.steps"}


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_resolved_config_written_and_read_back_is_the_same(recipe: str):
    config = load_recipe(recipe).config
    assert resolve(recipe, flatten(tomllib.loads(to_toml(config))), {}).config == config


def test_every_key_has_a_sentence():
    silent = [key for key, field in known_keys().items() if not (field.description or "").endswith(".")]
    assert not silent


def test_keys_that_other_tools_read_keep_their_names():
    fixed = """sampling.prompts_per_step sampling.responses_per_prompt train.updates_per_step
        train.tokens_per_microbatch limits.max_prompt_tokens limits.max_response_tokens
        shaping.overlong_buffer_tokens train.steps train.lr train.seed
        model.path model.dtype data.train data.eval rewards.verifier checkpoint.every_steps eval.every_steps
        records.every_steps sampling.fill_policy sampling.max_prompts_tried_per_step algorithm.clip.low
        algorithm.clip.high cluster.backend rollout.engine"""
    assert set(fixed.split()) <= known_keys().keys()


def test_dapo_is_the_paper_and_grpo_naive_has_none_of_its_techniques():
    paper = load_recipe("quickstart").config
    assert (paper.algorithm.clip.low, paper.algorithm.clip.high, paper.algorithm.clip.dual) == (0.2, 0.28, None)
    assert (paper.algorithm.loss_aggregation, paper.sampling.dynamic, paper.shaping.overlong_filter) == (
        "token",
        True,
        True,
    )
    assert paper.shaping.overlong_penalty == 1.0
    assert not paper.has_reference
    assert not paper.has_critic
    assert read_preset("dapo")["train"]["warmup_steps"] == 20
    naive = load_recipe("quickstart", ["preset=grpo-naive"]).config
    assert naive.algorithm.clip.low == naive.algorithm.clip.high == 0.2
    assert (naive.algorithm.loss_aggregation, naive.sampling.dynamic, naive.shaping.overlong_filter) == (
        "sequence",
        False,
        False,
    )
    assert naive.shaping.overlong_penalty == 0


def test_the_32b_recipe_is_the_released_script():
    c = load_recipe("dapo-qwen2.5-32b").config
    sizes = (c.sampling.prompts_per_step, c.sampling.responses_per_prompt, c.train.updates_per_step)
    assert sizes == (512, 16, 16)
    assert (c.limits.max_prompt_tokens, c.limits.max_response_tokens) == (2048, 20480)
    assert (c.shaping.overlong_filter, c.shaping.overlong_buffer_tokens) == (False, 4096)
    assert (c.algorithm.clip.low, c.algorithm.clip.high, c.algorithm.clip.dual) == (0.2, 0.28, 10.0)
    assert (c.train.lr, c.train.warmup_steps, c.train.weight_decay, c.train.max_grad_norm) == (1e-6, 10, 0.1, 1.0)
    assert c.sampling.generation_multiple == 3
    assert c.max_prompts_tried_per_step == 10 * 3 * 512
    assert (c.eval.top_p, c.eval.temperature, c.eval.k) == (0.7, 1.0, 32)
    assert (c.rollout.tensor_parallel, c.cluster.gpus) == (4, 16 * 8)


def test_presets_that_do_not_draw_problems_uniformly_are_labelled():
    labels = {name: load_recipe("quickstart", [f"preset={name}"]).config.is_paper_algorithm for name in preset_names()}
    assert [name for name, is_paper in labels.items() if not is_paper] == ["dapo-fast", "scalerl"]


# ---------------------------------------------------------------- layers


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_preset():
    resolved = load_recipe("quickstart", ["train.lr=0.5", "algorithm.clip.high=0.3"])
    assert (resolved.config.train.lr, resolved.origin["train.lr"]) == (0.5, "--set")
    assert (resolved.config.train.warmup_steps, resolved.origin["train.warmup_steps"]) == (3, "recipe")  # preset: 20
    assert (resolved.config.algorithm.clip.low, resolved.origin["algorithm.clip.low"]) == (0.2, "preset")
    assert "train.weight_decay" not in resolved.origin


def test_a_recipe_file_of_ones_own(tmp_path: Path):
    path = write(tmp_path, find_recipe("quickstart").read_text().replace("\nsteps = 40", "\nsteps = 7"))
    assert load_recipe(path).config.train.steps == 7


def test_a_recipe_from_an_editor_that_marks_the_byte_order(tmp_path: Path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xef\xbb\xbf" + find_recipe("quickstart").read_bytes().replace(b"\n", b"\r\n"))
    assert load_recipe(str(path)).config == load_recipe("quickstart").config


def test_an_override_of_several_lines_is_not_read_in_part():
    assert "several lines" in refused("quickstart", "train.steps=1\ntrain.lr=3")


def test_a_seed_fits_the_generators():
    largest = 2**63 - 1
    assert load_recipe("quickstart", [f"train.seed={largest}"]).config.train.seed == largest
    assert f"must be less than {2**63}" in refused("quickstart", f"train.seed={largest + 1}")


def test_infinity_is_no_learning_rate():
    assert "train.lr = inf: must be a finite number." in refused("quickstart", "train.lr=inf")


def test_the_word_none_unsets_an_optional_key():
    assert load_recipe("dapo-qwen2.5-32b", ["algorithm.clip.dual=none"]).config.algorithm.clip.dual is None


def test_a_section_in_one_override():
    clip = load_recipe("quickstart", ["algorithm.clip={low=0.1, high=0.3}"]).config.algorithm.clip
    assert (clip.low, clip.high) == (0.1, 0.3)


def test_a_config_cannot_be_changed_after_loading():
    config = load_recipe("quickstart").config
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


# ---------------------------------------------------------------- bad input


def part(name: str = "format", **keys: object) -> str:
    """A --set with one part of the reward."""
    plain = ("nan", "inf")
    pairs = [f"{key} = {json.dumps(value) if value not in plain else value}" for key, value in keys.items()]
    return f"rewards.parts={{{json.dumps(name)} = {{{', '.join(pairs)}}}}}"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("algorithm.clip.hihg=0.3", ["algorithm.clip.hihg: no such key", "Did you mean algorithm.clip.high?"]),
        ("lr=1e-5", ["lr: no such key", "Did you mean train.lr?"]),
        ("sampling.n=4", ["sampling.n: no such key", "Keys of [sampling]:"]),
        ("train=3", ["train: is a section", "train.steps"]),
        ("train.steps=many", ['train.steps = "many": must be a whole number', "Training steps"]),
        ("train.steps=1.5", ["train.steps = 1.5: must be a whole number"]),
        ("train.steps=true", ["train.steps = true: must be a whole number"]),
        ("train.lr=-1", ["train.lr = -1: must be at least 0"]),
        ("train.lr=nan", ["train.lr = nan"]),
        ("sampling.dynamic=1", ["sampling.dynamic = 1: must be true or false"]),
        (
            "algorithm.loss_aggregation=tokens",
            ['algorithm.loss_aggregation = "tokens": must be one of', "'token'", "'prompt'"],
        ),
        ("algorithm.clip.dual=0.5", ["algorithm.clip.dual = 0.5: must be greater than 1"]),
        (
            "sampling.responses_per_prompt=1",
            ["sampling.responses_per_prompt = 1: a group of one has no baseline", 'algorithm.advantage = "gae"'],
        ),
        ("algorithm.clip.low=1.0", ["algorithm.clip.low = 1.0:", "below 1"]),
        ("algorithm.clip.low=0", ["algorithm.clip.low = 0", "between 0 and 1"]),
        (
            "shaping.overlong_buffer_tokens=64",
            ["shaping.overlong_buffer_tokens = 64: must be smaller than limits.max_response_tokens = 64", "12"],
        ),
        ("shaping.overlong_buffer_tokens=none", ["shaping.overlong_buffer_tokens: missing", "a fifth"]),
        ("sampling.top_p=0.7", ["sampling.top_p = 0.7:", "eval.top_p"]),
        ("sampling.top_k=20", ["sampling.top_k = 20:", "eval.top_k"]),
        ("train.updates_per_step=33", ["train.updates_per_step = 33:", "at most 32"]),
        ("sampling.max_prompts_tried_per_step=31", ["sampling.max_prompts_tried_per_step = 31:", "at least 32"]),
        ("algorithm.advantage=gae", ["sampling.dynamic = true:", "critic"]),
        ("preset=dapoo", ["preset = 'dapoo': no such preset", "Did you mean dapo?"]),
        ("preset=3", ["preset = 3"]),
        ("train.lr", ["--set train.lr: no key and value", "--set section.key=value"]),
        ("=3", ["--set =3: no key and value"]),
        ("sampling.carry_over=true", ["algorithm.correction.cap: missing", "correction.cap = 2.0"]),
        ("data.train={a={weight=0}}", ["data.train.a.weight = 0: must be greater than 0", "share"]),
        ("data.train={a={weight=-1}}", ["data.train.a.weight = -1: must be greater than 0"]),
        ("data.train={a={weight=nan}}", ["data.train.a.weight = nan: must be a finite number"]),
        ("data.train={a={weight=inf}}", ["data.train.a.weight = inf: must be a finite number"]),
        ("data.train={a={weight=true}}", ["data.train.a.weight = true: must be a number"]),
        ("data.train={a={wieght=1}}", ["data.train.a.wieght: no such key", "Did you mean data.train.a.weight?"]),
        ("data.eval={a={weight=1}}", ["data.eval.a.weight: no such key", "data.eval.a.verifier"]),
        ("data.train={}", ["data.train = {}: is empty", "table of sources"]),
        ("data.eval={}", ["data.eval = {}: is empty"]),
        ("data.train=5", ["data.train = 5: must be a string or a table"]),
        ("data.train={a={}, a={}}", ["--set data.train", "there already", "two sources need two names"]),
        ("data.train={a='x.jsonl'}", ["data.train.a = 'x.jsonl': a source is a table", "path"]),
        ("data.train={'a.b'={}}", ["data.train.'a.b': a source's name has letters, digits", "path = "]),
        ("data.train={'a/b'={}}", ["data.train.'a/b'"]),
        ("data.train.a.weight=2", ["data.train.a.weight: data.train = ", "is no table", "Name them all"]),
        ("data.train.a=3", ["data.train.a = 3: a source is a table"]),
        (
            "data.train={a={path='x'}, b={path='x', weight=2}}",
            ["data.train.b.path = x: data.train.a is the same set", "sum of their weights"],
        ),
        (
            "data.train={a={path='x', system_prompt='Be brief.'}}",
            ["data.train.a.system_prompt = Be brief.", "data.chat_template is false", "data.chat_template = true"],
        ),
        ("sampling.retire_above=1.0", ["sampling.retire_above = 1.0: must be less than 1"]),
        (
            "sampling.retire_above=0.95",
            ["sampling.retire_above = 0.95: no problem would ever be retired", "0.92 or less"],
        ),
        ("train.betas=[2.0, 0.9]", ["train.betas = [2.0, 0.9]", "below 1"]),
        ("sampling.max_staleness_updates=4", ["sampling.max_staleness_updates: has no effect here", "carry_over"]),
        ("algorithm.gae.gamma=0.9", ["algorithm.gae.gamma: has no effect here", 'algorithm.advantage = "gae"']),
        ("algorithm.kl.path=bundled", ["algorithm.kl.path: has no effect here", "algorithm.kl.coefficient"]),
        ("algorithm.kl.kind=k1", ["algorithm.kl.kind: has no effect here", "algorithm.kl.coefficient"]),
        ("model.lora.alpha=8", ["model.lora.alpha: has no effect here", "model.lora.rank"]),
        ("model.lora.rank_stabilized=true", ["model.lora.rank_stabilized: has no effect here", "model.lora.rank"]),
        ("model.lora.dropout=0.1", ["model.lora.dropout: has no effect here", "model.lora.rank"]),
        ("model.lora.dropout=1.0", ["model.lora.dropout = 1"]),
        ("model.lora.quantization=int8", ["model.lora.quantization: has no effect here", "model.lora.rank"]),
        ("model.lora.quantization=int4", ["model.lora.quantization", "int8", "nf4"]),
        ("algorithm.loss_constant_tokens=8", ["algorithm.loss_constant_tokens: has no effect"]),
        ("cluster.gpus=8", ["cluster.gpus: has no effect here", "cluster.backend"]),
        ("rollout.tensor_parallel=2", ["rollout.tensor_parallel: has no effect here", "rollout.engine"]),
        (
            "rollout.vllm.gpu_memory_utilization=0.5",
            ["rollout.vllm.gpu_memory_utilization: has no effect here", "rollout.engine"],
        ),
        ("data.eval=[1, 2]", ["data.eval"]),
        ("algorithm.advantage=none", ["algorithm.advantage", "nothing is learned", "positive_nll = 1.0"]),
        ("algorithm.critic.pretrain_steps=50", ["has another name now", "pretrain_responses"]),
        (part(function="a:b", weight=0), ["rewards.parts.format.weight = 0", "change nothing", "remove it"]),
        (part(function="a:b", weight=0.0), ["rewards.parts.format.weight = 0.0"]),
        (part(function="a:b", weight="nan"), ["rewards.parts.format.weight = nan: must be a finite number", "penalty"]),
        (part(function="a:b", weight="inf"), ["rewards.parts.format.weight = inf: must be a finite number"]),
        (part(function="a:b"), ["rewards.parts.format.weight: missing", "Weight in the sum"]),
        (part(funktion="a:b", weight=1), ["rewards.parts.format.funktion: no such key", "weight, function, verifier"]),
        (part(function=3, weight=1), ["rewards.parts.format.function = 3: must be a string"]),
        (part(function="a:b", verifier="exact", weight=1), ["rewards.parts.format.verifier = exact", "one of the two"]),
        (part(weight=1), ["rewards.parts.format: names neither a function nor a verifier", "Add function ="]),
        (part("a/b", function="a:b", weight=1), ["rewards.parts.a/b: 'a/b' is no name for a part", "letters, digits"]),
        (part("a.b", function="a:b", weight=1), ["rewards.parts.a.b: 'a.b' is no name for a part"]),
        (part("correct", function="a:b", weight=1), ["rewards.parts.correct.function = a:b", "rewards.verifier"]),
        ("rewards.parts={format = 0.2}", ["rewards.parts.format = 0.2: must be a table", "format = { function ="]),
        ("rewards.parts=format", ['rewards.parts = "format": must be a table']),
        ("rewards.parts.format.weight=0.2", ["rewards.parts is set as a whole", "--set 'rewards.parts="]),
        ("rewards.aggregation=sum", ['rewards.aggregation = "sum": must be one of', "normalize_then_sum"]),
    ],
)
def test_bad_overrides_name_key_value_reason_and_remedy(override: str, parts: list[str]):
    message = refused("quickstart", override)
    for part in parts:
        assert part in message


def test_importance_correction_on_top_of_bypass_has_nothing_to_correct():
    message = refused("quickstart", "algorithm.old_logp=bypass", "algorithm.correction.cap=2.0")
    assert "is 1 for every token" in message


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantized_base_is_refused_where_it_saves_nothing_or_would_be_divided(kind: str):
    quantized = ["model.lora.rank=8", f"model.lora.quantization={kind}"]
    assert load_recipe("quickstart", quantized).config.base_quantization == kind
    message = refused("quickstart", *quantized, "rollout.engine=vllm")
    assert f"model.lora.quantization = {kind}: rollout.engine = vllm keeps" in message
    assert 'Set rollout.engine = "local"' in message
    ranks = [*quantized, "cluster.backend=torchrun"]
    assert 'Set cluster.shard = "none"' in refused("quickstart", *ranks, "cluster.shard=full")
    load_recipe("quickstart", [*ranks, "cluster.shard=none"])


def test_equal_log_probs_are_refused_where_products_are_others():
    exact = "rollout.exact=true"
    load_recipe("quickstart", [exact])
    for other, why in (
        ("rollout.engine=vllm", "rollout.engine = vllm has kernels of its own"),
        ("rollout.engine=plain", "rollout.engine = plain has kernels of its own"),
        ("model.lora.rank=8", "model.lora.rank = 8: an adapter's products"),
    ):
        message = refused("quickstart", exact, other)
        assert f"rollout.exact = true: {why}" in message
        assert "or rollout.exact = false" in message
    ranks = [exact, "cluster.backend=torchrun"]
    assert 'Set cluster.shard = "none"' in refused("quickstart", *ranks, "cluster.shard=full")
    load_recipe("quickstart", [*ranks, "cluster.shard=none"])


def test_stale_tokens_need_a_bound_and_dynamic_sampling():
    carry = ["sampling.carry_over=true", "algorithm.correction.cap=2.0"]
    assert "sampling.max_staleness_updates: missing" in refused("quickstart", *carry)
    assert "sampling.partial_rollouts = true" in refused("quickstart", "preset=ppo", "sampling.partial_rollouts=true")
    assert "sampling.carry_over = true" in refused("quickstart", "preset=dapo-fast", "sampling.dynamic=false")


def test_rounds_have_no_effect_where_groups_are_carried_over():
    rounds = "sampling.schedule=rounds"
    load_recipe("quickstart", [rounds])
    load_recipe("quickstart", ["preset=dapo-fast", "sampling.schedule=stream"])  # what happens anyway
    for off in ("sampling.carry_over", "sampling.partial_rollouts"):  # either of the two suffices
        message = refused("quickstart", "preset=dapo-fast", f"{off}=false", rounds)
        assert "sampling.schedule: has no effect here" in message
        assert "sampling.carry_over = false and sampling.partial_rollouts = false" in message
    neither = ["sampling.carry_over=false", "sampling.partial_rollouts=false"]
    load_recipe("quickstart", ["preset=dapo-fast", *neither, rounds])


def test_lambda_acts_on_the_policy_or_on_the_critics_targets():
    lam = "algorithm.gae.lam=0.9"
    assert "algorithm.gae.lam: has no effect here" in refused("quickstart", "preset=vapo", lam)
    for free in (
        "length_adaptive_alpha",
        "lam_critic",
    ):  # then it is λ of the policy; of the targets
        config = load_recipe("quickstart", ["preset=vapo", f"algorithm.gae.{free}=none", lam]).config
        assert config.algorithm.gae.lam == 0.9


@pytest.mark.parametrize(("steps", "warmup"), [(10, 500), (10, 10), (1, 0)])
def test_a_decay_has_no_effect_where_warm_up_lasts_to_the_end(steps: int, warmup: int):
    short = [f"train.steps={steps}", f"train.warmup_steps={warmup}"]
    message = refused("quickstart", *short, "train.lr_decay=linear")
    assert "train.lr_decay: has no effect here" in message
    assert "train.warmup_steps" in message
    load_recipe("quickstart", [*short, "train.lr_decay=none"])  # what happens anyway
    load_recipe("quickstart", ["train.steps=2", "train.warmup_steps=0", "train.lr_decay=linear"])
    decaying = load_recipe("gsm8k-coder-1.5b-h200", short)  # of a recipe it is listed
    assert "train.lr_decay" in decaying.unused


def test_a_preset_where_a_recipe_is_wanted_names_the_recipe_for_this_machine():
    message = refused("grpo")
    assert "is a preset" in message
    assert "--set preset=grpo" in message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[train\nlr = 1", ["mine.toml: not valid TOML", "line 1"]),
        ("[train]\nlearning_rate = 1e-6", ["train.learning_rate: no such key (in mine.toml)"]),
        ("[train]\nlr = 1e-6", ["missing"]),
        ("preset = 3", ["preset = 3 in mine.toml: must be a name"]),
    ],
)
def test_bad_files(tmp_path: Path, text: str, parts: list[str]):
    message = refused(write(tmp_path, text))
    for part in parts:
        assert part in message


def test_missing_and_unreadable_files(tmp_path: Path):
    assert "no such file" in refused("nowhere/quickstrat.toml")
    assert "Did you mean quickstart?" in refused("nowhere/quickstrat.toml")
    assert "no such recipe" in refused("quickstar")
    assert "no such recipe" in refused("a" * 300)  # longer than a file's name may be
    assert "no such file" in refused("/" + "a" * 300)
    assert "is a folder" in refused(f"{tmp_path}/")
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    assert "not UTF-8" in refused(str(tmp_path / "latin.toml"))


def test_a_key_of_a_recipe_in_a_section_switched_off_is_listed_and_not_refused():
    resolved = load_recipe("quickstart", ["preset=grpo-naive"])
    assert resolved.unused == {"shaping.overlong_buffer_tokens": "shaping.overlong_penalty above 0"}


@pytest.mark.parametrize(
    ("name", "preset"),
    [("quickstart", preset) for preset in preset_names()] + [(name, "vapo") for name in recipe_names()],
)
def test_a_resolved_config_is_a_recipe(name: str, preset: str, tmp_path: Path):
    config = load_recipe(name, [f"preset={preset}"]).config
    (tmp_path / "config.toml").write_text(to_toml(config))
    assert load_recipe(str(tmp_path / "config.toml")).config == config


# ---------------------------------------------------------------- tables of sources


def test_a_name_twice_in_a_file_is_said_with_its_line(tmp_path: Path):
    recipe = tmp_path / "twice.toml"
    recipe.write_text('preset = "dapo"\n[data.train]\ngsm8k = {}\ngsm8k = {weight = 2}\n')
    with pytest.raises(ConfigError, match=r"'gsm8k = {weight = 2}' names what is there already.*line 4") as error:
        load_recipe(str(recipe))
    assert "two sources need two names" in error.value.remedy


def test_sources_are_set_like_other_keys_and_a_table_replaces_them_all(tmp_path: Path):
    recipe = tmp_path / "mixture.toml"
    base = (RECIPES / "quickstart.toml").read_text()
    recipe.write_text(
        base.replace('train = "dapo.quickstart.task:train_problems"', "") + "\n[data.train]\na = {}\nb = {}\n"
    )
    sets = ("data.train.a.weight=2", "data.train.c.path=c.jsonl", "data.train.b={verifier='exact'}")
    resolved = load_recipe(str(recipe), sets)
    train = resolved.config.data.train
    assert isinstance(train, dict)
    assert [(name, one.path or name, one.weight, one.verifier) for name, one in train.items()] == [
        ("a", "a", 2.0, None), ("b", "b", 1.0, "exact"), ("c", "c.jsonl", 1.0, None)
    ]  # fmt: skip
    assert resolved.origin["data.train.a.path"] == "recipe"
    assert resolved.origin["data.train.a.weight"] == "--set"
    assert resolve("mixture", flatten(tomllib.loads(to_toml(resolved.config))), {}).config == resolved.config
    only = load_recipe(str(recipe), ["data.train={d={}}"])
    assert list(only.config.data.train) == ["d"]
    assert not any(key.startswith("data.train.a") for key in only.origin)
    assert load_recipe(str(recipe), ["data.train=e.jsonl"]).config.data.train == "e.jsonl"
    assert list(load_recipe("quickstart", ["data.eval={a={path='x', verifier='exact'}}"]).config.data.eval) == ["a"]


def test_the_same_set_with_another_verifier_is_another_source():
    table = "data.train={a={path='x'}, b={path='x', verifier='exact'}, c={path='x', template='dapo'}}"
    assert len(load_recipe("quickstart", [table]).config.data.train) == 3


# ---------------------------------------------------------------- a teacher


@pytest.mark.parametrize(
    ("override", "said", "remedy"),
    [
        ("algorithm.kl.kind=k3", "algorithm.kl.kind = k3: .* reverse KL for k1 alone", "k1"),
        ("algorithm.loss=gspo", "algorithm.loss = gspo: it has one ratio for a response", "gspo-token"),
        ("algorithm.kl.coefficient=0.0", "algorithm.advantage = none: .* nothing is learned", "distillation"),
    ],
)
def test_what_distillation_cannot_be_combined_with(override: str, said: str, remedy: str):
    with pytest.raises(ConfigError, match=said) as error:
        load_recipe("quickstart", ["preset=distillation", override])
    assert remedy in error.value.remedy


def test_parts_may_come_from_an_environments_score_whatever_the_verifier():
    parts = "rewards.parts={chatty = {weight = 0.25}}"
    with pytest.raises(ConfigError, match=r"rewards\.parts\.chatty"):
        load_recipe("quickstart", [parts])
    assert load_recipe("quickstart", [parts, "data.environment=calculator"]).config.rewards.verifier == "math"
