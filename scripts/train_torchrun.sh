#!/usr/bin/env bash
# Train with torchrun: on one node, or on several with the same command on each and its own node_rank.
#
#   bash scripts/train_torchrun.sh CONFIG [OPTIONS of tools/train.py]
#   nproc_per_node=8 bash scripts/train_torchrun.sh my_config.py --backend fsdp:FULL_SHARD --resume
#   num_nodes=2 node_rank=0 master_addr=10.0.0.1 bash scripts/train_torchrun.sh my_config.py --backend deepspeed:zero3
#
# variable         default                         meaning (of two names the first that is set)
# num_nodes        1                               nodes; also NNODES
# node_rank        0                               number of this node, from 0; also NODE_RANK
# nproc_per_node   the GPUs of the node, else 1    processes on this node; also NPROC_PER_NODE
# master_addr      needed with several nodes       address of node 0; also MASTER_ADDR
# master_port      29500 with several nodes, with  free port of node 0; also MASTER_PORT
#                  one node any that is free
# PYTHON           python                          the interpreter
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if (($# == 0)); then
    sed -n '2,/^set /{/^#/!d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

num_nodes="${num_nodes:-${NNODES:-1}}"
node_rank="${node_rank:-${NODE_RANK:-0}}"
master_addr="${master_addr:-${MASTER_ADDR:-}}"
master_port="${master_port:-${MASTER_PORT:-}}"
nproc_per_node="${nproc_per_node:-${NPROC_PER_NODE:-}}"
if [[ -z "$nproc_per_node" ]]; then
    nproc_per_node="$(nvidia-smi --list-gpus 2>/dev/null | grep -c . || true)"
    ((nproc_per_node > 0)) || nproc_per_node=1
fi

if [[ ! "$num_nodes" =~ ^([0-9]+:)?[1-9][0-9]*$ ]]; then
    echo "error: num_nodes is '$num_nodes'; allowed: 1 or more" >&2
    exit 2
fi
if [[ ! "$node_rank" =~ ^[0-9]+$ ]] || ((10#$node_rank >= ${num_nodes##*:})); then
    echo "error: node_rank is '$node_rank', of num_nodes $num_nodes; allowed: 0 to num_nodes - 1" >&2
    exit 2
fi
if [[ ! "$nproc_per_node" =~ ^([1-9][0-9]*|gpu|cpu|auto)$ ]]; then
    echo "error: nproc_per_node is '$nproc_per_node'; allowed: 1 or more, gpu, cpu, auto" >&2
    exit 2
fi

launcher=("${PYTHON:-python}" -m torch.distributed.run --nnodes "$num_nodes" --nproc_per_node "$nproc_per_node")
if [[ "$num_nodes" == 1 && -z "$master_port" ]]; then
    launcher+=(--standalone)
else
    if [[ "$num_nodes" != 1 && -z "$master_addr" ]]; then
        echo "error: num_nodes is $num_nodes, and master_addr is not set; remedy: master_addr=ADDRESS of node 0" >&2
        exit 2
    fi
    launcher+=(--node_rank "$node_rank" --master_addr "${master_addr:-localhost}" --master_port "${master_port:-29500}")
fi
exec "${launcher[@]}" "$root/tools/train.py" "$@"
