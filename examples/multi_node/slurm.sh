#!/bin/sh
#SBATCH --job-name=rollout-trainer
#SBATCH --nodes=1
#SBATCH --cpus-per-task=4
# The demo on Slurm: this job is the trainer, and submits one for each engine.
#   SHARED=/shared ENGINES=2 sbatch examples/multi_node/slurm.sh +launcher.options.slurm_partition=cpu
# Alone on one machine, to try it: sh examples/multi_node/slurm.sh launcher.options.cluster=local
set -eu
SHARED=${SHARED:-outputs/shared}
exec "${PYTHON:-python}" -m trainer_hooks.train --config-name demo run_name=slurm mode=async launcher=slurm \
    "num_engines=${ENGINES:-1}" "launcher.options.folder=$SHARED/slurm" \
    "weight_transport=directory:$SHARED/weights" "$@"
