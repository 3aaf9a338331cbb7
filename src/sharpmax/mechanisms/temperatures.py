"""What there is to say of each policy as a mechanism."""

from __future__ import annotations

from ..core.policies import (
    Constant,
    Detached,
    EntropyCurve,
    EntropyPolynomial,
    Hard,
    LearnableLogLength,
    LearnableTemperature,
    LogLength,
    PerHead,
    Policy,
)
from .base import About
from .learned import NUMBERS

BOUND = "a_i <= exp(beta spread) / n (Lemma 2.1)"

SOFTMAX = About(
    title="softmax",
    paper="Bridle (1990); in attention, Bahdanau et al. (2015)",
    equation="a_i = exp(s_i) / sum_j exp(s_j)",
    training="nothing",
    theorem=f"applies: it is what Theorem 2.2 is about; {BOUND}, with beta = 1",
    disperses=True,
)

CONSTANT = About(
    title="softmax, constant temperature",
    paper="Velickovic et al. (2025), Theorem 2.2: any temperature theta > 0",
    equation="a_i = exp(beta s_i) / sum_j exp(beta s_j), beta a constant",
    training="nothing; a model can learn the same by larger weights",
    theorem=f"applies: {BOUND}; a larger beta moves the n at which it shows, by a factor exp(beta spread)",
    disperses=True,
)

ADAPTIVE = About(
    title="adaptive temperature",
    paper="Velickovic et al. (2025), Figure 4",
    equation="a = softmax(beta s), beta = max(f(H), 1) above a threshold (H > 0.5), else 1; H the entropy, f a fit",
    training="nothing; made for inference, fitted on trained heads",
    theorem=(
        f"applies while beta is bounded: {BOUND}. The printed f is at most 2.421 and falls below 1 at H = 5.9445, so "
        "beyond a few hundred equally likely keys it is softmax again"
    ),
    disperses=True,
)

HELD = ADAPTIVE._replace(
    title="adaptive temperature, held",
    paper="Velickovic et al. (2025), Figure 4, held at its peak or at the end of the range it was fitted on",
    equation="a = softmax(beta s), beta = max(f(H), 1) above a threshold (H > 0.5), else 1; f held beyond its range",
    theorem=f"applies: beta is at most the largest value of f (2.421 for the paper's), so {BOUND}, later than softmax",
)

GROWING = ADAPTIVE._replace(
    title="adaptive temperature, growing",
    theorem=(
        "does not apply: f grows with the entropy, and so with n when logits are bounded; a key that leads keeps its "
        "weight if beta times its lead exceeds log n from some n on"
    ),
    disperses=False,
)

LOG_LENGTH = About(
    title="log-n scaling",
    paper="Chiang & Cholak (2022), Overcoming a Theoretical Limitation of Self-Attention",
    equation="a = softmax(beta s), beta = scale log n + bias, or 1 + scale log(n / n0) from a length n0 on (1 before)",
    training="nothing; at inference, n0 is the length of training",
    theorem=(
        "does not apply: beta is not bounded. A key that leads every other by more than 1 / scale (log n0 for beta = "
        "log n / log n0, nothing where that is squared) has weight that goes to 1; one that leads by less loses it"
    ),
    disperses=False,
)

SSMAX = About(
    title="SSMax",
    paper="Nakanishi (2025), Scalable-Softmax Is Superior for Attention",
    equation="a = softmax(beta s), beta = scale log n, scale learned (plus a learned bias if asked for)",
    training=f"scale, and bias if asked for: {NUMBERS}",
    theorem=(
        "does not apply while scale > 0: a key that leads every other by more than 1 / scale has weight that goes to "
        "1, one that leads by less loses it"
    ),
    disperses=False,
)

LEARNED = About(
    title="learned temperature",
    paper="Jha & Reagen (2024), AERO",
    equation="a = softmax(beta s), beta = exp(log_beta)",
    training=f"log_beta: {NUMBERS}",
    theorem=f"applies: after training beta is a constant, so {BOUND}",
    disperses=True,
)

HARD = About(
    title="hard attention",
    paper="Denil et al. (2012); Xu et al. (2015)",
    equation="a_i = 1 / |M| for i in M, the keys with the largest logit, 0 elsewhere",
    training="cannot be trained with: its gradient is 0",
    theorem="does not apply: it asks for theta > 0, and this is theta = 0; only keys that tie share the weight",
    disperses=False,
)

ANY = About(
    title="softmax with a temperature",
    paper="the policy's",
    equation="a = softmax(beta s), beta = policy(statistics of s)",
    training="what the policy needs",
    theorem=f"applies while beta is bounded: {BOUND}; not if beta grows like log n or faster",
    disperses=True,
)

TABLE: dict[type, About] = {
    Constant: CONSTANT,
    EntropyPolynomial: ADAPTIVE,
    EntropyCurve: HELD,
    LogLength: LOG_LENGTH,
    LearnableLogLength: SSMAX,
    LearnableTemperature: LEARNED,
    Hard: HARD,
}


def about_policy(policy: Policy) -> About:
    """What there is to say of ``softmax(beta s)`` with beta from ``policy``."""
    if isinstance(policy, Detached):
        return about_policy(policy.policy)
    if isinstance(policy, PerHead):
        return ANY._replace(disperses=all(about_policy(inner).disperses for inner in policy.policies))
    if isinstance(policy, Constant) and policy.beta == 1:
        return SOFTMAX
    if isinstance(policy, LogLength) and policy.scale == 0:
        return CONSTANT
    if isinstance(policy, EntropyPolynomial):
        if policy.beyond != "extrapolate":
            return HELD
        return GROWING if next((c > 0 for c in policy.coefficients[:-1] if c), False) else ADAPTIVE
    return TABLE.get(type(policy), ANY)
