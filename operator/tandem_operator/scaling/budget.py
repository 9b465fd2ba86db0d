"""Both roles within one number of GPUs."""

from collections.abc import Mapping

from tandem_operator.api.roles import ROLES, RoleName

Counts = dict[RoleName, int]


def within_budget(
    wanted: Mapping[RoleName, int], least: Mapping[RoleName, int], gpus: Mapping[RoleName, int], budget: int | None
) -> Counts:
    """As much of `wanted` as `budget` GPUs allow, the roles alike: next is always the one that has the smaller part
    of what it wants. `least` is given even beyond the budget, for without it nothing is served.
    """
    if budget is None or sum(wanted[role] * gpus[role] for role in ROLES) <= budget:
        return {role: wanted[role] for role in ROLES}
    given = {role: min(least[role], wanted[role]) for role in ROLES}
    left = budget - sum(given[role] * gpus[role] for role in ROLES)
    while True:
        open_roles = [role for role in ROLES if given[role] < wanted[role] and gpus[role] <= left]
        if not open_roles:
            return given
        role = min(open_roles, key=lambda one: given[one] / wanted[one])
        given[role] += 1
        left -= gpus[role]
