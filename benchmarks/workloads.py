"""The programs that plans are measured with: models with random weights, each with a batch and a loss.

A size that is not given is that of the table; `tiny` ones are for trying a benchmark on a machine without a GPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.resnet import ResNet
from benchmarks.unet3d import UNet3d
from torch_lms.cli.models import GPT, GPTShape

__all__ = ["WORKLOADS", "Program", "Workload", "hugging_face", "make_program", "sizes_of"]

Sizes = Mapping[str, int]


@dataclass(kw_only=True)
class Program:
    """A model and its step, which peers change.

    Attributes:
        model: whose gradients are compared.
        loss: one forward.
        blocks: its parts, in order, that a user would checkpoint one by one.
        scope: around each forward.
        samples: in a batch.
        tokens: in a sample; 1 for what has none.
    """

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    blocks: Sequence[nn.Module]
    samples: int
    tokens: int = 1
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How a program is made.

    Attributes:
        title: of its rows.
        make: makes it on a device.
        sizes: by name.
        tiny: those that differ on a machine without a GPU.
    """

    title: str
    make: Callable[[str, Sizes], Program]
    sizes: Sizes
    tiny: Sizes = field(default_factory=dict)


def sizes_of(name: str, *, tiny: bool, changed: Sizes) -> dict[str, int]:
    """The sizes of a workload, some of them changed."""
    workload = WORKLOADS[name]
    return {**workload.sizes, **(workload.tiny if tiny else {}), **changed}


def make_program(name: str, device: str, *, tiny: bool = False, changed: Sizes | None = None) -> Program:
    """A program, the same each time.

    Args:
        name: of the workload.
        device: of its model.
        tiny: whether its sizes are those for a machine without a GPU.
        changed: sizes that differ.
    """
    torch.manual_seed(0)
    return WORKLOADS[name].make(device, sizes_of(name, tiny=tiny, changed=changed or {}))


@contextmanager
def _creating(device: str, *, half: bool = True) -> Iterator[None]:
    """New tensors are made on a device; in bfloat16 where it is one that computes in it well."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if half and device.startswith("cuda") else torch.float32)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(default)


def _gpt(device: str, sizes: Sizes, *, autocast: bool = False) -> Program:
    shape = GPTShape(**{name: sizes[name] for name in ("layers", "hidden", "heads", "tokens", "vocabulary")})
    with _creating(device, half=not autocast):
        model = GPT(shape)
        ids = torch.randint(shape.vocabulary, (sizes["batch"], shape.tokens))
    next_ids = ids.roll(-1, 1)
    scope = partial(torch.autocast, device, dtype=torch.bfloat16) if autocast else nullcontext
    return Program(
        model=model,
        loss=lambda: model(ids, next_ids),
        blocks=list(model.blocks),
        samples=sizes["batch"],
        tokens=shape.tokens,
        scope=scope,
    )


def _resnet(device: str, sizes: Sizes) -> Program:
    with _creating(device, half=False):
        model = ResNet(sizes["depth"], channels=sizes["channels"])
        images = torch.randn(sizes["batch"], 3, sizes["pixels"], sizes["pixels"])
        classes = torch.randint(1000, (sizes["batch"],))
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = images.contiguous(memory_format=torch.channels_last)
    return Program(
        model=model,
        loss=lambda: model(images, classes),
        blocks=list(model.blocks),
        samples=sizes["batch"],
        scope=partial(torch.autocast, device, dtype=torch.bfloat16),
    )


def _unet(device: str, sizes: Sizes) -> Program:
    channels = tuple(min(sizes["channels"] << level, 10 * sizes["channels"]) for level in range(sizes["levels"]))
    with _creating(device, half=False):
        model = UNet3d(channels)
        volumes = torch.randn(sizes["batch"], 4, *[sizes["pixels"]] * 3)
        labels = (torch.rand(sizes["batch"], 3, *[sizes["pixels"]] * 3) < 0.1).float()
    return Program(
        model=model,
        loss=lambda: model(volumes, labels),
        blocks=[*model.down, *model.up],
        samples=sizes["batch"],
        scope=partial(torch.autocast, device, dtype=torch.bfloat16),
    )


def hugging_face(name: str, config: Mapping[str, Any]) -> Any:
    """A model of the transformers package, from its configuration alone.

    Raises:
        ImportError: if the package is not on the path.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(f"expected the transformers package, found none that imports ({error}); install it") from None
    kind, _, head = name.partition(" ")
    return getattr(transformers, f"{kind}{head}")(getattr(transformers, f"{kind}Config")(**config)).train()


