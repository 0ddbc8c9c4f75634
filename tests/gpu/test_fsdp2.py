"""FSDP2 on one GPU: an update of a 1.5 B model costs at most 3 % more than on the plain path."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dapo.cli.bench import command

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_one_rank_costs_at_most_3_percent():
    arguments = ["train", "--shape", "1.5b", "--loads", "lognormal:64:8192", "--sides", "dapo,dapo-fsdp2", "--json"]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    (load,) = json.loads(result.output)["loads"]
    assert load["sides"]["dapo-fsdp2"]["time_over_dapo"] <= 1.03
