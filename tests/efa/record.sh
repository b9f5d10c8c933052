#!/usr/bin/env bash
# record.sh [FILE LIBFABRIC...]: writes tests/native/efa_answers.h (or FILE), by asking the efa providers of the system's
# libfabric and of the `mpich` wheel (or of LIBFABRIC...) over the stand-in (already).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
file=${1:-$here/../native/efa_answers.h}
libraries=("${@:2}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export FI_EFA_ENABLE_SHM_TRANSFER=0 FI_EFA_USE_UNSOLICITED_WRITE_RECV=0
unset FI_LOG_LEVEL
${CXX:-g++} -std=c++17 -Wall -Wextra "$here/record.cpp" -o "$work/record" -ldl
if [ ${#libraries[@]} = 0 ]; then
  bash "$here/build.sh" "$work/system" system
  bash "$here/build.sh" "$work/bundled"
  libraries=("$work/system/libfabric-efa.so" "$work/bundled/libfabric-efa.so")
fi
{
  cat <<'TEXT'
// What libfabric's efa providers answer to requests like the package's: written by tests/efa/record.sh, over the
// stand-in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace {

struct EfaAnswers {
  const char *library, *device, *fabric;
  bool grants_delivery_complete;
  bool wants_rx_cq_data; // it offers nothing to who is not ready for FI_RX_CQ_DATA
  uint64_t mode;
  int mr_mode;
  size_t tx_size, rx_size, inject_size, max_msg_size, cq_data_size, mr_key_size, mr_iov_limit;
  bool progress_auto, orders_sends;
  size_t link_speed; // bits a second; 0: it does not tell
  // Of an endpoint's options; what setting them returned.
  size_t max_message, max_rma, inject_message;
  bool emulated_write;
  int unsolicited_off, cuda_api_off, rnr_retry_7;
};

// clang-format off
constexpr EfaAnswers kEfaAnswers[] = {
TEXT
  for library in "${libraries[@]}"; do
    for device in p4d p5 p5en p6; do EFA_STANDIN=device=$device "$work/record" "$library" $device; done
  done
  cat <<'TEXT'
};
// clang-format on

} // namespace
TEXT
} >"$work/answers.h"
mv "$work/answers.h" "$file"
