import functools

import torch


def get_compute_capability(device):
    return torch.cuda.get_device_capability(device)


@functools.cache
def get_device_sm_count(device):
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def get_device_name(device):
    return torch.cuda.get_device_properties(device).name


_scratch = {}
_outgrown = []  # captured graphs may hold them


def _get_cache_buf(name, num_bytes, device, zero_init=False):
    kept = _scratch.get((name, device))
    if kept is None or kept.numel() < num_bytes:
        _outgrown.append(kept)
        kept = _scratch[name, device] = (torch.zeros if zero_init else torch.empty)(num_bytes, dtype=torch.uint8, device=device)
    return kept
