// Remote writes that have been issued and not yet delivered.
//
// The memory model lets a put become visible long after it was issued; on a real machine it nearly never does, so that
// kernels pass that will fail one day. Here operations wait in a list of this process and reach the peer's heap as
// late, and in as odd an order, as the model allows:
//   - data of puts arrives in pieces, in any order, and is read from the source when it arrives;
//   - the signal of a put_signal follows all pieces of its own put, and may overtake any other put;
//   - a signal sent after a fence follows all data that was issued to that PE before the fence;
//   - signals to one word arrive in the order in which they were issued;
//   - quiet delivers everything.
// Everything is delivered in the end, also when no kernel runs any more.
#pragma once

#include "random.h"
#include "tilescale_net/device/host/simulator_api.h"

namespace tsn {
namespace sim {

enum class Visibility { eager, late, random };
void set_visibility(Visibility visibility);

extern const RemoteApi kRemoteApi;

// Called by the scheduler when threads only poll or rounds have passed; `must` asks for progress if there is any left
// to make. Returns whether something was delivered.
bool remote_progress(Random& random, bool must);

void remote_kernel_begin();
// At the end of a kernel: operations outlive it, for a while.
void remote_kernel_end(Random& random);

// Delivers everything that is pending in this process.
void flush_pending();

// Operations waiting for delivery.
uint64_t pending_operations();

} // namespace sim
} // namespace tsn
