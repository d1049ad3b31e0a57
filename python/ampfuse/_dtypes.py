"""Dtypes that several packages treat alike."""

import torch

DTYPES_16_BIT = (torch.float16, torch.bfloat16)
