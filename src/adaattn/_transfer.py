"""Numbers from the host to a device, for which nobody waits."""

import torch


def on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device; the host does not wait for the copy.

    A graph that is captured would copy from memory that others have by the time of a replay: there
    the copy is one that capturing refuses.
    """
    compiling = torch.compiler.is_compiling()
    if device.type != "cuda" or compiling or torch.cuda.is_current_stream_capturing():
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)
