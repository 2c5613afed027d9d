"""Work dealt out in even shares: to ranks, to files, to threads."""

from collections.abc import Sequence


def deal[Item](items: Sequence[Item], sizes: Sequence[int], num_shares: int) -> list[list[Item]]:
    """Deals the largest first, each to the share that is the smallest so far; the same everywhere for the same items.

    Args:
        items: What is dealt.
        sizes: What each counts.
        num_shares: How many shares; some stay empty if there are fewer items.
    """
    shares: list[list[Item]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for index in sorted(range(len(items)), key=lambda index: -sizes[index]):
        smallest = totals.index(min(totals))
        shares[smallest].append(items[index])
        totals[smallest] += sizes[index]
    return shares
