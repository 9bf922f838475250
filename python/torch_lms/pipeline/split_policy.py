"""Our partitions as the ``split_policy`` of torch.distributed.pipelining's ``pipeline``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from torch_lms.balanced import BalanceConfig, plan_balanced_partition
from torch_lms.errors import PipelineError
from torch_lms.profile.arguments import bind_sample
from torch_lms.profile.tracing import TracedModel

__all__ = ["balanced_split_policy", "insert_splits"]


def balanced_split_policy(
    devices: Any,
    *sample_input: Any,
    algorithm: Any = "auto",
    config: BalanceConfig | None = None,
    **sample_kwargs: Any,
) -> Callable[[fx.GraphModule], fx.GraphModule]:
    """A policy that profiles the exported graph, partitions it, and marks where to cut.

        pipe = pipeline(model, mb_args=(x,), split_policy=balanced_split_policy(["cuda:0", "cuda:1"], x))

    Args:
        devices: one for each stage, as for `create_balanced_partition`.
        sample_input: one microbatch.
        algorithm: as for `create_balanced_partition`.
        config: as for `create_balanced_partition`.
        sample_kwargs: the microbatch's keyword arguments.
    """

    def policy(graph_module: fx.GraphModule) -> fx.GraphModule:
        sample = bind_sample(graph_module, sample_input, sample_kwargs)
        traced = TracedModel(graph_module, "operator", graph_module, sample)
        plan = plan_balanced_partition(
            traced, devices, *sample_input, algorithm=algorithm, config=config, **sample_kwargs
        )
        return insert_splits(graph_module, plan.partition.stage_of)

    return policy


def insert_splits(graph_module: fx.GraphModule, stage_of: Mapping[str, int]) -> fx.GraphModule:
    """Brings the nodes into the order of their stages and puts a split between every two.

    Raises:
        PipelineError: if PyTorch has no torch.distributed.pipelining.
    """
    try:
        from torch.distributed import pipelining  # noqa: F401 (defines the operator)
    except ImportError as error:
        raise PipelineError(
            f"expected torch.distributed.pipelining, found none in torch {torch.__version__}; "
            "take torch_lms.pipeline.Pipeline instead"
        ) from error
    graph = graph_module.graph
    computed = [node for node in graph.nodes if node.op.startswith("call_")]
    output = next(node for node in graph.nodes if node.op == "output")
    for node in sorted(computed, key=lambda node: stage_of[node.name]):  # stable: the order inside a stage stays
        output.prepend(node)
    stage = min(stage_of[node.name] for node in computed)
    for node in [node for node in graph.nodes if node.op.startswith("call_")]:
        for _ in range(stage_of[node.name] - stage):
            with graph.inserting_before(node):
                graph.call_function(torch.ops.pippy._pipe_split.default)
        stage = stage_of[node.name]
    graph.lint()
    graph_module.recompile()
    return graph_module
