"""From the statistics of all rows of a call to a few numbers for each sequence and head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..torch.attention import row_betas
from .ranges import has_range, outside_range
from .rows import CallRows

METRICS: dict[str, str] = {
    "tokens": "rows that were counted: one for each token that is not padding",
    "n": "keys that the last row sees",
    "entropy_mean": "entropy H of a row's coefficients in nats, the mean over rows",
    "entropy_std": "its standard deviation over rows",
    "entropy_last": "H at the last token",
    "normalised_mean": "H / log n, from 0 (one key has all) to 1 (uniform), the mean over rows with n > 1",
    "normalised_last": "H / log n at the last token",
    "largest_mean": "the largest coefficient, the mean over rows",
    "largest_last": "the largest coefficient at the last token",
    "spread_min": "logit spread delta = max - min, the smallest of all rows with n > 1",
    "spread_max": "the largest delta of all rows",
    "spread_mean": "the mean of delta over rows with n > 1",
    "spread_std": "its standard deviation",
    "spread_last": "delta at the last token",
    "beta_mean": "the inverse temperature that the policy would choose, the mean over rows",
    "beta_last": "the same at the last token",
    "acts": "share of rows where the policy would act: beta is not 1",
    "outside": "share of rows whose entropy is outside of the policy's range (none for policies without one)",
    "sink_mean": "coefficient of the first key, the attention sink, the mean over rows after the first",
    "sink_last": "the same at the last token",
    "sinkless_mean": "entropy of the other keys' coefficients among themselves, the mean over rows after the first",
    "sinkless_last": "the same at the last token",
    "acting_mean": "entropy after the beta of the model's own policy, the mean over rows; none for plain softmax",
    "acting_last": "the same at the last token",
}
"""What is known of a head after one input, by column of the table."""


def reduced(rows: CallRows, policy: Any) -> Tensor:
    """The numbers of :data:`METRICS`, ``[B, H, len(METRICS)]``, in float64 where the device has it; NaN for none.

    Only rows that belong to a token and see a key count.
    """
    whole = rows.whole
    beta = row_betas(policy, whole)
    wide = torch.float32 if whole.sum.device.type == "mps" else torch.float64
    counts = rows.counts[:, None] & (whole.count > 0)
    several = counts & (whole.count > 1)
    last = last_rows(rows.counts)

    def over(values: Tensor, where: Tensor) -> Tensor:
        total = where.sum(-1)
        summed = torch.where(where, values, 0.0).sum(-1, dtype=wide)
        return torch.where(total > 0, summed / total, math.nan)

    def deviation(values: Tensor, where: Tensor, mean: Tensor) -> Tensor:
        return over((values.to(wide) - mean[..., None]).square(), where).sqrt()

    def at_last(values: Tensor, where: Tensor = counts) -> Tensor:
        index = last[:, None, None].expand(*values.shape[:2], 1)
        return torch.where(where.gather(2, index), values.gather(2, index).to(wide), math.nan).squeeze(2)

    def extreme(values: Tensor, where: Tensor, largest: bool) -> Tensor:
        filled = torch.where(where, values, -math.inf if largest else math.inf)
        found = filled.amax(-1) if largest else filled.amin(-1)
        return torch.where(where.any(-1), found.to(wide), math.nan)

    entropy, spread, largest, sink = whole.entropy, whole.spread, rows.largest, rows.sink_mass
    log_n = whole.count.clamp(min=2).to(entropy.dtype).log()
    normalised, sinkless = entropy / log_n, rows.rest.entropy
    after = several & (rows.rest.count > 0)
    mean, spread_mean = over(entropy, counts), over(spread, several)
    acts = (beta != 1).to(entropy.dtype)
    outside = over(outside_range(policy, whole).to(entropy.dtype), counts)
    found = {
        "tokens": counts.sum(-1).to(wide),
        "n": at_last(whole.count),
        "entropy_mean": mean,
        "entropy_std": deviation(entropy, counts, mean),
        "entropy_last": at_last(entropy),
        "normalised_mean": over(normalised, several),
        "normalised_last": at_last(normalised, several),
        "largest_mean": over(largest, counts),
        "largest_last": at_last(largest),
        "spread_min": extreme(spread, several, largest=False),
        "spread_max": extreme(spread, several, largest=True),
        "spread_mean": spread_mean,
        "spread_std": deviation(spread, several, spread_mean),
        "spread_last": at_last(spread),
        "beta_mean": over(beta, counts),
        "beta_last": at_last(beta),
        "acts": over(acts, counts),
        "outside": outside if has_range(policy) else torch.full_like(mean, math.nan),
        "sink_mean": over(sink, after),
        "sink_last": at_last(sink, after),
        "sinkless_mean": over(sinkless, after),
        "sinkless_last": at_last(sinkless, after),
        "acting_mean": over(rows.acting, counts),
        "acting_last": at_last(rows.acting),
    }
    return torch.stack([found[name] for name in METRICS], dim=-1)


def last_rows(counts: Tensor) -> Tensor:
    """The last row that counts, ``[B]``."""
    positions = torch.arange(counts.shape[1], device=counts.device)
    return torch.where(counts, positions, 0).amax(-1)
