"""The closed form that a critic's head begins with."""

import torch

from dapo.algorithms.regression import RidgeSums, ridge, solve


def sums_of(x: torch.Tensor, y: torch.Tensor, fold: torch.Tensor, n_parts: int = 1) -> RidgeSums:
    sums = RidgeSums.empty(4, x.shape[1])
    for part in torch.arange(len(y)).chunk(n_parts):
        sums.add(x[part], y[part], fold[part])
    return sums


def drawn(n: int, n_features: int, noise: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, n_features, generator=draw, dtype=torch.float64)
    x[:, -1] = 1.0
    w = torch.randn(n_features, generator=draw, dtype=torch.float64)
    y = x @ w + noise * torch.randn(n, generator=draw, dtype=torch.float64)
    return x, y, w, torch.arange(n) % 4


def test_without_noise_the_weights_are_found():
    x, y, w, fold = drawn(200, 6, noise=0.0)
    torch.testing.assert_close(ridge(sums_of(x, y, fold)), w, rtol=1e-4, atol=1e-4)


def test_the_solution_has_no_gradient_left_and_the_constant_is_not_shrunk():
    """∇(‖y − Xw‖² + s‖w‖²) = 0, with no penalty on the last weight."""
    x, y, _, _ = drawn(50, 4, noise=1.0)
    w = solve(x.T @ x, x.T @ y, 7.0)
    free = torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(x.T @ (y - x @ w), 7.0 * free * w)


def test_with_more_features_than_is_known_the_penalty_is_large_and_foretells_better():
    x, y, w, fold = drawn(60, 50, noise=8.0)
    found = ridge(sums_of(x, y, fold))
    least_squares = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
    assert ((found - w) ** 2).sum() < ((least_squares - w) ** 2).sum() / 2
    assert found[:-1].norm() < least_squares[:-1].norm()


def test_parts_add_up():
    x, y, _, fold = drawn(40, 5, noise=1.0)
    torch.testing.assert_close(ridge(sums_of(x, y, fold, 7)), ridge(sums_of(x, y, fold)))


def test_outcomes_that_are_all_equal_are_their_mean():
    x, _, _, fold = drawn(40, 5, noise=1.0)
    found = ridge(sums_of(x, torch.full((40,), -1.0), fold))
    assert found.tolist() == [0, 0, 0, 0, -1]  # not nearly 0: an optimizer would follow the sign of what is left


def test_features_that_foretell_nothing_get_no_weight():
    x, y, _, fold = drawn(40, 20, noise=0.0)
    found = ridge(sums_of(x, y[torch.randperm(40, generator=torch.Generator().manual_seed(1))], fold))
    assert found[:-1].abs().max() == 0
    assert abs(float(found[-1] - y.mean())) < 1e-12
    assert ridge(RidgeSums.empty(4, 3)).tolist() == [0, 0, 0]
