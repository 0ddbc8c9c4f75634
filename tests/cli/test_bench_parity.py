"""`dapo bench parity`: what can be said without TRL. With it: tests/peers."""

import yaml

from command_line import dapo
from dapo.bench.parity.cases import CASES
from dapo.bench.parity.command import SHIPPED
from dapo.bench.parity.replay import Gap
from dapo.peers.translate import check, translate


def test_a_peer_that_is_not_there_is_named():
    answer = dapo("bench", "parity", "--peer-python", "/nowhere/python")
    assert answer.returncode == 2
    assert "--peer-python /nowhere/python: TRL did not run" in answer.stderr
    assert "make test-peers" in answer.stderr


def test_the_shipped_config_is_carried_over_whole():
    found = translate(SHIPPED)
    assert check(found, "shipped").config.sampling.prompts_per_step == 64
    lost = {remark.setting.partition(" ")[0] for remark in found.missing if remark.weight.name != "MINOR"}
    assert not lost


def test_cases_change_keys_of_the_shipped_config_and_their_names_are_unique():
    known = yaml.safe_load(SHIPPED.read_text())
    added = {
        "delta", "use_bias_correction_kl", "adam_beta2", "steps_per_generation", "use_cpu", "entropy_coef",
        "importance_sampling_level",
    }  # fmt: skip
    added |= {"reward_weights", "multi_objective_aggregation"}
    assert {key for case in CASES for key in case.settings} <= known.keys() | added
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_gap_is_judged_by_what_was_told():
    agrees, differs = (next(case for case in CASES if case.differs == kind) for kind in ("", "other"))
    assert Gap(agrees, loss=1e-5, gradient=1e-4, move=1e-3, updates=1, clipped=0.0).is_as_told
    for worse in ({"loss": 2e-5}, {"gradient": 2e-4}, {"move": 2e-3}, {"loss": float("nan")}):
        gap = {"loss": 0.0, "gradient": 0.0, "move": 0.0, "updates": 1, "clipped": 0.0} | worse
        assert not Gap(agrees, **gap).is_as_told
        assert Gap(differs, **gap).is_as_told
