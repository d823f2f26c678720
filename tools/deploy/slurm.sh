#!/usr/bin/env bash
#SBATCH --job-name=vla-stream
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --time=24:00:00
#SBATCH --signal=B:INT@180
#SBATCH --requeue
#SBATCH --open-mode=append
# One run on the nodes of a Slurm job: Redis and the trainer on the first, generators and simulators on the others.
#
#   sbatch --nodes=5 tools/deploy/slurm.sh my-run configs/libero.yaml configs/pi0.yaml --set updates=500
#
# The first word is the run's name, the rest is what `vla-stream run` takes. What differs between clusters is in
# variables, given by `sbatch --export=ALL,GENERATORS=2,…`:
#
#   GENERATORS   per node, each on a GPU of its own; default: as many as the node has GPUs, or 1
#   SIMULATORS   per node; default: 8
#   VLA_STREAM   the command; default: .venv/bin/vla-stream of the folder that sbatch was called in, which all nodes see
#
# Three minutes before its time is over the job is told to drain: segments in flight are finished, a checkpoint is
# written, and the job queues again; it then goes on from there. So does one whose node failed.
set -euo pipefail

[ $# -ge 2 ] || { echo "usage: sbatch [options of sbatch] slurm.sh RUN CONFIG... [options of vla-stream run]" >&2; exit 2; }
run=$1
shift
cd "${SLURM_SUBMIT_DIR:?this is for sbatch}"
command=${VLA_STREAM:-$PWD/.venv/bin/vla-stream}
python=$(dirname "$command")/python
gpus=${SLURM_GPUS_ON_NODE:-0}
generators=${GENERATORS:-$((gpus > 0 ? gpus : 1))}
simulators=${SIMULATORS:-8}
devices=$([ "$gpus" -gt 0 ] && seq -f 'cuda:%.0f' -s, 0 $((gpus - 1)) || echo cpu)
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
[ ${#nodes[@]} -ge 2 ] || { echo "slurm.sh: ${#nodes[@]} node, expected at least 2" >&2; exit 2; }

# The server dies with the job. Its password stands in no command line: here on its stdin, there in the environment.
password=$(openssl rand -hex 24)
port=${REDIS_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
folder=$(mktemp -d)
server=$("$python" -c 'from vla_stream.broker.server import find_binary; print(find_binary())')
"$server" - <<END >"$folder/redis.log" 2>&1 &
bind 0.0.0.0
port $port
requirepass $password
maxmemory-policy noeviction
save ""
dir $folder
END
redis=$!
export VLA_STREAM_REDIS="redis://:$password@${nodes[0]}:$port/0"

pools=()
end() {
    if [ ${#pools[@]} -gt 0 ]; then  # without pids `wait` waits for all, the server too
        kill "${pools[@]}" 2>/dev/null || true  # srun passes it on, and pools drain
        wait "${pools[@]}" 2>/dev/null || true
    fi
    kill $redis 2>/dev/null || true
    rm -rf "$folder"
}
trap end EXIT

again=()
[ ! -e "runs/$run/config.yaml" ] || again=(--resume)
"$command" run "$@" --run "$run" --plain "${again[@]}" --set simulators.count=0 --set generators.count=0 &
trainer=$!
over=
trap 'over=1; kill -INT $trainer 2>/dev/null || true' INT TERM

# Pools may only join what is there.
until "$command" status --run "$run" --json >/dev/null 2>&1; do
    kill -0 $trainer 2>/dev/null || { wait $trainer || exit $?; exit; }
    sleep 1
done
for node in "${nodes[@]:1}"; do
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" \
        "$command" generators --run "$run" -n "$generators" --device "$devices" &
    pools+=($!)
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" "$command" simulators --run "$run" -n "$simulators" &
    pools+=($!)
done

# A signal ends `wait`, not what it waits for.
while kill -0 $trainer 2>/dev/null; do
    wait $trainer || true
done
code=0
wait $trainer || code=$?
if [ -n "$over" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
