#!/usr/bin/env bash
# Train with DeepSpeed's launcher: on one node, or on the hosts of a hostfile.
#
#   bash scripts/train_deepspeed.sh CONFIG [OPTIONS of tools/train.py]
#   nproc_per_node=8 bash scripts/train_deepspeed.sh my_config.py --backend deepspeed:zero2 --resume
#   hostfile=hosts.txt bash scripts/train_deepspeed.sh my_config.py --backend deepspeed:zero3 --resume
#   hostfile=hosts.txt node_rank=0 master_addr=10.0.0.1 bash scripts/train_deepspeed.sh my_config.py   # on each host
#
# A hostfile has a line "HOST slots=GPUS" for each host. The third form starts all hosts from one of them, by pdsh over
# ssh without a password. The last one needs no ssh: it is started on each host, with the number of its line as node_rank.
#
# variable         default                         meaning (of two names the first that is set)
# hostfile         none: this node alone           the hosts and their GPUs
# num_nodes        all of the hostfile             how many of them; also NNODES
# node_rank        none: started by ssh            number of this host in the hostfile, from 0; also NODE_RANK
# nproc_per_node   all slots of a host             processes on each host; also NPROC_PER_NODE
# master_addr      the first host                  its address; also MASTER_ADDR
# master_port      29500                           free port there; also MASTER_PORT
# PYTHON           python                          the interpreter
#
# Other hosts get the variables NCCL*, PYTHON*, UCX*, LD_LIBRARY_PATH and PATH; all others (TORCH_DISTRIBUTED_DEBUG) are
# lines NAME=VALUE of the file .deepspeed_env here or in the home folder.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
if (($# == 0)); then
    sed -n '2,/^set /{/^#/!d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}" >&2
    exit 2
fi

hostfile="${hostfile:-}"
num_nodes="${num_nodes:-${NNODES:-}}"
node_rank="${node_rank:-${NODE_RANK:-}}"
nproc_per_node="${nproc_per_node:-${NPROC_PER_NODE:-}}"
master_addr="${master_addr:-${MASTER_ADDR:-}}"
master_port="${master_port:-${MASTER_PORT:-29500}}"

launcher=("${PYTHON:-python}" -m deepspeed.launcher.runner --master_port "$master_port")
if [[ -n "$hostfile" ]]; then
    [[ -r "$hostfile" ]] || { echo "error: hostfile $hostfile cannot be read" >&2; exit 2; }
    launcher+=(--hostfile "$hostfile")
fi
if [[ -n "$node_rank" && -n "$hostfile" ]]; then
    if [[ -z "$master_addr" ]]; then
        echo "error: node_rank is $node_rank, and master_addr is not set; remedy: master_addr=ADDRESS of the first host" >&2
        exit 2
    fi
    launcher+=(--no_ssh --node_rank "$node_rank")
fi
[[ -z "$master_addr" ]] || launcher+=(--master_addr "$master_addr")
[[ -z "$num_nodes" ]] || launcher+=(--num_nodes "$num_nodes")
[[ -z "$nproc_per_node" ]] || launcher+=(--num_gpus "$nproc_per_node")
exec "${launcher[@]}" "$root/tools/train.py" "$@"
