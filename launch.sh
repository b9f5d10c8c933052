#!/usr/bin/env bash
# Runs a script on every GPU of a job (or on simulated ones), or the test suite; installs what the machine lacks first.
usage="usage: GPUS=N [NODES=n NODE_RANK=i MASTER_ADDR=host MASTER_PORT=port VIRTUAL_NODES=n] bash launch.sh <script.py | pytest> [args]
       bash launch.sh --setup-only        sets up, then prints the interpreter

GPUS           ranks on this host: one per GPU, or simulated ones without a GPU
NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT
               hosts of the job, this host's index, rank 0's address; run the same line on every host
VIRTUAL_NODES  split the ranks of a host into this many nodes, or these sizes (3+5), which communicate only through the fabric
TSN_DEVICE     cuda or simulator; by default a GPU if there is one
TSN_PYTHON     interpreter to use unchanged; otherwise an active virtual environment, .venv, python3 or a new .venv
TSN_VENV       folder of that virtual environment (.venv)
TSN_TORCH      torch of a new environment: cpu (2 GB in all, from PyTorch's index); default PyPI's, with CUDA (5.3 GB)
TSN_OUTPUT     all: show the output of all ranks, not only of rank 0
TSN_BUILD      0: never build the native code
TSN_PROVIDER   efa or efa-direct without an EFA device: over the emulated one that bash tests/efa/build.sh builds
Under srun, each task is a rank; with GPUS=N and one task per node, each task starts N ranks. Defaults: docs/settings.md"
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# Called by a link elsewhere.
[ -d "$root/tilescale_net" ] || root=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
venv=${TSN_VENV:-$root/.venv}
case "${1:-}" in
  -h | --help) echo "$usage"; exit 0 ;;
  "") echo "$usage" >&2; exit 2 ;;
esac
arguments=("$@")
say() { echo "launch.sh: $*" >&2; }
case "$root" in *:*) say "$root has ':' in its name, which neither PYTHONPATH nor a virtual environment can hold; rename the folder"; exit 2 ;; esac

# Test needs more than running does.
extras=()
case "$1" in pytest | --setup-only) extras=(test) ;; esac

# The suffix of extension modules, then the interpreter's missing packages, by line, in $answer; fails if it does not start.
ask() { answer=$("$1" "$root/tilescale_net/launch/set_up.py" check "${@:2}" 2>/dev/null); }
lacking() { tail -n +2 <<<"$answer" | paste -sd' '; }
complete() { ask "$@" && [ -z "$(lacking)" ]; }

candidates=(${VIRTUAL_ENV:+"$VIRTUAL_ENV/bin/python"} "$venv/bin/python" python3)

# Picks the first interpreter that has everything, extras given included.
choose_python() {
  for python in "${candidates[@]}"; do
    if complete "$python" "$@"; then return; fi
  done
  false
}

# Says why none of them was picked.
reject_pythons() {
  local each
  for each in "${candidates[@]}"; do
    if [ "$each" = python3 ] || [ -e "$each" ] || [ -L "$each" ]; then
      if ask "$each" "${extras[@]}"; then say "$each lacks: $(lacking)"; else say "$each does not start, or is older than Python 3.10"; fi
    fi
  done
}

# Runs a command, with a line every 15 s: its action, its time, and the size of a folder, if one is named.
patiently() {
  local what=$1 folder=$2 begin=$SECONDS ticker status=0
  shift 2
  (
    exec 9>&- 8<> <(:)
    while ! read -rt 15 -u 8 && kill -0 $$ 2>/dev/null; do
      size=$([ -z "$folder" ] || du -sm "$folder" 2>/dev/null | cut -f 1)
      say "still $what ($((SECONDS - begin)) s${size:+, $size MB in $folder})"
    done
  ) &
  ticker=$!
  "$@" || status=$?
  { kill "$ticker" && wait "$ticker"; } 2>/dev/null || true
  return $status
}

# Makes the virtual environment if there is none and installs the packages of pyproject.toml; fails silently.
install() {
  local wanted lacks all=(bench "${extras[@]}")
  if [ ! -x "$venv/bin/python" ]; then
    # Where the machine has a torch of its own, keep it: it is the one that fits the driver.
    patiently "making $venv" "" python3 "$root/tilescale_net/launch/set_up.py" venv $(python3 -c 'import importlib.util as u; u.find_spec("torch") and print("--system-site-packages")') "$venv" || return
  fi
  if "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)'; then
    ask "$venv/bin/python" "${all[@]}"
    lacks="$(tail -n +2 <<<"$answer" | wc -l) Python packages that $venv lacks"
  else
    all+=(fresh)
    lacks="Python packages, torch among them, into $venv: 2 GB, or 5.3 GB with a torch for CUDA (some minutes)"
    if [ -z "${TSN_TORCH:-}" ] && [ ! -e /dev/nvidiactl ]; then
      say "no GPU here: TSN_TORCH=cpu takes a torch without CUDA's libraries, from download.pytorch.org; PyPI has none"
    fi
  fi
  wanted=$("$venv/bin/python" "$root/tilescale_net/launch/set_up.py" list "${all[@]}") || return
  mapfile -t wanted <<<"$wanted"
  say "installing $lacks"
  patiently installing "$venv" "$venv/bin/python" -m pip install -qq --disable-pip-version-check --retries 2 "${wanted[@]}" || return
  complete "$venv/bin/python" "${extras[@]}"
}

