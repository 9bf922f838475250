"""States of tensors in chunks, against a model of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import torch_lms.chunk
from torch_lms.chunk.states import LEGAL, TensorState, TensorStates
from torch_lms.errors import ChunkError

FREE, COMPUTE, HOLD = TensorState.FREE, TensorState.COMPUTE, TensorState.HOLD
AFTER_FWD, AFTER_BWD = TensorState.HOLD_AFTER_FWD, TensorState.HOLD_AFTER_BWD
TENSORS = st.integers(0, 2)


class Tensors(RuleBasedStateMachine):
    """A training's tensors: what is known of each is how often it is being used, and what its bytes are."""

    def __init__(self) -> None:
        super().__init__()
        self.states = TensorStates(["a", "b", "c"])
        self.uses = [0, 0, 0]
        self.idle = [HOLD, HOLD, HOLD]  # the state without uses

    @rule(tensor=TENSORS)
    def access(self, tensor: int) -> None:
        if self.uses[tensor] or self.idle[tensor] in (HOLD, AFTER_FWD):
            self.states.access(tensor)
            self.uses[tensor] += 1
        else:
            with pytest.raises(ChunkError, match=r"expected . to go from"):
                self.states.access(tensor)

    @rule(tensor=TENSORS, after=st.sampled_from([HOLD, AFTER_FWD]))
    def release(self, tensor: int, after: TensorState) -> None:
        if self.uses[tensor] == 0:
            with pytest.raises(ChunkError, match="expected an access of"):
                self.states.release(tensor, after)
            return
        self.states.release(tensor, after)
        self.uses[tensor] -= 1
        self.idle[tensor] = self.idle[tensor] if self.uses[tensor] else after

    @rule(tensor=TENSORS)
    def forward_of_the_model_ends(self, tensor: int) -> None:
        if not self.uses[tensor] and self.idle[tensor] is AFTER_FWD:
            self.states.move(tensor, HOLD)
            self.idle[tensor] = HOLD

    @rule(tensor=TENSORS)
    def gradient_takes_the_place(self, tensor: int) -> None:
        if not self.uses[tensor] and self.idle[tensor] is not AFTER_BWD:
            self.states.free(tensor)
            self.states.move(tensor, AFTER_BWD)
            self.idle[tensor] = AFTER_BWD

    @rule()
    def an_interrupt_ends_all_uses(self) -> None:
        self.states.forget_accesses()
        self.idle = [HOLD if uses else idle for uses, idle in zip(self.uses, self.idle, strict=True)]
        self.uses = [0, 0, 0]

    @rule(tensor=TENSORS)
    def gradient_is_used_up(self, tensor: int) -> None:
        if not self.uses[tensor] and self.idle[tensor] is AFTER_BWD:
            self.states.move(tensor, FREE, HOLD)
            self.idle[tensor] = HOLD

    @rule(tensor=TENSORS, to=st.sampled_from(list(TensorState)))
    def illegal_moves_raise_and_change_nothing(self, tensor: int, to: TensorState) -> None:
        if self.uses[tensor] or to is COMPUTE or to not in LEGAL[self.idle[tensor]]:
            with pytest.raises(ChunkError, match=r"this is an error of torch_lms|used by no module"):
                self.states.move(tensor, to)

    @precondition(lambda self: self.states is not None)
    @invariant()
    def as_known(self) -> None:
        states = [COMPUTE if uses else idle for uses, idle in zip(self.uses, self.idle, strict=True)]
        assert [self.states[tensor] for tensor in range(3)] == states


TestTensors = Tensors.TestCase
TestTensors.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_readmes_table_is_the_codes() -> None:
    readme = Path(torch_lms.chunk.__file__).with_name("README.md").read_text()
    rows = [line.strip("|").split("|") for line in readme.splitlines() if line.startswith("| `")]
    table = {row[0].strip(" `"): {name.strip(" `") for name in row[1].split(",")} for row in rows if "→" not in row[0]}
    assert {one.name: table[one.name] for one in TensorState} == {
        one.name: {other.name for other in then} for one, then in LEGAL.items()
    }
