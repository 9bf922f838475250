"""Uses what a wheel has installed, with nothing beside it: automatic mode, chunks, and stages."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torch_lms

STEPS = 8
WIDTH = 256


def make_model() -> nn.Sequential:
    """Ten layers, the same ones each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(10)))


def batch(step: int) -> torch.Tensor:
    """Of a step."""
    return torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(step))


def losses() -> list[float]:
    """Of a training."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def main() -> None:
    """Fails where something is missing or wrong."""
    home = Path(torch_lms.__file__).parent
    assert "site-packages" in home.parts, f"expected the installed package, found {home}"
    assert (home / "py.typed").is_file()
    expected = losses()
    torch_lms.enable({"cpu": "8MiB"}, min_bytes=4096)
    assert losses() == expected
    assert torch_lms.stats().pageouts > 0
    torch_lms.disable()
    plain = make_model()
    model, optimizer = torch_lms.chunked(plain, torch.optim.AdamW(plain.parameters()), device_limit="64MiB")
    model(batch(0).bfloat16()).float().square().mean().backward()
    optimizer.step()
    stages = torch_lms.create_balanced_partition(make_model(), ["cpu", "cpu"], batch(0), optimizer="adamw")
    assert len(stages) == 2
    print(f"{home}: used, with torch {torch.__version__}")


if __name__ == "__main__":
    main()
