from __future__ import annotations

import re

import pytest
import torch

from tests.pipeline.ranks import ROOT, torchrun
from torch_lms.pipeline.torch_backend import is_available

pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.skipif(not is_available(), reason="transformers needs a newer PyTorch")
def test_the_example_trains_as_one_device_does() -> None:
    from docs.examples import pipeline as example

    done = torchrun(str(ROOT / "docs" / "examples" / "pipeline.py"), cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    found = [float(loss) for loss in re.findall(r"step \d+ of 10: loss (\d+\.\d+)", done.stdout)]
    model = example.make_model()
    optimizer = example.optimize(model.parameters())
    expected = []
    for step in range(example.STEPS):
        loss = model(**example.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-4)
    assert found[-1] < found[0] - 0.2
