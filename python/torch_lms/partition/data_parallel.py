"""What adding up the gradients of copies of the pipeline takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from torch_lms.errors import PartitionError
from torch_lms.partition.link_spec import LinkSpec

__all__ = ["DataParallel"]


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """Copies of the whole pipeline, which add up their gradients at the end of a step.

    Attributes:
        ranks: how many copies; 1 for none.
        link: between a device and its like in the next copy. None counts as free;
            `torch_lms.create_balanced_partition` takes the slowest of the links between the stages' devices for it.
        bucket_bytes: of gradients that are added up at once, as in `torch_lms.pipeline.PipelineConfig`.
    """

    ranks: int = 1
    link: LinkSpec | None = None
    bucket_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise PartitionError(f"expected at least 1 data-parallel rank, found {self.ranks}; 1 means no copies")
        if self.bucket_bytes < 1:
            raise PartitionError(f"expected buckets of at least 1 byte, found {self.bucket_bytes}; give more")

    def buckets(self, nbytes: Any) -> Any:
        """How many a stage's gradients are in; arrays too."""
        return np.maximum(np.ceil(nbytes / self.bucket_bytes), 1.0)

    def all_reduce_us(self, nbytes: Any) -> Any:
        """Of a ring: ``2 (n - 1)`` turns a bucket, each of which sends a share of ``1 / n`` on; an array."""
        buckets, link = self.buckets(nbytes), self.link or LinkSpec()
        return buckets * 2 * (self.ranks - 1) * link.transfer_us(nbytes / buckets / self.ranks)

    def tail_us(self, nbytes: Any, all_reduce_us: Any, backward_us: Any) -> Any:
        """What is left of an all-reduce where the backward beside it ends; arrays too.

        The shorter of the two is hidden but for one bucket, which is the first that has to be there before there is
        anything to add up, or the last that is added up.
        """
        return all_reduce_us - (1 - 1 / self.buckets(nbytes)) * np.minimum(all_reduce_us, backward_us)
