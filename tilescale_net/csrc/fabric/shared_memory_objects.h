// Objects in /dev/shm through which libfabric's shm provider reaches the processes of a host. Their names begin with
// the pid and the uid of their owner; a process that is killed leaves them behind.
#pragma once

#include <string>

namespace tsn::fabric {

// Those of processes of this user that have ended.
void remove_objects_of_ended_processes();

// Those of one endpoint, given by its address; does nothing for endpoints of other providers.
void remove_objects_of_endpoint(const std::string& address);

// What to say where the provider is not offered for want of room; empty where there seems to be enough.
std::string no_room_for_shared_memory();

} // namespace tsn::fabric
