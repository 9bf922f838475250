"""Rows of the balance benchmark say where a model's costs come from, and have each algorithm's step."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.partition_balance import COLUMNS, FORMULA, PROFILED, STAGES, add_model, add_profiled, problem_of
from benchmarks.profiled_models import MODELS
from benchmarks.results import Result
from tests.partition.graphs import bert
from torch_lms._torch_compat import has_export
from torch_lms.partition import algorithm_names
from torch_lms.plan import linear

TINY = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGES = {**TINY, "image_size": 16, "patch_size": 8}


def empty() -> Result:
    return Result(name="partition_balance", title="", columns=COLUMNS)


def check_steps(row: dict[str, Any]) -> None:
    """Each algorithm's figure is its step over one and the same time."""
    assert row["nodes"] > 0
    for name in algorithm_names():
        assert row[name] / row["auto"] == pytest.approx(row["steps_us"][name] / row["steps_us"]["auto"])


@pytest.mark.slow
@pytest.mark.skipif(not has_export(), reason="this PyTorch has no torch.export")
@pytest.mark.parametrize(("kind", "config"), [("Bert ForMaskedLM", TINY), ("ViT ForImageClassification", IMAGES)])
def test_profiled_models_get_a_row_for_each_number_of_stages(
    monkeypatch: pytest.MonkeyPatch, kind: str, config: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setitem(MODELS, "tiny", (kind, config))
    result = empty()
    add_profiled(result, "tiny")
    assert [(row["graph"], row["costs"], row["stages"]) for row in result.rows] == [
        ("tiny", PROFILED, stages) for stages in STAGES
    ]
    for row in result.rows:
        assert row["profile"]["level"] == "operator"
        assert row["profile"]["nodes_us"] > 0
        check_steps(row)


def test_formula_rows_are_named_so_and_have_the_same_columns() -> None:
    result = empty()
    add_model(result, "BERT, 2 layers", problem_of(bert(layers=2), 2), costs=FORMULA)
    (row,) = result.rows
    assert row["costs"] == FORMULA
    check_steps(row)


def test_a_row_has_the_bound_of_the_largest_stage_cost() -> None:
    pytest.importorskip("scipy")
    result = empty()
    problem = problem_of(bert(layers=2), 2)
    add_model(result, "BERT, 2 layers", problem)
    (row,) = result.rows
    costs_us = row["largest_stage_costs_us"]
    assert row["auto_over_bound"] == pytest.approx(costs_us["auto"] / costs_us["bound"])
    assert row["bound_over_simple"] == pytest.approx(costs_us["bound"] / problem.lower_bound_us)
    assert row["bound_over_simple"] > 1
    assert 1 <= row["auto_over_bound"] <= row["imbalances"]["auto"] * 1.05
    assert {"auto_over_bound", "bound_over_simple"} <= {key for key, _, _ in result.columns}


def test_without_scipy_a_row_has_no_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "find_spec", lambda name: None)
    result = empty()
    add_model(result, "BERT, 2 layers", problem_of(bert(layers=2), 2))
    (row,) = result.rows
    check_steps(row)
    assert "auto_over_bound" not in row