# Without a network, tests that need more than running does are left to fail by themselves: better than no tests.
go_on() {
  [ ${#extras[@]} != 0 ] && choose_python || return
  ask "$python" "${extras[@]}"
  say "going on with $python, which lacks: $(lacking)"
}

set_up() {
  local made=no needs=()
  python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
    { say "python3 is missing or older than 3.10; install python3, or name another interpreter in TSN_PYTHON"; exit 1; }
  # What could not run is reported before minutes are spent on it.
  case "${arguments[0]}" in pytest | --setup-only) ;; *) python3 "$root/tilescale_net/launch" --check "${arguments[@]}" || exit ;; esac
  # Missing system packages are reported, and fetched, before the minutes of pip.
  if [ "${TSN_BUILD:-1}" != 0 ]; then
    ask python3
    if stale; then needs+=(headers); fi
  fi
  [ -x "$venv/bin/python" ] || needs+=(venv)
  if [ ${#needs[@]} != 0 ] && ! prepare python3 "${needs[@]}"; then
    go_on || exit 1
    return
  fi
  if [ ! -x "$venv/bin/python" ]; then
    say "setting up $venv (only the first time)"
    made=yes
  fi
  if install >&2; then
    python=$venv/bin/python
    return
  fi
  [ $made = no ] || rm -rf "$venv"
  if go_on; then return; fi
  say "what is missing could not be installed, see above; this needs a network or a local index, once"
  exit 1
}

# Gets missing compiler headers and venv, or prints the missing ones and fails.
prepare() { patiently "looking for what the system lacks" "" "$1" "$root/tilescale_net/launch/set_up.py" prepare "${@:2}"; }

extensions=(tilescale_net/_native tilescale_net/_simulator) instruments=()
if [ -d "$root/benchmark/native" ]; then
  extensions+=(benchmark/instruments) instruments=("$root/benchmark/native")
fi

# True if an extension is missing, older than its sources, or without a fabric that it could have now.
stale() {
  local library
  for library in "${extensions[@]}"; do
    library=$root/$library$(head -n 1 <<<"$answer")
    [ -e "$library" ] || return 0
    [ -z "$(find "$root/tilescale_net/csrc" "$root/tilescale_net/device" "${instruments[@]}" "$root/setup.py" -newer "$library" \
      \( -name '*.cpp' -o -name '*.h' -o -name setup.py \) -print -quit)" ] || return 0
  done
  [ -e "$root/build/without-fabric" ] && "${python:-python3}" "$root/tilescale_net/launch/set_up.py" fabric
}

compile() { log=$(cd "$root" && "$python" setup.py -q build_ext --inplace 2>&1); }

build() {
  prepare "$python" headers || exit 1
  say "building the native part (about a minute on two processors)"
  local log
  patiently building "" compile || { echo "$log" >&2; say "the build failed"; exit 1; }
  local library
  for library in "${extensions[@]}"; do touch "$root/$library$(head -n 1 <<<"$answer")"; done
}

# One set-up at a time, however many launches (or tasks of srun) start at once.
locked() {
  { mkdir -p "$root/build" && : >>"$root/build/.launch.lock"; } 2>/dev/null ||
    { $1; say "$root cannot be written, and something must be $2 in it: run this as its owner or in a copy"; exit 1; }
  exec 9>>"$root/build/.launch.lock"
  flock -n 9 || { say "waiting for another launch that sets up"; flock 9; }
}
if [ -n "${TSN_PYTHON:-}" ]; then
  python=$TSN_PYTHON
  ask "$python" || { say "TSN_PYTHON=$python does not start, or is older than Python 3.10"; exit 2; }
  if [ -n "$(lacking)" ]; then
    say "TSN_PYTHON=$python lacks: $(lacking)"
    # Another version may do; without these nothing does.
    "$python" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("tilelang")))' ||
      { say "install them there, name another interpreter, or leave TSN_PYTHON out: an environment with them is then made"; exit 2; }
  fi
else
  choose_python "${extras[@]}" || { locked reject_pythons installed; choose_python "${extras[@]}" || set_up; }
fi
if [ "${TSN_BUILD:-1}" != 0 ] && stale; then
  locked true built
  if stale; then build; fi
fi
exec 9>&-
if [ "$1" = --setup-only ]; then
  "$python" -c 'import sys; print(sys.executable)'
  exit 0
fi

# Without a device, EFA's provider runs over the build of tests/efa/build.sh.
standin=$root/build/efa/libfabric-efa.so
case "${TSN_PROVIDER:-}" in
  efa | efa-direct)
    if [ -z "${TSN_LIBFABRIC:-}" ] && [ ! -e /sys/module/efa ] && [ -e "$standin" ]; then
      say "no EFA device: provider $TSN_PROVIDER runs over the stand-in, ${standin#"$root/"}; times mean nothing"
      export TSN_LIBFABRIC=$standin
    fi ;;
esac

if [ "$1" = pytest ]; then
  shift
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
  cd "$root"
  # The whole suite runs on all processors; a choice of tests runs as the arguments say.
  if [ $# = 0 ] && "$python" -c 'import xdist' 2>/dev/null; then set -- -n auto; fi
  exec "$python" -m pytest "$@"
fi
exec "$python" "$root/tilescale_net/launch" "$@"
