"""The host's rows: what a tick drew is written late, once, and where it belongs."""

import numpy as np
import pytest

from dapo.rollout.local.rows import HostRows

N_NEW, TOKEN = np.array([2, 1], np.int32), np.array([[5, 6], [7, 0]], np.int32)


@pytest.fixture
def rows() -> HostRows:
    """Two rows of one token, and two ticks."""
    rows = HostRows(2, 8, 1, np.float32)
    for version in (3, 4):
        rows.append(2, N_NEW, TOKEN, TOKEN.astype(np.float32), version)
    return rows


def test_what_was_drawn_is_written_before_the_next_and_when_it_is_read(rows: HostRows):
    assert not rows._tokens[:, 3:].any(), "the second tick's were written before anybody asked"
    assert rows.newest.tolist() == [7, 6]
    assert rows.tokens.tolist() == [[0, 5, 7, 5, 7, 0, 0, 0], [0, 6, 6, 0, 0, 0, 0, 0]]
    assert rows._version.tolist() == [[0, 3, 3, 4, 4, 0, 0, 0], [0, 3, 4, 0, 0, 0, 0, 0]]


def test_a_row_that_was_written_is_not_written_again(rows: HostRows):
    rows.settle([0])
    rows._tokens[0] = 9
    rows.settle()
    assert (rows._tokens[0] == 9).all(), "the row is another's by now"
    assert rows._tokens[1].tolist() == [0, 6, 6, 0, 0, 0, 0, 0]


def test_a_renewed_row_knows_its_newest_token_whatever_interrupted_the_tick(rows: HostRows):
    rows.newest[:] = 1
    rows.renew([0, 1])
    assert rows.newest.tolist() == [7, 6]
