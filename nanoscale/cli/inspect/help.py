"""`nanoscale help`: short texts on what concerns several commands."""

from pathlib import Path
from typing import Annotated

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import refuse_name
from nanoscale.common import display
from nanoscale.config.reference import declared, sections
from nanoscale.config.violations import nearest

TOPICS = {
    file.stem: file.read_text("utf-8").rstrip("\n")
    for file in sorted(Path(__file__).with_name("topics").iterdir())
}
"""Topic → its text, at most 80 columns wide."""


def topics(incomplete: str) -> list[str]:
    """Complete the name of a topic."""
    return [topic for topic in TOPICS if topic.startswith(incomplete)]


def help(
    topic: Annotated[
        str | None,
        opt.argument(
            "Name a topic or a command; without it, the topics are listed", topics, metavar="TOPIC"
        ),
    ] = None,
) -> int:
    """Explain a topic: exit-codes, layouts or overrides."""
    from nanoscale.cli.main import VERBS, run

    if topic in VERBS:
        return run([topic, "--help"])
    if topic is None:
        display.show("\n".join(f"nanoscale help {name}" for name in TOPICS))
    elif topic in TOPICS:
        display.show(TOPICS[topic])
    else:
        near = [f"nanoscale help {name}" for name in nearest(topic, [*TOPICS, *VERBS])]
        if topic in sections() or topic in declared():
            near = [f"nanoscale config explain {topic}"]
        refuse_name(topic, f"unknown topic; the topics are {', '.join(TOPICS)}", *near)
    return 0
