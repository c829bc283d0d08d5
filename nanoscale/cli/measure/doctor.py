"""`nanoscale doctor`: judge the machines before a job has to."""

from functools import partial

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.output import DONE, FAILED, answer, saying
from nanoscale.cli.common.request import HOSTS, CommandLine, requesting
from nanoscale.common import display


@requesting("config_dir", *HOSTS)
def doctor(
    line: CommandLine,
    quick: bool = opt.flag(
        "Skip the measurement of bandwidths between the hosts", "--quick", "--no-bandwidth"
    ),
    verbose: bool = opt.flag("Show passed checks too, also of many hosts", "--verbose", "-v"),
    as_json: opt.AsJson = False,
) -> int:
    """Check this machine or all hosts, and their network."""
    from nanoscale.launch.lifecycle.examination import examine, machines, measure_cpu
    from nanoscale.view import doctor_text

    config, hosts = machines(line.compose_settings())
    with saying() as say:
        verdicts, measured = examine(config, hosts, say, quick=quick)
        if not quick and config.launcher.device == "cpu":
            measure_cpu(say)
    names = list(dict.fromkeys(verdict.host for verdict in verdicts))
    document = doctor_text.document(names, verdicts, measured)
    show = partial(doctor_text.print_doctor, verbose=verbose)
    answer(as_json, document, show, display.console(), names, verdicts, measured)
    all_of_them = [*verdicts, *(measured.verdicts if measured is not None else ())]
    return DONE if all(verdict.good for verdict in all_of_them) else FAILED
