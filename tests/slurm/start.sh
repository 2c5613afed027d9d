#!/usr/bin/env bash
# Starts a Slurm of two nodes for the tests of this checkout, beside any other on this machine: munged, slurmctld and
# two slurmd with their own folder, key and ports. Jobs are on the first node unless they ask for --partition=two. Prints the path of its configuration, by which Slurm's commands find it:
#
#     SLURM_CONF=$(tests/slurm/start.sh) make test
#
# It installs Debian's slurm-wlm and munge if they are missing, which needs root; the daemons run as the caller. A Slurm
# that answers is left alone; the remains of one that does not are ended. Its logs are in the configuration's folder.
# `tests/slurm/start.sh stop` ends it.
set -euo pipefail
exec </dev/null

checkout=$(cd "$(dirname "$0")/../.." && pwd -P)
dir=${TMPDIR:-/tmp}/gpt_pretrain_slurm_$(id -u)_$(cksum <<<"$checkout" | cut -d ' ' -f 1)
export SLURM_CONF=$dir/slurm.conf
export PATH=$PATH:/usr/sbin:/sbin
user=$(id -un)
host=$(hostname -s)
# Only the first name can be looked up, and the ranks meet there. The second sorts behind it.
nodes=("$host" "$host-b")

fail() {
    printf 'error: %s\n' "$@" >&2
    tail -n 20 "$dir"/*.log >&2 2>/dev/null || true
    exit 1
}

# Whether the node takes jobs. Without a controller sinfo would retry for minutes.
is_up() { [[ -f $SLURM_CONF && $(timeout 5 sinfo --noheader --partition=two --format=%t 2>/dev/null) =~ ^(idle|mix|alloc|comp)$ ]]; }

# Another process may have the number by now, and in a container the dead may remain as zombies.
is_alive() {
    [[ $(cat "/proc/$2/comm" 2>/dev/null) == "$1" ]] && ! grep -q '^State:.*Z' "/proc/$2/status" 2>/dev/null
}

stop() {
    local daemon pid
    # Jobs would outlive slurmd.
    if [[ -f $SLURM_CONF ]] && timeout 10 scancel --user="$user" 2>/dev/null; then
        for _ in {1..30}; do
            [[ $(timeout 5 squeue --noheader 2>/dev/null) ]] || break
            sleep 0.5
        done
    fi
    for daemon in "${nodes[@]/#/slurmd.}" slurmctld munged; do
        pid=$(cat "$dir/$daemon.pid" 2>/dev/null) || continue
        is_alive "${daemon%%.*}" "$pid" || continue
        kill "$pid"
        for _ in {1..50}; do
            is_alive "${daemon%%.*}" "$pid" || continue 2
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$dir"
}

install() {
    local missing=()
    command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null || missing+=(slurm-wlm)
    command -v munged >/dev/null || missing+=(munge)
    if ((${#missing[@]})); then
        # The package's own services stay off: the daemons here have their own configuration.
        export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
        timeout 300 apt-get update -q >&2
        timeout 600 apt-get install -q -y --no-install-recommends "${missing[@]}" >&2
    fi
}

# A free port other than the arguments.
free_port() {
    local port
    while
        port=$((RANDOM % 2700 + 30000))
        [[ " $* " == *" $port "* ]] || (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null
    do :; done
    echo "$port"
}

configure() {
    local ctld_port ports
    ctld_port=$(free_port)
    ports=("$(free_port "$ctld_port")")
    ports+=("$(free_port "$ctld_port" "${ports[0]}")")
    mkdir -p "$dir/state" "${nodes[@]/#/$dir/spool.}"
    # munged refuses a folder that others can write to, and jobs must reach its socket.
    chmod 755 "$dir"
    head -c 128 /dev/urandom >"$dir/munge.key"
    chmod 600 "$dir/munge.key"
    # Files that stand for GPUs, for the scripts' arithmetic.
    touch "$dir"/gpu{0..3}
    echo "NodeName=$host Name=gpu File=$dir/gpu[0-3]" >"$dir/gres.conf"
    # Tracks processes by their parents, without cgroups, which a container may lack.
    echo "CgroupPlugin=cgroup/v1" >"$dir/cgroup.conf"
    cat >"$SLURM_CONF" <<CONF
ClusterName=tests
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$user
SlurmdUser=$user
SlurmctldPort=$ctld_port
AuthType=auth/munge
# A requeued job waits until its old credential expires: two minutes by default.
AuthInfo=socket=$dir/munge.socket,cred_expire=5
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool.%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
# Allows more CPUs than the machine has: jobs mostly wait, and other tests run beside them.
SlurmdParameters=config_overrides
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_interval=2,sched_min_interval=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
# Seconds that a step has to end after SIGTERM.
KillWait=10
ReturnToService=2
NodeName=$host NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[0]} CPUs=16 Gres=gpu:4 State=UNKNOWN
NodeName=${nodes[1]} NodeHostname=$host NodeAddr=127.0.0.1 Port=${ports[1]} CPUs=16 State=UNKNOWN
PartitionName=tests Nodes=$host Default=YES MaxTime=30 State=UP
PartitionName=two Nodes=$host,${nodes[1]} MaxTime=30 State=UP
CONF
}

start() {
    # Daemons must keep neither the caller's pipe nor its terminal.
    timeout 30 munged --socket="$dir/munge.socket" --key-file="$dir/munge.key" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munged.log" --seed-file="$dir/munged.seed" >>"$dir/start.log" 2>&1 || fail "munged did not start"
    timeout 30 slurmctld -c >>"$dir/start.log" 2>&1 || fail "slurmctld did not start"
    for node in "${nodes[@]}"; do
        timeout 30 slurmd -N "$node" >>"$dir/start.log" 2>&1 || fail "slurmd of $node did not start"
    done
    for _ in {1..60}; do
        if is_up; then
            return
        fi
        sleep 0.5
    done
    fail "Slurm did not come up in 30 s; its logs:"
}

if [[ ${1:-} == stop ]]; then
    stop
    exit
fi
install
if ! is_up; then
    stop
    configure
    start
fi
echo "$SLURM_CONF"
