#!/usr/bin/env bash
#SBATCH --job-name=unigen
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
#SBATCH --output=slurm-%j.log
# Train under SLURM, one task for each GPU, and continue in a new allocation when the time limit or a preemption ends this.
#
#   sbatch scripts/train_slurm.sh CONFIG [OPTIONS of tools/train.py]
#   sbatch --nodes=1 --ntasks-per-node=4 --gpus-per-node=4 scripts/train_slurm.sh my_config.py --backend fsdp
#
# Submit it in the checkout. A run stops before the time limit by itself (SLURM_JOB_END_TIME); otherwise SLURM sends SIGUSR1
# to all processes 300 seconds before: they save a checkpoint after the present update. Either way they end with exit
# status 143, and this script puts the job back into the queue. A job that is
# preempted gets SIGTERM, saves as well, and is put back by SLURM itself (--requeue). A job that was cancelled is not.
# The job that starts again resumes from the newest checkpoint: --resume=auto is added here.
#
# variable         default             meaning
# PYTHON           python              the interpreter
# MASTER_ADDR      the first node      address of rank 0
# MASTER_PORT      from the job's id   free port there
set -euo pipefail
root="${SLURM_SUBMIT_DIR:-$PWD}"
if [[ ! -f "$root/tools/train.py" ]]; then # not submitted: sbatch runs a copy of this file
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
fi
if (($# == 0)); then
    sed -n '2,/^set /{/^#/!d;/^#SBATCH/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi
if [[ ! -f "$root/tools/train.py" ]]; then
    echo "error: $root has no tools/train.py; remedy: submit the job in the checkout" >&2
    exit 2
fi

# The arguments stand last, so that a --resume of theirs counts at the first start. A later one resumes from the newest
# checkpoint, whatever they are.
again=()
((${SLURM_RESTART_COUNT:-0} == 0)) || again=(--resume=auto --cfg-options resume=auto)

status=0
srun --kill-on-bad-exit=1 "${PYTHON:-python}" "$root/tools/train.py" --resume=auto "$@" ${again[@]+"${again[@]}"} --launcher slurm ||
    status=$?

if ((status == 143)); then # stopped by a signal, with a checkpoint
    state="$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T || true)"
    if [[ "$state" == RUNNING ]]; then # neither cancelled nor preempted
        echo "Job $SLURM_JOB_ID is put back into the queue and will resume from its checkpoint."
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "Job $SLURM_JOB_ID is ${state:-gone}: it is not put back into the queue here."
    fi
fi
exit "$status"
