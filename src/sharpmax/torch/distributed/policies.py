"""What a policy asks of the ranks: statistics, and the gradient of beta."""

from __future__ import annotations

from typing import Any

from ...core.policies import Detached, Lowered, Policy, lowered
from ..attention import is_number


def form_without_statistics(policy: Policy) -> Lowered | None:
    """A policy that is a number, or one of how many keys a row sees, as plain numbers; ``None`` for any other."""
    form = lowered(policy)
    return form if form is not None and (is_number(form) or form.variable == "log_count") else None


def beta_has_gradient(policy: Any) -> bool:
    """Whether beta may have a gradient."""
    return form_without_statistics(policy) is None and not isinstance(policy, Detached)
