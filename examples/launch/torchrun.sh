#!/usr/bin/env bash
# Train on several nodes: type the same line on each of them, and again on one that comes back.
#
#     HOST=node-a NODES=2 examples/launch/torchrun.sh --out /shared/runs/mine --save-every 50 --timeout 300
#
#   HOST     the node that keeps the list of who takes part, by a name the others can reach; HOST=node-a:29400 sets a port
#   NODES    2, or 1:2: at least one and at most two, who is there goes on without the others
#   RANKS    per node: gpu, one for each, or a number
#   ADDRESS  of this node, where its own name means nothing to the others
#   TRIES    how often this script starts torchrun
set -euo pipefail

# Without this, PyTorch 2.13 lets no node in after the first meeting: docs/how-to/nodes.md.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# torchrun gives its ranks sessions of their own: they go when it is told to, not when it is killed.
# shellcheck disable=SC2329
stop() {
    kill -TERM "$agent"
    wait "$agent" || true
    exit 143
}
trap stop INT TERM

for ((try = 1; try <= ${TRIES:-10}; try++)); do
    # --max-restarts counts what happens between nodes that stay: a rank fails, all start again from the last checkpoint.
    # When HOST is gone, torchrun itself ends on every node: hence the loop around it.
    torchrun \
        --nnodes="${NODES:-2}" \
        --nproc-per-node="${RANKS:-gpu}" \
        --max-restarts=10 \
        --rdzv-backend=c10d \
        --rdzv-endpoint="$HOST" \
        --rdzv-id=train_gpt \
        ${ADDRESS:+--local-addr="$ADDRESS"} \
        "$(dirname "$0")/../train_gpt.py" "$@" &
    agent=$!
    wait "$agent" && exit 0
    echo "torchrun ended, try $try of ${TRIES:-10}" >&2
    sleep 5
done
exit 1
