#!/bin/sh
# The demo under torchrun. On each of the nodes, with the same HEAD and a SHARED folder that all see:
#   HEAD=host1 NODES=2 SHARED=/shared sh examples/multi_node/torchrun.sh [key=value ...]
# Alone on one machine, to try it: RANKS=3 sh examples/multi_node/torchrun.sh trainer.num_steps=4
set -eu
NODES=${NODES:-1} RANKS=${RANKS:-1} HEAD=${HEAD:-127.0.0.1} SHARED=${SHARED:-outputs/shared}
export ROLLOUT_TORCHRUN_FOLDER="${ROLLOUT_TORCHRUN_FOLDER:-$SHARED/torchrun}"
exec "${PYTHON:-python}" -m torch.distributed.run \
    --nnodes "$NODES" --nproc-per-node "$RANKS" --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id rollout \
    -m trainer_hooks.train --config-name demo run_name=torchrun mode=async launcher=torchrun \
    num_engines=$((NODES * RANKS - 1)) "weight_transport=directory:$SHARED/weights" "$@"
