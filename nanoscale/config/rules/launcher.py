"""Laws of the launch."""


def node_range(nodes: int | str | None) -> tuple[int, int] | None:
    """`N` and `MIN:MAX` as the least and the most hosts; None: all that there are."""
    if nodes is None:
        return None
    least, _, most = str(nodes).partition(":")
    return int(least), int(most or least)
