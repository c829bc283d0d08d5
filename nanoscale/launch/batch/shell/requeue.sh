# If SLURM preempts the nodes with a grace time, it signals only the agents.
preempted() {
    scontrol show job "$SLURM_JOB_ID" | grep -q '^ *PreemptEligibleTime=.* PreemptTime=[0-9]'
}
if [ "$code" = 75 ] && { [ "$heard" = USR1 ] || { [ -z "$heard" ] && preempted; }; }; then
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "$max_requeues" ]; then
        echo "the job is queued again and will resume the run"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "the job was queued again $max_requeues times already; it is not queued again"
    fi
fi
exit "$code"
