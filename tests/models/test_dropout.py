"""Dropout of an adapter: the share, the scale, and what a mask depends on."""

import pytest
import torch
from torch.testing import assert_close

from dapo.models.dropout import AdapterDropout, Draw, dropping, is_kept
from dapo.models.policy import add_lora
from tiny_models import tiny_policy

IDS, POSITIONS = torch.arange(500) % 7, torch.arange(500)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_is_dropped_of_every_token_and_of_every_feature(p: float):
    kept = is_kept(p, (0, 3, "q_proj"), IDS, POSITIONS, 400).double()
    n = kept.numel()
    assert abs(kept.mean() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5  # five standard errors of a mean
    for axis, over in ((0, 500), (1, 400)):
        spread = kept.mean(axis).std() / (p * (1 - p) / over) ** 0.5  # independent draws: 1
        assert 0.8 < spread < 1.2


def test_a_mask_depends_on_update_layer_token_and_position_and_on_nothing_else():
    def mask(seed: int = 0, update: int = 1, layer: str = "q", ids: torch.Tensor = IDS, at: torch.Tensor = POSITIONS):
        return is_kept(0.5, (seed, update, layer), ids, at, 64)

    first = mask()
    for other in (mask(seed=1), mask(update=2), mask(layer="k"), mask(ids=IDS + 1), mask(at=POSITIONS + 1)):
        assert 0.45 < (first == other).double().mean() < 0.55
    order = torch.randperm(500)
    assert torch.equal(mask(ids=IDS[order], at=POSITIONS[order]), first[order])


def test_what_is_kept_is_scaled_and_outside_of_an_update_nothing_is_dropped():
    draw = Draw()
    dropout = AdapterDropout(0.25, "q", draw)
    x = torch.rand(500, 64) + 1
    assert dropout(x) is x
    with dropping(draw, seed=0, update=0):
        draw.tokens = IDS, POSITIONS
        got = dropout(x)
        assert torch.equal(got, dropout(x))  # a layer that recomputes
        assert not torch.equal(got, AdapterDropout(0.25, "k", draw)(x))
    kept = got != 0
    assert_close(got[kept], x[kept] / 0.75)
    assert abs(kept.double().mean() - 0.75) < 0.02
    assert draw == Draw()
    draw.tokens = IDS, POSITIONS  # of a pass that samples, or computes π_old
    assert dropout(x) is x


def test_every_layer_of_an_adapter_has_masks_of_its_own():
    policy = add_lora(tiny_policy(), 2, 4.0, dropout=0.25)
    layers = [module for module in policy.modules() if isinstance(module, AdapterDropout)]
    assert len({dropout.layer for dropout in layers}) == len(layers) > 1
    assert all((dropout.p, dropout.draw) == (0.25, policy.draw) for dropout in layers)