def _decoder(device: str, sizes: Sizes, *, name: str, config: Mapping[str, str]) -> Program:
    """A causal language model, which shifts its labels itself; ``config`` maps its words to names of sizes."""
    words = {word: sizes[size] for word, size in config.items()}
    with _creating(device):
        model = hugging_face(name, {**words, "use_cache": False})
        ids = torch.randint(sizes["vocabulary"], (sizes["batch"], sizes["tokens"]))
    return Program(
        model=model,
        loss=lambda: model(input_ids=ids, labels=ids).loss,
        blocks=list(model.model.layers),
        samples=sizes["batch"],
        tokens=sizes["tokens"],
    )


_LLAMA = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "intermediate_size": "inner",
    "num_attention_heads": "heads",
    "num_key_value_heads": "key_heads",
    "vocab_size": "vocabulary",
    "max_position_embeddings": "tokens",
}
_QWEN_MOE = {
    **_LLAMA,
    "head_dim": "head_size",
    "num_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "moe_intermediate_size": "expert_inner",
}


def _vit(device: str, sizes: Sizes) -> Program:
    config = {
        "num_hidden_layers": sizes["layers"],
        "hidden_size": sizes["hidden"],
        "intermediate_size": 4 * sizes["hidden"],
        "num_attention_heads": sizes["heads"],
        "image_size": sizes["pixels"],
        "patch_size": 16,
        "num_labels": 1000,
    }
    with _creating(device):
        model = hugging_face("ViT ForImageClassification", config)
        images = torch.randn(sizes["batch"], 3, sizes["pixels"], sizes["pixels"])
        classes = torch.randint(1000, (sizes["batch"],))
    return Program(
        model=model, loss=lambda: model(pixel_values=images, labels=classes).loss, blocks=[], samples=sizes["batch"]
    )


def _t5(device: str, sizes: Sizes) -> Program:
    config = {
        "num_layers": sizes["layers"],
        "d_model": sizes["hidden"],
        "d_ff": 4 * sizes["hidden"],
        "num_heads": sizes["heads"],
        "d_kv": sizes["hidden"] // sizes["heads"],
        "vocab_size": sizes["vocabulary"],
        "use_cache": False,
        "decoder_start_token_id": 0,
    }
    with _creating(device):
        model = hugging_face("T5 ForConditionalGeneration", config)
        ids = torch.randint(1, sizes["vocabulary"], (sizes["batch"], sizes["tokens"]))
        labels = torch.randint(1, sizes["vocabulary"], (sizes["batch"], sizes["labels"]))
    return Program(
        model=model,
        loss=lambda: model(input_ids=ids, labels=labels).loss,
        blocks=[],
        samples=sizes["batch"],
        tokens=sizes["tokens"],
    )


