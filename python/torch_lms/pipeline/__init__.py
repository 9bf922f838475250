"""Stages run as a pipeline: schedules as data, torch.distributed.pipelining, and an executor for older PyTorch."""
