"""Indices of elements, on which the random numbers of a step depend."""

from typing import Any

from ampfuse.gradients.shards import elements_before
from ampfuse.optim._rule import Rule


def first_indices(
    rule: Rule, groups: list[dict[str, Any]], own_options: dict[str, Any]
) -> list[list[int]]:
    """Return the index of each parameter's first element among all elements of the optimizer.

    A group whose steps do not round at random has none. Each parameter begins at a multiple of 8,
    since random numbers are drawn for 8 elements at a time (math/stochastic_rounding.h).
    """
    indices, begin = [], 0
    for group in groups:
        draws_randoms = rule.state_options(group, own_options).draws_randoms
        of_group = []
        for param in group["params"]:
            if draws_randoms:
                of_group.append(begin + elements_before(param))
            begin += (param.numel() + 7) // 8 * 8
        indices.append(of_group)
    return indices
