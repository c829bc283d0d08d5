"""`nanoscale help`: short texts on what concerns several commands."""

from typing import Annotated

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import refuse_name
from nanoscale.common import display
from nanoscale.config.reference import declared, sections
from nanoscale.config.violations import nearest

TOPICS = {
    "overrides": """\
Overrides choose options of groups and set keys. They stand anywhere between the
options of a command, and are written in Hydra's grammar:

  recipe=llama-8b        a complete job: packaged, in recipes/, or ./FILE.yaml
  precision=bf16         an option of a group
  train.steps=1k         a key; 1e3, 32k and 5M where the reference permits it
  'run.tags=[a,b]'       a list, quoted for the shell
  '~lora.targets'        back to the default
  data.path='${oc.env:DATA}/tokens'   an environment variable, for paths only

The command line wins over the recipe, and the recipe over the groups. `submit`
and `sweep` also take several values, as in train.seed=1,2,3.

  nanoscale config ls [GROUP]       lists groups, options and keys
  nanoscale config explain KEY      explains a key, its value, and what set it
  nanoscale --install-completion    completes all of them with the Tab key""",
    "exit-codes": """\
  0    done
  1    the job failed
  2    the request is wrong: configuration, usage or layout
  3    the plan, or a rehearsal, says that the job does not fit, without --force
  75   a signal asked the run to stop; it saved a checkpoint. Run it again
  130  Ctrl-C or `nanoscale runs stop` stopped the run

With --json, standard output has {"error": {"kind", "message", "violations"}}.
`nanoscale resume RUN` continues after 1, 75 and 130; a job of a batch system
is queued again by `nanoscale submit --resume RUN`.""",
    "layouts": """\
The world size is dp · tp · pp · cp, and one rank drives one device. Every
layout trains the same model to the same losses.

  parallel.dp     divides the samples; auto takes what the others leave
  parallel.tp     divides matrices and heads, within a host
  parallel.pp     divides the blocks into stages
  parallel.cp     divides the sequence
  parallel.ep     divides the experts, over ranks of dp, cp and possibly tp
  zero=stage0…3   shards optimizer states, gradients and parameters over dp

`nanoscale config ls parallel` lists layouts to start from. To find one, type

  nanoscale plan recipe=llama-8b cluster=h100-sxm launcher.devices=8 --search

train.global_batch is micro_batch · dp · accumulation: give the first two.""",
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
    """Explain a topic: overrides, exit-codes or layouts."""
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
        refuse_name(topic, "unknown topic; the topics are " + ", ".join(TOPICS), *near)
    return 0
