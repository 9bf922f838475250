from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_lms.pipeline.border_traffic import BorderTraffic
from torch_lms.schedules.rules import make_schedule
from torch_lms.schedules.traffic import expected_us


def test_a_rank_stays_near_its_own_device_whichever_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device, done, waited = torch.device("cuda", 1), [], []

    def current_stream(of: Any = None) -> Any:
        done.append(of)
        number = len(done)
        event = SimpleNamespace(synchronize=lambda: waited.append(number))
        return SimpleNamespace(record_event=lambda: event)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    schedule = make_schedule("gpipe", ranks=1, stages=1, microbatches=3)
    boundary: Any = SimpleNamespace(stage=SimpleNamespace(index=0), device=device)
    traffic = BorderTraffic([boundary], schedule, 0, expected_us(), [])
    traffic.start()
    for action in schedule.ranks[0]:
        traffic.before(action)
    assert done == [device] * 6
    assert waited == [1, 2, 3]  # the first is before all actions, each other one behind one of them
