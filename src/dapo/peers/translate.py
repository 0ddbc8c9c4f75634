"""From another framework's file to a recipe that our schema accepts, with what was lost or means something else."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from dapo.config.keys import known_keys
from dapo.config.load import Resolved, flatten, read_preset, resolve
from dapo.errors import ConfigError
from dapo.peers.openrlhf import from_openrlhf
from dapo.peers.settings import Remark, Setting, Settings, Translation
from dapo.peers.shell import NoScriptError
from dapo.peers.sources import RLOO, calls_in, flags_in, overrides_in, read_text, tree_in
from dapo.peers.trl import from_trl
from dapo.peers.verl import from_verl

PEERS = ("verl", "trl", "openrlhf")
_OPENRLHF_FLAGS = {"n_samples_per_prompt", "rollout_batch_size", "rollout.batch_size", "advantage_estimator"}
_TRL_KEYS = {
    "num_generations",
    "per_device_train_batch_size",
    "max_completion_length",
    "model_name_or_path",
    "loss_type",
}
_VERL_ROOTS = {"actor_rollout_ref", "algorithm", "trainer", "data", "critic", "reward_model"}


def translate(path: Path, *, peer: str | None = None, gpus: int | None = None, rows: int | None = None) -> Translation:
    """The translation of a file; `peer` is detected unless it is given, and only TRL needs `gpus` (1)."""
    kind, settings = read_settings(path, peer)
    if gpus is not None and kind != "trl":
        raise ConfigError(
            f"--gpus {gpus}: {path} is a config of {kind}, which says the number of GPUs itself.",
            remedy="Leave --gpus out; set cluster.gpus in the recipe for another number.",
        )
    match kind:
        case "verl":
            out = from_verl(Settings(str(path), "verl", settings), rows=rows)
        case "trl":
            out = from_trl(Settings(str(path), "TRL", settings), gpus=gpus or 1, rows=rows)
        case _:
            out = from_openrlhf(Settings(str(path), "OpenRLHF", settings), rows=rows)
    out.put("preset", preset_for(out.keys), "the nearest preset")
    drop_unused(out)
    return out


def read_settings(path: Path, peer: str | None) -> tuple[str, list[Setting]]:
    """(peer, its settings) of a file."""
    text = read_text(path)
    try:
        return parsed(path, text, peer)
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; this is not a config.") from None


def parsed(path: Path, text: str, peer: str | None) -> tuple[str, list[Setting]]:
    if path.suffix == ".py":
        if peer not in (None, "trl"):
            raise ConfigError(
                f"--peer {peer}: {path} is a Python file, and those are read for TRL's GRPOConfig and RLOOConfig only.",
                remedy="Leave --peer out, or name the script or YAML file that holds the settings.",
            )
        return "trl", calls_in(text, path)
    if path.suffix in (".yaml", ".yml", ".json"):
        settings = tree_in(text, path)
        roots = {setting.key.partition(".")[0] for setting in settings}
        found = "trl" if _TRL_KEYS & roots else "verl" if _VERL_ROOTS & roots else None
        return named(path, peer or found), settings
    try:
        overrides, flags = overrides_in(text), flags_in(text)
    except NoScriptError as error:
        raise ConfigError(f"{path}, {error}", remedy="Name the script that starts the training.") from None
    names = {setting.key for setting in flags}
    if peer is None:
        if _OPENRLHF_FLAGS & names or re.search(r"openrlhf", text):
            peer = "openrlhf"
        elif {setting.key.partition(".")[0] for setting in overrides} & _VERL_ROOTS:
            peer = "verl"
        elif _TRL_KEYS & names:
            peer = "trl"
    if peer == "trl" and (asked := re.search(r"\btrl\s+rloo\b|\brloo\.py\b", text)):
        flags = [Setting(RLOO, True, text.count("\n", 0, asked.start()) + 1), *flags]
    return named(path, peer), overrides if peer == "verl" else flags


def named(path: Path, peer: str | None) -> str:
    if peer is None:
        raise ConfigError(
            f"{path}, line 1: neither a verl script or YAML, nor TRL's GRPOConfig or RLOOConfig, nor an OpenRLHF "
            "command line.",
            remedy=f"Name the file that holds the settings, or say what it is: --peer {'|'.join(PEERS)}.",
        )
    return peer


def preset_for(keys: Mapping[str, Any]) -> str:
    """The preset nearest to these keys: all of them are written out, so only its name depends on it."""
    if keys["algorithm.advantage"] == "gae":
        return "ppo"
    if keys["algorithm.loss"] in ("cispo", "gspo"):
        return str(keys["algorithm.loss"])
    if keys["algorithm.loss"] == "reinforce" and keys.get("algorithm.group.baseline") == "leave_one_out":
        return "rloo"
    if keys.get("algorithm.group.baseline") == "batch":
        return "reinforce++"
    if keys["sampling.dynamic"]:
        return "dapo"
    if keys["algorithm.kl.coefficient"] > 0:
        return "grpo"
    return "dr-grpo" if keys["algorithm.group.std"] == "none" else "grpo-naive"


def drop_unused(out: Translation) -> None:
    """Keys that need another one to be on would be refused in a recipe."""
    if not out.keys.get("eval.every_steps") or not out.keys.get("data.eval"):
        for key in [key for key in out.keys if key.startswith("eval.")]:
            del out.keys[key]


def check(out: Translation, name: str) -> Resolved:
    """The recipe as our loader sees it; raises what it would raise."""
    preset = flatten(read_preset(out.keys["preset"]))
    origin = dict.fromkeys(preset, "preset") | dict.fromkeys(out.keys, "recipe")
    return resolve(name, preset | out.keys, origin)


def recipe_text(out: Translation, source: str) -> str:
    """The recipe as TOML, every key with where it comes from, and what is said of the rest as comments at its head."""
    head = f"From {source} ({out.peer}), by `dapo import-config`. Read the remarks, then: dapo explain THIS_FILE"
    lines = [f"# {comment(head)}"]
    for title, found in out.lists():
        lines += remarks(title, found)
    lines += ["", f'preset = "{out.keys["preset"]}"']
    section = ""
    for key in known_keys():
        if key not in out.keys or key == "preset":
            continue
        home, _, name = key.rpartition(".")
        if home != section:
            section = home
            lines += ["", f"[{section}]"]
        assignment = f"{name} = {as_toml(out.keys[key])}"
        lines.append(f"{assignment:<40}  # {comment(out.origin.get(key, ''))}")
    return "\n".join(lines) + "\n"


def remarks(title: str, found: list[Remark]) -> list[str]:
    return ["#", f"# {title}:", *(f"#   {comment(remark.setting)}: {comment(remark.why)}" for remark in found)]


def comment(text: str) -> str:
    """One line of printable text: what the other file says may not end a comment."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def as_toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(inner) for inner in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {as_toml(inner)}" for key, inner in value.items()) + " }"
    return tomli_w.dumps({"value": value}).partition(" = ")[2].strip()
