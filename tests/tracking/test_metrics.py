"""The list of metrics: what is declared is also written."""

from pathlib import Path

import dapo
from dapo.sampling.accounting import CAUSES
from dapo.tracking.metrics import METRICS
from dapo.types import Verdict


def test_no_metric_is_declared_that_the_trainer_does_not_write():
    rooms = [Path(dapo.__file__).parent / room for room in ("trainer", "learner")]
    trainer = "".join(path.read_text() for room in rooms for path in room.glob("*.py"))
    composed = {f"verdict/{verdict.value.lower()}" for verdict in Verdict} | {f"tokens/wasted_{c}" for c in CAUSES}
    written = {name for name in METRICS if f'"{name}"' in trainer or f'"{name.replace("NAME", "{name}")}"' in trainer}
    assert [name for name in METRICS if name not in written | composed] == []
