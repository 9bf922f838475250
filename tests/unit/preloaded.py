"""What a process that others are forked from imports last."""

from tests.quickly import begin_quickly

begin_quickly()
