"""Arrays onto the device of a policy."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor there. To a GPU by way of pinned memory, whose copies the host does not wait for: torch
    keeps that memory until the copy is made. On the host it shares the array's memory if it is contiguous."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
