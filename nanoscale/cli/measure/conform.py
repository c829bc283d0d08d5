"""`nanoscale conform`: the job made small, in its layout and in one process, compared in fp64 on this CPU."""

from nanoscale.cli.common import options as opt
from nanoscale.cli.common.described_machines import on_described_hosts, planned_hosts
from nanoscale.cli.common.layout_check import compared
from nanoscale.cli.common.output import DONE, FAILED, answer
from nanoscale.cli.common.request import HOSTS, CommandLine, request_job, requesting
from nanoscale.common import display
from nanoscale.view.conformity_text import sentences


@requesting("config", "config_dir", *HOSTS, "trust")
def conform(
    line: CommandLine,
    compiled: bool = opt.flag(
        "Compare compiled blocks with blocks that are not, in fp32", "--compile"
    ),
    as_json: opt.AsJson = False,
) -> int:
    """Compare a job's layout with one process, in fp64 on this CPU.

    The job is made small: few narrow blocks of the same kinds, and degrees of at most 4. It trains four steps
    in its layout and in one process. Losses, gradient norms, each parameter's gradients and updates, and an
    evaluation are compared, also after a resume in both. Your own code (hooks) takes part. The exit code is 1
    if something differs.
    """
    from nanoscale.launch.preflight.by_library import with_weights
    from nanoscale.plan.hardware.planned_devices import planned_devices

    line = on_described_hosts(line)
    request = request_job(line, devices=planned_devices, hosts=planned_hosts)
    config = request.config
    if config.model.source == "hf":  # transformers knows what it cannot divide
        config = with_weights(request.composed, config, fetch=False)
    result = compared(config, compiled=compiled)
    if result is None:
        return FAILED
    answer(as_json, result, lambda it: display.show("\n".join(sentences(it))))
    return DONE if result["equal"] else FAILED
