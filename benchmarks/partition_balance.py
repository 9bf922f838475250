"""How long a step takes as each algorithm cuts known models, over one of stages of equal time and free transfers.

The costs of a model come from formulas (``tests/partition/graphs.py``), on devices like a GPU, or from a profile on the
CPU (``benchmarks/profiled_models.py``), on devices like that CPU; each row says which. Profiled models are in the table
where transformers is installed, and torchgpipe's own block partition where its package is: ``pip install --no-deps
torchgpipe``. The bound of the largest stage cost (`torch_lms.partition.bottleneck_bound`) needs SciPy.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.profiled_models import MODELS, profile_model
from benchmarks.results import Result
from tests.partition.graphs import GRAPHS, amoebanet, gpt
from torch_lms.partition import (
    CostGraph,
    CostModel,
    DeviceSpec,
    LinkSpec,
    Partition,
    PartitionProblem,
    algorithm_names,
    find_algorithm,
    partition,
)
from torch_lms.partition.bottleneck_bound import bottleneck_bound, stage_costs_us
from torch_lms.partition.figures import measure
from torch_lms.partition.layers import Layers, node_costs
from torch_lms.plan.linear import scipy_is_there

STAGES = (2, 4, 8)
LINK = LinkSpec(bytes_per_us=2e5, latency_us=5.0)  # NVLink, 200 GB/s each way
CPU_LINK = LinkSpec(bytes_per_us=1e3, latency_us=100.0)  # about Gloo between two processes of one machine
TARGET_S = 10.0
BOUND_S = 8.0  # for each row's bound
NANOSECONDS = 1000
FORMULA = "formula"
PROFILED = "profiled on CPU"
GPIPE = ("torchgpipe_time", "torchgpipe_size")
COLUMNS = [
    ("graph", "Model", "{}"),
    ("costs", "Costs", "{}"),
    ("nodes", "Nodes", "{}"),
    ("stages", "Stages", "{}"),
    *((name, name.replace("_", " "), "{:.3f}") for name in (*algorithm_names(), *GPIPE)),
    ("auto_over_bound", "auto's bottleneck over the bound", "{:.3f}"),
    ("bound_over_simple", "bound over simple bound", "{:.3f}"),
]


def problem_of(graph: CostGraph, stages: int, cap: int | None = None, *, links: LinkSpec = LINK) -> PartitionProblem:
    """Equal devices, four microbatches a stage."""
    devices = tuple(DeviceSpec(name=f"device {index}", memory_cap_bytes=cap) for index in range(stages))
    model = CostModel(microbatches=4 * stages)
    return PartitionProblem(graph=graph, devices=devices, links=links, cost_model=model)


def gpipe_balance() -> Callable[[list[int], int], list[int]] | None:
    """What both of torchgpipe's ``balance_by_time`` and ``balance_by_size`` end in; None without the package."""
    try:
        return importlib.import_module("torchgpipe.balance").balance_cost  # type: ignore[no-any-return]
    except ImportError:
        return None


def even_step_us(problem: PartitionProblem) -> float:
    """Of stages of equal time without transfers: each further microbatch takes one stage's time."""
    turns = problem.cost_model.microbatches + problem.stages - 1
    return float(problem.units.time_us.sum()) / problem.stages * turns


def gpipe_steps_us(problem: PartitionProblem) -> dict[str, float]:
    """The step of torchgpipe's balances of the same layers."""
    balance = gpipe_balance()
    if balance is None:
        return {}
    units = problem.units
    layers = Layers.of(units, problem.stages)
    sizes = node_costs(units, problem.cost_model.parameter_cost_bytes(problem.graph))
    found = {}
    for name, costs in zip(GPIPE, (units.time_us * NANOSECONDS, sizes), strict=True):
        counts = balance([int(cost) for cost in layers.sums(costs)], problem.stages)
        placed = layers.stages([int(cut) for cut in np.cumsum(counts)[:-1]])
        links = problem.links_between(problem.devices)
        found[name] = measure(units, placed, problem.devices, links, problem.cost_model).step.step_us
    return found


