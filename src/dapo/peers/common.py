"""What the three translations share: known models and files, steps from epochs, batches that must divide."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from dapo.peers.settings import Setting, Settings, Translation, Value, Weight

# Rows of the published training files, to count steps from epochs; the first holds its 17,917 rows 100 times.
KNOWN_ROWS = {"dapo-math-17k": 1_791_700, "gsm8k": 7_473}
KNOWN_SETS = {"dapo-math-17k": "dapo-math-17k", "aime-2024": "aime24", "aime24": "aime24", "gsm8k": "gsm8k"}
COPIES = {"aime24": 32}  # the published evaluation file repeats each problem so often; we use one copy
OWNERS = {"Qwen": "Qwen", "Llama-": "meta-llama", "SmolLM": "HuggingFaceTB", "Mistral-": "mistralai"}
FALLBACK_STEPS = 100
GUESS = "a guess"


def take_model(out: Translation, found: Value) -> None:
    """A folder or hub name. A folder that lies under a variable of the other machine is taken for the hub model."""
    if found.value is None:
        out.put("model.path", "MODEL", "not in the file")
        out.means_other("model", "the file names none: set model.path to a folder or a hub name.")
        return
    path = str(found.value)
    name = PurePosixPath(path).name
    owner = next((owner for prefix, owner in OWNERS.items() if name.startswith(prefix)), None)
    if "$" in path and owner is not None:
        out.take("model.path", found, f"{owner}/{name}")
        out.means_other(found.origin, f"the folder is not known here: taken for the hub model {owner}/{name}.")
    else:
        out.take("model.path", found)


def take_data(
    out: Translation, key: str, found: Value, paths: list[str], weights: list[float] | None = None
) -> list[str]:
    """Problem sets by path, mixed by `weights` where they are given; a published file is recognised by its name."""
    names = [set_name(path) for path in paths]
    for path, name in zip(paths, names, strict=True):
        if name != path:
            out.means_other(found.origin, f"taken for the known set {name}; its repeated rows are used once.")
        elif "$" in path:
            out.means_other(found.origin, f"the variable in the path is not set in the file: fix {key}.")
    if key == "data.train" and len(names) > 1:
        is_weighted = weights is not None and len(weights) == len(names) and min(weights) > 0
        out.take(key, found, sources_of(names, weights if is_weighted and weights else [1.0] * len(names)))
        if not is_weighted:
            out.means_other(found.origin, "all rows are mixed there; here each source has a weight: 1 is taken.")
    elif key == "data.train" and names:
        out.take(key, found, names[0])
    elif names:
        out.take(key, found, names)
    return names


def sources_of(paths: list[str], weights: list[float]) -> dict[str, dict[str, str | float]]:
    """A table for data.train: each file once, under a name made of its own."""
    table: dict[str, dict[str, str | float]] = {}
    for path, weight in dict(zip(paths, weights, strict=True)).items():
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", PurePosixPath(path).stem).strip("-")[:50] or "source"
        if name in table:
            name = f"{name}-{len(table) + 1}"
        table[name] = {"path": path, "weight": weight}
    return table


def set_name(path: str) -> str:
    stem = PurePosixPath(path).name.lower().replace("_", "-")
    if path.rstrip("/").endswith(("gsm8k/train.parquet", "gsm8k/test.parquet")):
        return "gsm8k"
    return next((name for piece, name in KNOWN_SETS.items() if re.search(rf"{piece}(\.parquet|$)", stem)), path)


def take_decay(out: Translation, schedule: Value) -> None:
    """Another framework's learning-rate schedule: its shape after warm-up."""
    name = str(schedule.value).removeprefix("SchedulerType.").lower()  # the enum of transformers, or its value
    shape = next((shape for shape in ("linear", "cosine") if name.startswith(shape)), None)
    out.take("train.lr_decay", schedule, shape or "none")
    if shape and name != shape:
        out.means_other(schedule.origin, f"{name}: train.lr_decay = {shape} falls towards 0 once, at train.steps.")
    elif not shape and not name.startswith("constant"):
        out.has_none(schedule.origin, f"{name}: train.lr_decay is none, linear or cosine; none is taken.")


def steps_of(
    out: Translation, epochs: Value, *, prompts: int, rows: int | None, train_set: str, limit: int | None = None
) -> None:
    """Steps from passes over the data: one prompt is one row."""
    n_rows = rows or KNOWN_ROWS.get(train_set)
    if n_rows is None:
        out.put("train.steps", FALLBACK_STEPS, GUESS)
        out.means_other(
            epochs.origin,
            f"we count steps, not passes over the data: {FALLBACK_STEPS} is a guess. Give --rows N (rows of the "
            "training file) to have it counted, or set train.steps.",
        )
        return
    n_rows = n_rows if limit is None else min(n_rows, limit)
    steps = max(1, int(epochs.value * (n_rows // prompts)))  # none of them trains on what is left of a pass
    out.put("train.steps", steps, f"{epochs.origin} over {n_rows:,} rows, {prompts:,} prompts at a time")
    if not epochs.is_given:  # said beside train.steps
        return
    out.means_other(
        epochs.origin,
        f"{steps:,} steps, as if a step took one generation batch; our steps train on a full batch each, however many "
        "prompts dynamic sampling tries.",
    )


def divided(settings: Settings, whole: int, part: int, setting: Setting | None, what: str) -> int:
    """whole / part, which must come out even."""
    if part < 1 or whole % part:
        culprit = setting or Setting(what, part, 1)
        raise settings.refuse(culprit, f"{whole} cannot be divided by it evenly ({what}).", "Fix one of the two.")
    return whole // part


def whole_distribution(out: Translation, top_p: Value, top_k: Value) -> None:
    """Training on a truncated distribution is refused here."""
    if top_p.value not in (None, 1.0):
        out.has_none(top_p.origin, "training samples from the whole distribution: truncation makes the ratio wrong.")
    if top_k.value not in (None, -1, 0):
        out.has_none(top_k.origin, "training samples from the whole distribution: truncation makes the ratio wrong.")


def without_top_k(found: Value) -> Value:
    """-1 and 0 both say "all tokens"; ours is 0."""
    return Value(0, found.origin, found.is_given) if found.value is not None and found.value < 0 else found


def take_rest(
    settings: Settings, out: Translation, reasons: dict[str, str], *, task: tuple[str, ...], training: tuple[str, ...]
) -> None:
    """Settings that no rule has read: known, with the reason why they are not needed, or not known.

    `task` and `training` are the keys of these reasons that change the experiment; a key that is not known may too.
    """
    for setting in settings.rest():
        prefix = next((prefix for prefix in reasons if matches(setting.key, prefix)), None)
        if prefix is None:
            out.has_none(setting, "not known to this importer.")
        else:
            weight = Weight.TASK if prefix in task else Weight.TRAINING if prefix in training else Weight.MINOR
            out.has_none(setting, reasons[prefix], weight)


def matches(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.") or (prefix.endswith("*") and key.startswith(prefix[:-1]))


def take_correction(out: Translation, origin: Value, *, cap: float, floor: float | None, kind: str, level: str) -> None:
    """Importance weights with their bounds; what is our default stays out."""
    out.put("algorithm.correction.cap", cap, origin.origin)
    for key, value, default in (("floor", floor, None), ("kind", kind, "truncate"), ("level", level, "token")):
        if value != default:
            out.put(f"algorithm.correction.{key}", value, origin.origin)
