#!/usr/bin/env bash
# Compiles the fabric part against the headers of a current libfabric (2.x), where DMABUF registration exists, on a
# machine whose own libfabric is older. TSN_LIBFABRIC2_INCLUDE names a folder with them; otherwise Debian 13's package
# is unpacked, without installing it, into build/libfabric2.
set -euo pipefail
cd "$(dirname "$0")/../.."
include=${TSN_LIBFABRIC2_INCLUDE:-build/libfabric2/usr/include}
if [ ! -f "$include/rdma/fabric.h" ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work/lists/partial" "$work/sources" build/libfabric2
  for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.sources /etc/apt/sources.list.d/*.list; do
    if [ -f "$file" ]; then sed 's/bookworm/trixie/g' "$file" >"$work/sources/$(basename "$file")"; fi
  done
  touch "$work/sources/sources.list"
  options=(-o Dir::State::Lists="$work/lists" -o Dir::Etc::SourceParts="$work/sources"
    -o Dir::Etc::SourceList="$work/sources/sources.list" -o APT::Sandbox::User=root)
  apt-get "${options[@]}" -qq update
  (cd "$work" && apt-get "${options[@]}" -qq download libfabric-dev)
  dpkg -x "$work"/libfabric-dev*.deb build/libfabric2
fi
python=$(bash launch.sh --setup-only)
# The flags of setup.py; without -fvisibility=hidden, classes that hold objects of pybind11 raise a warning.
flags="-std=c++17 -O1 -Wall -Wextra -Werror -fvisibility=hidden -Wno-unused-parameter -I. -I$include"
flags="$flags $("$python" -m pybind11 --includes)"
# A macro of the newer interface must be in force, or the check below would prove nothing.
echo '#include <rdma/fi_domain.h>
#ifndef FI_MR_DMABUF
#error "these headers do not know FI_MR_DMABUF"
#endif' | g++ $flags -x c++ -fsyntax-only -
printf '%s\n' tilescale_net/csrc/fabric/*.cpp | xargs -P 2 -I{} g++ $flags -fsyntax-only {}
echo "tilescale_net/csrc/fabric compiles with $(grep -hoE 'FI_(MAJOR|MINOR)_VERSION [0-9]+' "$include/rdma/fabric.h" | awk '{print $2}' | paste -sd.) headers"
