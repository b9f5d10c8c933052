#!/usr/bin/env bash
# build.sh [FOLDER [LIBFABRIC]]: builds FOLDER/libfabric-efa.so, which is LIBFABRIC over the stand-in for EFA's libraries,
# with the part of /sys that the provider reads. FOLDER is build/efa by default, where launch.sh finds it for
# TSN_PROVIDER=efa and efa-direct; elsewhere name it: TSN_LIBFABRIC=FOLDER/libfabric-efa.so.
# LIBFABRIC: by default the library of the `mpich` wheel (2.x), else the system's libfabric.so.1; `system` takes the latter.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$here/../..
folder=${1:-$root/build/efa} libfabric=${2:-}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
if [ -z "$libfabric" ]; then
  libfabric=$(PYTHONPATH=$root "$(bash "$root/launch.sh" --setup-only)" -c 'from tilescale_net.runtime.fabric import bundled_library as b; print(b())')
fi
# rdma-core's headers, from the distribution's package where they are not installed.
include=
if [ ! -e /usr/include/infiniband/efadv.h ]; then
  include=$folder/headers/usr/include
  if [ ! -e "$include/infiniband/efadv.h" ]; then
    (cd "$folder" && apt-get download -qq libibverbs-dev && dpkg -x libibverbs-dev_*.deb headers && rm libibverbs-dev_*.deb)
  fi
fi
link=(-l:libfabric.so.1)
if [ -n "$libfabric" ] && [ "$libfabric" != system ]; then link=("$libfabric" "-Wl,-rpath,$(dirname "$libfabric")"); fi
${CXX:-g++} -std=c++17 -O1 -g -fPIC -shared -fvisibility=hidden -Wall -Wextra ${include:+-isystem "$include"} "$here/standin.cpp" \
  -o "$folder/libfabric-efa.so.$$" -Wl,--no-as-needed "${link[@]}" -pthread
mv "$folder/libfabric-efa.so.$$" "$folder/libfabric-efa.so"
sys=$folder/sys
mkdir -p "$sys/class/infiniband_verbs" "$sys/class/infiniband" "$sys/drivers/efa"
echo 1 >"$sys/class/infiniband_verbs/abi_version"
for nic in {0..31}; do
  pci=$sys/devices/$(printf "0000:%02x:00.0" $((16 + nic)))
  mkdir -p "$pci" "$sys/class/infiniband/rdmap${nic}s0"
  ln -sfn ../../drivers/efa "$pci/driver"
  ln -sfn "$pci" "$sys/class/infiniband/rdmap${nic}s0/device"
done