def bound_facts(problem: PartitionProblem, made: Partition) -> dict[str, Any]:
    """How near a partition's largest stage cost is to the least, as far as that is proven."""
    if not scipy_is_there():
        return {}
    begin = time.perf_counter()
    bound = bottleneck_bound(problem, seconds=BOUND_S)
    spent_s = time.perf_counter() - begin
    cost_us, simple_us = max(stage_costs_us(made.figures)), problem.lower_bound_us
    costs_us = {"auto": cost_us, "bound": bound.lower_us, "best_known": bound.upper_us, "simple_bound": simple_us}
    ratios = {"auto_over_bound": cost_us / bound.lower_us, "bound_over_simple": bound.lower_us / simple_us}
    return {**ratios, "largest_stage_costs_us": costs_us, "bound_s": spent_s}


def add_model(result: Result, name: str, problem: PartitionProblem, **facts: Any) -> None:
    """One row: every algorithm on one model and number of stages, and facts of the model."""
    stages = problem.stages
    made = {algorithm: find_algorithm(algorithm).partition(problem) for algorithm in algorithm_names()}
    steps_us = {algorithm: one.step_us for algorithm, one in made.items()} | gpipe_steps_us(problem)
    row: dict[str, Any] = {algorithm: step_us / even_step_us(problem) for algorithm, step_us in steps_us.items()}
    imbalances = {algorithm: one.imbalance for algorithm, one in made.items()}
    row |= {"steps_us": steps_us, "imbalances": imbalances, **bound_facts(problem, made["auto"]), **facts}
    result.add(graph=name, nodes=len(problem.units), stages=stages, **row)
    worst = max(steps_us["auto"] / one for algorithm, one in steps_us.items() if algorithm != "auto")
    what = f"{name} on {stages} stages"
    result.check(f"{what}, step of auto over the best other's", "1", worst, worst <= 1 + 1e-9)


def add_large(result: Result, name: str, graph: CostGraph) -> None:
    """How long 10,000 nodes take."""
    problem = problem_of(graph, STAGES[-1])
    begin = time.perf_counter()
    made = partition(problem)
    spent_s = time.perf_counter() - begin
    row = {"graph": name, "costs": FORMULA, "nodes": len(problem.units), "stages": STAGES[-1], "spent_s": spent_s}
    result.add(auto=made.step_us / even_step_us(problem), **row)
    result.check(
        f"{name}, {len(problem.units)} nodes into {STAGES[-1]} stages", f"{TARGET_S} s", spent_s, spent_s <= TARGET_S
    )


def add_capped(result: Result, name: str, graph: CostGraph, stages: int) -> None:
    """Whether auto trains under a cap that the simple algorithms run out of."""
    simple = ("uniform", "parameters", "balance_by_time")
    free = problem_of(graph, stages)
    needs = [max(find_algorithm(one).partition(free).stage_memory_bytes) for one in simple]
    cap = int(0.95 * min(needs) / (1 - free.cost_model.memory_buffer))
    made = partition(problem_of(graph, stages, cap))
    what = f"{name} on {stages} stages, 5 % below what {', '.join(simple)} need"
    result.check(what, "fits", "fits" if made.fits else "does not fit", made.fits)


def add_profiled(result: Result, name: str) -> None:
    """A row for each number of stages, all of one profile."""
    made = profile_model(name)
    graph = CostGraph.from_profile(made.profile)
    for stages in STAGES:
        add_model(result, name, problem_of(graph, stages, links=CPU_LINK), costs=PROFILED, profile=made.facts())


def main() -> None:
    """Fills the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="benchmarks/results")
    given = parser.parse_args()
    title = "Predicted step of 1F1B over that of stages of equal time with free transfers, by algorithm"
    result = Result(name="partition_balance", title=title, columns=COLUMNS)
    for name, make in GRAPHS.items():
        graph = make()
        for stages in STAGES:
            add_model(result, name, problem_of(graph, stages), costs=FORMULA)
    add_large(result, "GPT, 830 layers", gpt(layers=830))
    add_large(result, "AmoebaNet, 285 cells", amoebanet(cells=285))
    add_capped(result, "ResNet-152", GRAPHS["ResNet-152"](), 4)
    for name in MODELS if importlib.util.find_spec("transformers") else ():
        add_profiled(result, name)
    result.write(given.output)


if __name__ == "__main__":
    main()
