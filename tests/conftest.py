"""Without a GPU, Triton's kernels run in its interpreter; triton reads the variable when it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
