#!/bin/sh
# Two replicas of the demo model behind SGLang's router: does sending a conversation to the replica that has its prefix pay?
#
#     pip install sglang-router
#     examples/router.sh cache_aware
#     examples/router.sh round_robin
#
# Each run starts cold, and prints what `tierax bench online` measures through the router. Ctrl-C ends everything.
set -eu

policy=${1:-cache_aware}
port=${PORT:-31000}
tierax=${TIERAX:-tierax}
router=${ROUTER:-python3 -m sglang_router.launch_router}
logs=$(mktemp -d)
pids=

stop() {
    for pid in $pids; do kill "$pid" 2>/dev/null || true; done
    wait
}
trap stop EXIT
trap 'exit 1' INT TERM

fail() {
    echo "examples/router.sh: $1; see $logs" >&2
    exit 1
}

wait_for() {
    tries=0
    until curl -fs -o /dev/null "$1"; do
        tries=$((tries + 1))
        [ $tries -lt 300 ] || fail "$1 does not answer"
        sleep 1
    done
}

for replica in 1 2; do
    $tierax serve "${MODEL:-demo}" --port $((port + replica)) --max-num-seqs 4 --data-dir none --log-level warning \
        2>"$logs/replica$replica" &
    pids="$pids $!"
done
for replica in 1 2; do wait_for "http://127.0.0.1:$((port + replica))/ready"; done

$router --host 127.0.0.1 --port "$port" --prometheus-port $((port + 9)) --policy "$policy" --log-level warn \
    --worker-urls "http://127.0.0.1:$((port + 1))" "http://127.0.0.1:$((port + 2))" >"$logs/router" 2>&1 &
pids="$pids $!"
wait_for "http://127.0.0.1:$port/v1/models"
sleep 1

echo "policy $policy"
$tierax bench online --base-url "http://127.0.0.1:$port" --workload multiturn --conversations 12 --running 3 --turns 4 \
    --systems 6 --system-words 192 --first-words 48 --user-words 24 --answer-tokens 8
