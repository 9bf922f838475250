"""Stages, run as a pipeline: schedules as data, torch.distributed.pipelining where it is, an executor where it is not."""