def _whisper(device: str, sizes: Sizes) -> Program:
    config: dict[str, Any] = {"d_model": sizes["hidden"], "vocab_size": sizes["vocabulary"], "use_cache": False}
    for part in ("encoder", "decoder"):
        config |= {f"{part}_layers": sizes["layers"], f"{part}_attention_heads": sizes["heads"]}
        config[f"{part}_ffn_dim"] = 4 * sizes["hidden"]
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0)
    config |= {"max_source_positions": sizes["frames"] // 2, "max_target_positions": sizes["labels"], **special}
    with _creating(device):
        model = hugging_face("Whisper ForConditionalGeneration", config)
        features = torch.randn(sizes["batch"], model.config.num_mel_bins, sizes["frames"])
        labels = torch.randint(1, sizes["vocabulary"], (sizes["batch"], sizes["labels"]))
    return Program(
        model=model,
        loss=lambda: model(input_features=features, labels=labels).loss,
        blocks=[],
        samples=sizes["batch"],
        tokens=sizes["frames"],
    )


_GPT_SIZES = {"layers": 24, "hidden": 2048, "heads": 16, "tokens": 2048, "vocabulary": 32000, "batch": 16}
_GPT_TINY = {"layers": 6, "hidden": 64, "heads": 2, "tokens": 64, "vocabulary": 256, "batch": 8}
_LLAMA_SIZES = {**_GPT_SIZES, "inner": 5632, "heads": 32, "key_heads": 8, "batch": 8}
_LLAMA_TINY = {**_GPT_TINY, "inner": 192, "key_heads": 1}
_QWEN_SIZES = {
    **_LLAMA_SIZES,
    **{"layers": 28, "hidden": 1024, "inner": 3072, "heads": 16, "key_heads": 4, "head_size": 64},
    **{"experts": 64, "experts_per_token": 8, "expert_inner": 512},
}
_QWEN_TINY = {**_LLAMA_TINY, "layers": 3, "head_size": 32, "experts": 4, "experts_per_token": 2, "expert_inner": 64}
_VIT_SIZES = {"layers": 24, "hidden": 1024, "heads": 16, "pixels": 224, "batch": 256}
_T5_SIZES = {
    **{"layers": 24, "hidden": 1024, "heads": 16, "tokens": 512, "labels": 128},
    **{"vocabulary": 32128, "batch": 32},
}
_WHISPER_SIZES = {
    **{"layers": 24, "hidden": 1024, "heads": 16, "frames": 3000, "labels": 448},
    **{"vocabulary": 51865, "batch": 24},
}

WORKLOADS = {
    "gpt": Workload(title="GPT 1.3B", make=_gpt, sizes=_GPT_SIZES, tiny=_GPT_TINY),
    "gpt_autocast": Workload(
        title="GPT, fp32, autocast", make=partial(_gpt, autocast=True), sizes=_GPT_SIZES, tiny=_GPT_TINY
    ),
    "llama": Workload(
        title="Llama-shaped 1.2B",
        make=partial(_decoder, name="Llama ForCausalLM", config=_LLAMA),
        sizes=_LLAMA_SIZES,
        tiny=_LLAMA_TINY,
    ),
    "vit": Workload(
        title="ViT-L/16", make=_vit, sizes=_VIT_SIZES, tiny={"layers": 4, "hidden": 64, "heads": 2, "batch": 8}
    ),
    "resnet": Workload(
        title="ResNet-152, channels last, AMP",
        make=_resnet,
        sizes={"depth": 152, "channels": 64, "pixels": 224, "batch": 256},
        tiny={"channels": 4, "pixels": 64, "batch": 4},
    ),
    "t5": Workload(
        title="T5-large",
        make=_t5,
        sizes=_T5_SIZES,
        tiny={"layers": 3, "hidden": 64, "heads": 2, "tokens": 64, "labels": 32, "vocabulary": 256, "batch": 4},
    ),
    "qwen_moe": Workload(
        title="Qwen3-MoE, 0.5B active",
        make=partial(_decoder, name="Qwen3Moe ForCausalLM", config=_QWEN_MOE),
        sizes=_QWEN_SIZES,
        tiny=_QWEN_TINY,
    ),
    "whisper": Workload(
        title="Whisper-medium",
        make=_whisper,
        sizes=_WHISPER_SIZES,
        tiny={"layers": 2, "hidden": 64, "heads": 2, "frames": 64, "labels": 16, "vocabulary": 256, "batch": 4},
    ),
    "unet3d": Workload(
        title="3D U-Net, AMP",
        make=_unet,
        sizes={"channels": 32, "levels": 5, "pixels": 128, "batch": 2},
        tiny={"channels": 4, "levels": 3, "pixels": 16},
    ),
}
